"""The sizes of the proofs, and arrays of symbols of these sizes."""

from sympy import Symbol, symarray

N, T = 2, 2  # positions, all in a row or in one sequence
D, F, V = 3, 2, 3  # features, inner features, vocabulary


def symbols(name, *shape):
    return symarray(name, shape, real=True)


def positive(name):
    return Symbol(name, positive=True)
