"""Training runs by flags: what train_shakespeare.py is made of."""
