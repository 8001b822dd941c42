"""RMSNorm and LayerNorm: every step of the two derivations, each from the one before."""

import numpy as np
from symbolic import delta, derivative, gradient, table
from sympy import Rational

from equations.sizes import D, N, positive, symbols
from numpygpt import layers


class RMSNorm:
    of = layers.RMSNorm
    output = "y"
    given = dict(x=symbols("x", N, D), w=symbols("w", D), eps=positive("eps"), dy=symbols("dy", N, D))

    def r(eps, x):
        r"""r_n = \Big(\varepsilon + \tfrac1D \sum_c x_{nc}^2\Big)^{-1/2} \tag{1}"""
        return table(lambda n: (eps + sum(x[n, c] ** 2 for c in range(D)) / D) ** Rational(-1, 2), N)

    def h(r, x):
        r"""h_{nc} = r_n\, x_{nc} \tag{2}"""
        return table(lambda n, c: r[n] * x[n, c], N, D)

    def y(w, h):
        r"""y_{nc} = w_c\, h_{nc} \tag{3}"""
        return table(lambda n, c: w[c] * h[n, c], N, D)

    @gradient("w")
    def dw(dy, h):
        r"""\bar w_c = \sum_n \bar y_{nc}\, h_{nc} \tag{4}"""
        return table(lambda c: sum(dy[n, c] * h[n, c] for n in range(N)), D)

    @gradient("h")
    def dh(dy, w):
        r"""\bar h_{nc} = \bar y_{nc}\, w_c \tag{5}"""
        return table(lambda n, c: dy[n, c] * w[c], N, D)

    @derivative("r", "x", same=1)
    def dr_dx(r, h):
        return table(lambda n, c: -(r[n] ** 2) * h[n, c] / D, N, D)

    @derivative("h", "x", same=1)
    def dh_dx_first(r, x, dr_dx):
        r"""\frac{\partial h_{nk}}{\partial x_{nc}} = r_n \delta_{kc} + x_{nk} \frac{\partial r_n}{\partial x_{nc}}"""
        return table(lambda n, k, c: r[n] * delta(k, c) + x[n, k] * dr_dx[n, c], N, D, D)

    @derivative("h", "x", same=1)
    def dh_dx(r, h):
        r"""= r_n\Big(\delta_{kc} - \tfrac1D h_{nk} h_{nc}\Big) \tag{6}"""
        return table(lambda n, k, c: r[n] * (delta(k, c) - h[n, k] * h[n, c] / D), N, D, D)

    def s(dh, h):
        r"""s_n = \tfrac1D \sum_k \bar h_{nk}\, h_{nk} \tag{7}"""
        return table(lambda n: sum(dh[n, k] * h[n, k] for k in range(D)) / D, N)

    @gradient("x")
    def dx(r, dh, s, h):
        r"""\bar x_{nc} = r_n\big(\bar h_{nc} - s_n\, h_{nc}\big) \tag{8}"""
        return table(lambda n, c: r[n] * (dh[n, c] - s[n] * h[n, c]), N, D)

    def code(x, w, eps, dy):
        layer = layers.RMSNorm(D, eps, dtype=np.float64)
        layer.weight.value = w
        return {"y": layer(x), "dx": layer.backward(dy), "dw": layer.weight.grad}


class LayerNorm:
    of = layers.LayerNorm
    output = "y"
    given = dict(RMSNorm.given, b=symbols("b", D))

    def u(x):
        r"""u_{nc} = x_{nc} - \tfrac1D \sum_k x_{nk} \tag{1}"""
        return table(lambda n, c: x[n, c] - sum(x[n, k] for k in range(D)) / D, N, D)

    def r(eps, u):
        r"""r_n = \Big(\varepsilon + \tfrac1D \sum_c u_{nc}^2\Big)^{-1/2} \tag{2}"""
        return table(lambda n: (eps + sum(u[n, c] ** 2 for c in range(D)) / D) ** Rational(-1, 2), N)

    def h(r, u):
        r"""h_{nc} = r_n\, u_{nc} \tag{3}"""
        return table(lambda n, c: r[n] * u[n, c], N, D)

    def y(w, h, b):
        r"""y_{nc} = w_c\, h_{nc} + b_c \tag{4}"""
        return table(lambda n, c: w[c] * h[n, c] + b[c], N, D)

    @gradient("b")
    def db(dy):
        r"""\bar b_c = \sum_n \bar y_{nc} \tag{5}"""
        return table(lambda c: sum(dy[n, c] for n in range(N)), D)

    @gradient("w")
    def dw(dy, h):
        r"""\bar w_c = \sum_n \bar y_{nc}\, h_{nc} \tag{6}"""
        return table(lambda c: sum(dy[n, c] * h[n, c] for n in range(N)), D)

    @gradient("h")
    def dh(dy, w):
        r"""\bar h_{nc} = \bar y_{nc}\, w_c \tag{7}"""
        return table(lambda n, c: dy[n, c] * w[c], N, D)

    def s(dh, h):
        r"""s_n = \tfrac1D \sum_k \bar h_{nk}\, h_{nk} \tag{8}"""
        return table(lambda n: sum(dh[n, k] * h[n, k] for k in range(D)) / D, N)

    @gradient("u")
    def du(r, dh, s, h):
        r"""\bar u_{nc} = r_n\big(\bar h_{nc} - s_n h_{nc}\big) \tag{9}"""
        return table(lambda n, c: r[n] * (dh[n, c] - s[n] * h[n, c]), N, D)

    @gradient("x")
    def dx_by_u(du):
        return table(lambda n, c: du[n, c] - sum(du[n, k] for k in range(D)) / D, N, D)

    def m(dh):
        r"""m_n = \tfrac1D \sum_k \bar h_{nk} \tag{10}"""
        return table(lambda n: sum(dh[n, k] for k in range(D)) / D, N)

    @gradient("x")
    def dx(r, dh, m, s, h):
        r"""\bar x_{nc} = r_n\big(\bar h_{nc} - m_n - s_n\, h_{nc}\big) \tag{11}"""
        return table(lambda n, c: r[n] * (dh[n, c] - m[n] - s[n] * h[n, c]), N, D)

    def code(x, w, b, eps, dy):
        layer = layers.LayerNorm(D, eps, dtype=np.float64)
        layer.weight.value, layer.bias.value = w, b
        return {"y": layer(x), "dx": layer.backward(dy), "dw": layer.weight.grad, "db": layer.bias.grad}
