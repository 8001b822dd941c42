"""Softmax: of any scores, and where one of them is minus infinity."""

import numpy as np
from symbolic import delta, derivative, gradient, table
from sympy import Max, Symbol, exp, oo

from equations.sizes import D, symbols
from numpygpt import layers


class Softmax:
    of = layers.Softmax
    output = "p"
    given = dict(dp=symbols("dp", D))
    held = dict(M=Symbol("M", real=True))
    x = symbols("x", D)
    cases = {"": dict(x=x), "a score of minus infinity": dict(x=np.array([x[0], -oo, x[2]], object))}

    def M(x):
        return Max(*x)

    def e(x, M):
        r"""e_s = e^{x_s - M} \tag{1}"""
        return table(lambda s: exp(x[s] - M), len(x))

    def p(e):
        r"""p_s = e_s \Big/ \sum_k e_k \tag{2}"""
        return table(lambda s: e[s] / sum(e) if any(e) else 0, len(e))  # 0 where every score is minus infinity

    @gradient("M")
    def dM():
        return 0

    def Z(e):
        return sum(e)

    @derivative("p", "x")
    def dp_dx_first(e, Z):
        r"""\frac{\partial p_k}{\partial x_s} = \frac{\delta_{ks}\, e_s}{Z} - \frac{e_k\, e_s}{Z^2}"""
        return table(lambda k, s: delta(k, s) * e[s] / Z - e[k] * e[s] / Z**2, D, D)

    @derivative("p", "x")
    def dp_dx(p):
        r"""= p_s\,(\delta_{ks} - p_k) \tag{3}"""
        return table(lambda k, s: p[s] * (delta(k, s) - p[k]), D, D)

    @gradient("x")
    def dx_first(dp, p):
        r"""\bar x_s = \sum_k \bar p_k\, p_s\,(\delta_{ks} - p_k)"""
        return table(lambda s: sum(dp[k] * p[s] * (delta(k, s) - p[k]) for k in range(D)), D)

    @gradient("x")
    def dx(dp, p):
        r"""= p_s \Big(\bar p_s - \sum_k \bar p_k\, p_k\Big) \tag{4}"""
        return table(lambda s: p[s] * (dp[s] - sum(dp[k] * p[k] for k in range(D))), D)

    def code(x, dp):
        layer = layers.Softmax()
        return {"p": layer(x), "dx": layer.backward(dp)}
