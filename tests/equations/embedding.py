"""Embedding: rows of a table, where one is asked for twice and one never."""

import numpy as np
from symbolic import gradient, same_as, table

from equations.sizes import D, V, symbols
from numpygpt import layers


class Embedding:
    of = layers.Embedding
    output = "y"
    ids = np.array([2, 0, 2])  # one comes twice, one never
    given = dict(W=symbols("W", V, D), v_=ids, dy=symbols("dy", 3, D))

    def y(v_, W):
        r"""y_{nc} = \sum_v \mathbb 1[v_n = v]\, W_{vc}"""
        return table(lambda n, c: sum(int(v_[n] == v) * W[v, c] for v in range(V)), 3, D)

    @same_as("y")
    def row(v_, W):
        r"""= W_{v_n c} \tag{1}"""
        return table(lambda n, c: W[v_[n], c], 3, D)

    @gradient("W")
    def dW(v_, dy):
        r"""\bar W_{vc} = \sum_n \mathbb 1[v_n = v]\, \bar y_{nc}"""
        return table(lambda v, c: sum(int(v_[n] == v) * dy[n, c] for n in range(3)), V, D)

    @gradient("W")
    def dW_scattered(v_, dy):
        r"""= \sum_{n:\, v_n = v} \bar y_{nc} \tag{2}"""
        return table(lambda v, c: sum(dy[n, c] for n in range(3) if v_[n] == v), V, D)

    def code(v_, W, dy):
        layer = layers.Embedding(V, D, dtype=np.float64)
        layer.weight.value = W
        y = layer(v_)
        layer.backward(dy)
        return {"y": y, "dW": layer.weight.grad}
