"""Linear: W x + b, and all its derivatives, element by element."""

import numpy as np
from symbolic import delta, derivative, gradient, table

from equations.sizes import D, F, N, symbols
from numpygpt import layers


class Linear:
    of = layers.Linear
    output = "y"
    given = dict(x=symbols("x", N, D), W=symbols("W", F, D), b=symbols("b", F), dy=symbols("dy", N, F))

    def y(W, x, b):
        r"""y_{no} = \sum_i W_{oi}\, x_{ni} + b_o \tag{1}"""
        return table(lambda n, o: sum(W[o, i] * x[n, i] for i in range(D)) + b[o], N, F)

    @derivative("y", "W")
    def dy_dW(x):
        r"""\frac{\partial y_{no}}{\partial W_{pi}} = \delta_{op}\, x_{ni}, \qquad"""
        return table(lambda n, o, p, i: delta(o, p) * x[n, i], N, F, F, D)

    @derivative("y", "b")
    def dy_db():
        r"""\frac{\partial y_{no}}{\partial b_p} = \delta_{op}, \qquad"""
        return table(lambda n, o, p: delta(o, p), N, F, F)

    @derivative("y", "x")
    def dy_dx(W):
        r"""\frac{\partial y_{no}}{\partial x_{mi}} = \delta_{nm}\, W_{oi} \tag{2}"""
        return table(lambda n, o, m, i: delta(n, m) * W[o, i], N, F, N, D)

    @gradient("W")
    def dW(dy, x):
        r"""\bar W_{oi} = \sum_n \bar y_{no}\, x_{ni} \tag{3}"""
        return table(lambda o, i: sum(dy[n, o] * x[n, i] for n in range(N)), F, D)

    @gradient("b")
    def db(dy):
        r"""\bar b_o = \sum_n \bar y_{no} \tag{4}"""
        return table(lambda o: sum(dy[n, o] for n in range(N)), F)

    @gradient("x")
    def dx(dy, W):
        r"""\bar x_{ni} = \sum_o \bar y_{no}\, W_{oi} \tag{5}"""
        return table(lambda n, i: sum(dy[n, o] * W[o, i] for o in range(F)), N, D)

    def code(x, W, b, dy):
        layer = layers.Linear(D, F, bias=True, dtype=np.float64)
        layer.weight.value, layer.bias.value = W, b
        return {"y": layer(x), "dx": layer.backward(dy), "dW": layer.weight.grad, "db": layer.bias.grad}
