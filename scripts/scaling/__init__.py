"""What it takes to train with many ranks: the model of docs/scaling.md, and its constants as measured here."""
