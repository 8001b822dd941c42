"""Dropout: one feature dropped and one kept, and the mean over both."""

from types import SimpleNamespace

import numpy as np
from symbolic import gradient, same_as

from equations.sizes import positive, symbols
from numpygpt import layers


class Dropout:
    of = layers.Dropout
    output = "y"
    given = dict(x=symbols("x", 2), m=np.array([0, 1]), p=positive("p"), dy=symbols("dy", 2))

    def y(m, p, x):
        r"""y = \frac{m}{1-p}\, x, \qquad"""
        return m / (1 - p) * x

    def expected_y(p, x):
        return p * Dropout.y(0, p, x) + (1 - p) * Dropout.y(1, p, x)

    @same_as("expected_y")
    def expected_y_is(x):
        r"""E[y] = x \tag{1}"""
        return x

    @gradient("x")
    def dx(m, p, dy):
        r"""\bar x = \frac{m}{1-p}\, \bar y \tag{2}"""
        return m / (1 - p) * dy

    def code(x, m, p, dy):
        layer = layers.Dropout(p)
        layer.rng = SimpleNamespace(random=lambda shape, dtype: np.where(m, 1.0, 0.0))  # a draw below p drops
        return {"y": layer(x), "dx": layer.backward(dy)}
