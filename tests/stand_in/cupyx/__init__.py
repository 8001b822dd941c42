"""A stand-in for the part of CuPy that has its own name."""
