"""A Transformer language model in pure NumPy, with every gradient derived by hand."""
