"""Cross-entropy: straight from the logits, and once more by way of softmax."""

import numpy as np
from symbolic import delta, derivative, gradient, table
from sympy import Max, Symbol, exp, log

from equations.sizes import V, symbols
from equations.softmax import Softmax
from numpygpt import layers


class CrossEntropy:
    of = layers.CrossEntropy
    output = "L"
    given = dict(x=symbols("x", 3, V), y=np.array([2, 0, 1]), dL=Symbol("dL", real=True))
    held = dict(M=symbols("M", 3))
    cases = {
        "all count": dict(a=np.array([1, 1, 1])),
        "one ignored": dict(a=np.array([1, 0, 1])),
    }

    def z(x, M):
        r"""z_{nv} = x_{nv} - M_n, \qquad"""
        return table(lambda n, v: x[n, v] - M[n], 3, V)

    def M(x):
        r"""M_n = \max_v x_{nv} \tag{1}"""
        return table(lambda n: Max(*x[n]), 3)

    def ell(z, y):
        r"""\ell_n = \log \sum_v e^{z_{nv}} - z_{n y_n} \tag{2}"""
        return table(lambda n: log(sum(exp(z[n, v]) for v in range(V))) - z[n, y[n]], 3)

    def L(a, ell):
        r"""L = \frac1N \sum_n a_n\, \ell_n \tag{3}"""
        return sum(a[n] * ell[n] for n in range(3)) / sum(a)

    @gradient("M")
    def dM():
        return table(lambda n: 0, 3)

    @gradient("ell")
    def dell(a, dL):
        return table(lambda n: a[n] * dL / sum(a), 3)

    @derivative("ell", "x", same=1)
    def dell_dx_first(z, y):
        r"""\frac{\partial \ell_n}{\partial x_{nv}} = \frac{e^{z_{nv}}}{\sum_k e^{z_{nk}}} - \mathbb 1[v = y_n]"""
        return table(lambda n, v: exp(z[n, v]) / sum(exp(z[n, k]) for k in range(V)) - delta(v, y[n]), 3, V)

    def p(x):
        return table(lambda n, v: exp(x[n, v]) / sum(exp(x[n, k]) for k in range(V)), 3, V)

    @derivative("ell", "x", same=1)
    def dell_dx(p, y):
        r"""= p_{nv} - \mathbb 1[v = y_n] \tag{4}"""
        return table(lambda n, v: p[n, v] - delta(v, y[n]), 3, V)

    @derivative("ell", "x", same=1)
    def dell_dx_by_softmax(p, y):
        dp = table(lambda n, v: -delta(v, y[n]) / p[n, v], 3, V)
        return np.array([Softmax.dx(dp_n, p_n) for dp_n, p_n in zip(dp, p, strict=True)])

    @gradient("x")
    def dx(a, dL, p, y):
        r"""\bar x_{nv} = \frac{a_n\, \bar L}{N}\,\big(p_{nv} - \mathbb 1[v = y_n]\big) \tag{5}"""
        return table(lambda n, v: a[n] * dL / sum(a) * (p[n, v] - delta(v, y[n])), 3, V)

    def code(x, y, a, dL):
        layer = layers.CrossEntropy(ignore_index=-1)
        return {"L": layer(x, np.where(a, y, -1)), "dx": layer.backward(dL)}
