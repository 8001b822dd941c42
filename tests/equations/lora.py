"""LoRA: a linear map and one of low rank beside it, and both merged into one."""

import numpy as np
from symbolic import delta, derivative, gradient, same_as, table
from sympy import Symbol

from equations.sizes import D, F, N, symbols
from numpygpt import layers

R = 2  # the rank


class LoRALinear:
    of = layers.LoRALinear
    output = "y"
    given = dict(
        x=symbols("x", N, D),
        W=symbols("W", F, D),
        b=symbols("b", F),
        A=symbols("A", R, D),
        B=symbols("B", F, R),
        gamma=Symbol("gamma", positive=True),
        dy=symbols("dy", N, F),
    )

    def h(gamma, A, x):
        r"""h_{nr} = \gamma \sum_i A_{ri}\, x_{ni} \tag{1}"""
        return table(lambda n, r: gamma * sum(A[r, i] * x[n, i] for i in range(D)), N, R)

    def y(W, x, b, B, h):
        r"""y_{no} = \sum_i W_{oi}\, x_{ni} + b_o + \sum_r B_{or}\, h_{nr} \tag{2}"""

        def formula(n, o):
            return sum(W[o, i] * x[n, i] for i in range(D)) + b[o] + sum(B[o, r] * h[n, r] for r in range(R))

        return table(formula, N, F)

    @derivative("y", "B")
    def dy_dB(h):
        r"""\frac{\partial y_{no}}{\partial B_{pr}} = \delta_{op}\, h_{nr}, \qquad"""
        return table(lambda n, o, p, r: delta(o, p) * h[n, r], N, F, F, R)

    @derivative("y", "h")
    def dy_dh(B):
        r"""\frac{\partial y_{no}}{\partial h_{mr}} = \delta_{nm}\, B_{or}, \qquad"""
        return table(lambda n, o, m, r: delta(n, m) * B[o, r], N, F, N, R)

    @derivative("h", "A")
    def dh_dA(gamma, x):
        r"""\frac{\partial h_{nr}}{\partial A_{qi}} = \gamma\, \delta_{rq}\, x_{ni}, \qquad"""
        return table(lambda n, r, q, i: gamma * delta(r, q) * x[n, i], N, R, R, D)

    @derivative("h", "x")
    def dh_dx(gamma, A):
        r"""\frac{\partial h_{nr}}{\partial x_{mi}} = \gamma\, \delta_{nm}\, A_{ri} \tag{3}"""
        return table(lambda n, r, m, i: gamma * delta(n, m) * A[r, i], N, R, N, D)

    @gradient("B")
    def dB(dy, h):
        r"""\bar B_{or} = \sum_n \bar y_{no}\, h_{nr} \tag{4}"""
        return table(lambda o, r: sum(dy[n, o] * h[n, r] for n in range(N)), F, R)

    @gradient("h")
    def dh(dy, B):
        r"""\bar h_{nr} = \sum_o \bar y_{no}\, B_{or} \tag{5}"""
        return table(lambda n, r: sum(dy[n, o] * B[o, r] for o in range(F)), N, R)

    @gradient("A")
    def dA(gamma, dh, x):
        r"""\bar A_{ri} = \gamma \sum_n \bar h_{nr}\, x_{ni} \tag{6}"""
        return table(lambda r, i: gamma * sum(dh[n, r] * x[n, i] for n in range(N)), R, D)

    @gradient("x")
    def dx(dy, W, gamma, dh, A):
        r"""\bar x_{ni} = \sum_o \bar y_{no}\, W_{oi} + \gamma \sum_r \bar h_{nr}\, A_{ri} \tag{7}"""

        def formula(n, i):
            return sum(dy[n, o] * W[o, i] for o in range(F)) + gamma * sum(dh[n, r] * A[r, i] for r in range(R))

        return table(formula, N, D)

    def M(W, gamma, B, A):
        r"""M_{oi} = W_{oi} + \gamma \sum_r B_{or}\, A_{ri}, \qquad"""
        return table(lambda o, i: W[o, i] + gamma * sum(B[o, r] * A[r, i] for r in range(R)), F, D)

    @same_as("y")
    def y_merged(M, x, b):
        r"""y_{no} = \sum_i M_{oi}\, x_{ni} + b_o \tag{8}"""
        return table(lambda n, o: sum(M[o, i] * x[n, i] for i in range(D)) + b[o], N, F)

    def code(x, W, b, A, B, gamma, dy):
        linear = layers.Linear(D, F, bias=True, dtype=np.float64)
        linear.weight.value, linear.bias.value = W, b
        layer = layers.LoRALinear(linear, R, R * gamma)
        layer.A.value, layer.B.value = A, B
        answers = {"y": layer(x), "dx": layer.backward(dy), "M": layer.merged()}
        return answers | {"dA": layer.A.grad, "dB": layer.B.grad}
