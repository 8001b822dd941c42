"""The equations of the docstrings, written once more in Python: the docstring of a function is its LaTeX.

Names are those of the code: dx is x with a bar, and v_ and t_ are arrays of indices. A class holds the equations `of`
a layer. `given` is what they take for granted, as symbols; `cases` are given too, in turns; `held` is what a proof has
in place of it: a shift held fixed, or an activation of which nothing is known. `code` asks the layer the same.
symbolic.py explains the rest.
"""

# ruff: noqa: RUF012 (no object of these classes is made that could change what it shares)

from types import SimpleNamespace

import numpy as np
from symbolic import delta, derivative, gradient, same_as, table, value
from sympy import (
    Function,
    Integer,
    Max,
    Rational,
    Symbol,
    cos,
    erf,
    exp,
    log,
    oo,
    pi,
    sin,
    sqrt,
    symarray,
    tanh,
)

from numpygpt import TransformerConfig, layers, optim
from numpygpt.layers import activation
from numpygpt.module import Module, Parameter

N, D, F, V = 2, 3, 2, 3  # positions, features, inner features, vocabulary
HALF = Rational(1, 2)


def symbols(name, *shape):
    return symarray(name, shape, real=True)


def positive(name):
    return Symbol(name, positive=True)


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


class RMSNorm:
    of = layers.RMSNorm
    output = "y"
    given = dict(x=symbols("x", N, D), w=symbols("w", D), eps=positive("eps"), dy=symbols("dy", N, D))

    def r(eps, x):
        r"""r_n = \Big(\varepsilon + \tfrac1D \sum_c x_{nc}^2\Big)^{-1/2} \tag{1}"""
        return table(lambda n: (eps + sum(x[n, c] ** 2 for c in range(D)) / D) ** -HALF, N)

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
        return table(lambda n: (eps + sum(u[n, c] ** 2 for c in range(D)) / D) ** -HALF, N)

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


class f(Function):
    """Any activation."""

    def fdiff(self, argindex=1):
        return f1(*self.args)


class f1(Function):
    """Its derivative, f'."""


class Activation:
    of = activation
    output = "y"
    given = dict(x=symbols("x", D), dy=symbols("dy", D))

    def y(x):
        return table(lambda k: f(x[k]), D)

    @derivative("y", "x")
    def dy_dx(x):
        return table(lambda k, c: delta(k, c) * f1(x[c]), D, D)

    @gradient("x")
    def dx(dy, x):
        r"""\bar x = \bar y\, f'(x) \tag{A}"""
        return table(lambda c: dy[c] * f1(x[c]), D)


class OneElement:
    """What the activations below share: by (A), one element will do."""

    output = "y"
    given = dict(x=Symbol("x", real=True), dy=Symbol("dy", real=True))

    @gradient("x")
    def dx(dy, slope):
        return dy * slope


def answers(layer, x, dy):
    return {"y": layer(np.array([x])), "dx": layer.backward(np.array([dy]))}


class ReLU(OneElement):
    of = layers.ReLU
    cases = {
        "on": dict(x=Symbol("x", positive=True)),
        "off": dict(x=Symbol("x", negative=True)),
    }

    def y(x):
        r"""y = \max(x, 0) \tag{1}"""
        return Max(x, 0)

    @derivative("y", "x")
    def slope(x):
        r"""f'(x) = \mathbb 1[x > 0] \tag{2}"""
        return int(bool(x > 0))

    def code(x, dy):
        return answers(layers.ReLU(), x, dy)


class Sigmoid(OneElement):
    of = layers.Sigmoid

    def y(x):
        r"""y = \sigma(x) = \frac{1}{1 + e^{-x}} \tag{1}"""
        return 1 / (1 + exp(-x))

    @derivative("y", "x")
    def slope_by_the_quotient_rule(x):
        return exp(-x) / (1 + exp(-x)) ** 2

    @derivative("y", "x")
    def slope(y):
        r"""f'(x) = y\,(1 - y) \tag{2}"""
        return y * (1 - y)

    def code(x, dy):
        return answers(layers.Sigmoid(), x, dy)


sigma = Sigmoid.y


class SiLU(OneElement):
    of = layers.SiLU

    def y(x):
        r"""y = x\, \sigma(x) \tag{1}"""
        return x * sigma(x)

    @derivative("y", "x")
    def slope_first(x):
        r"""f'(x) = \sigma(x) + x\, \sigma(x)\,(1 - \sigma(x))"""
        return sigma(x) + x * sigma(x) * (1 - sigma(x))

    @derivative("y", "x")
    def slope(x):
        r"""= \sigma(x)\,\big(1 + x\,(1 - \sigma(x))\big) \tag{2}"""
        return sigma(x) * (1 + x * (1 - sigma(x)))

    def code(x, dy):
        return answers(layers.SiLU(), x, dy)


class GELU(OneElement):
    of = layers.GELU

    def cdf(x):
        return (1 + erf(x / sqrt(2))) / 2

    @derivative("cdf", "x")
    def pdf(x):
        return exp(-(x**2) / 2) / sqrt(2 * pi)

    def y(x, cdf):
        r"""y = x\, \Phi(x) \tag{1}"""
        return x * cdf

    @derivative("y", "x")
    def slope(cdf, x, pdf):
        r"""f'(x) = \Phi(x) + x\, \varphi(x) \tag{2}"""
        return cdf + x * pdf

    def code(x, dy):
        return answers(layers.GELU(), x, dy)


class GELUByTanh(OneElement):
    of = layers.GELU
    given = dict(OneElement.given, a=sqrt(2 / pi), b=Rational("0.044715"))

    def u(a, x, b):
        r"""u = a\,(x + b\, x^3), \qquad"""
        return a * (x + b * x**3)

    def tau(u):
        r"""\tau = \tanh u \tag{3}"""
        return tanh(u)

    def y(x, tau):
        r"""y = \tfrac12\, x\,(1 + \tau) \tag{4}"""
        return HALF * x * (1 + tau)

    @derivative("u", "x")
    def du_dx(a, b, x):
        return a * (1 + 3 * b * x**2)

    @derivative("y", "x")
    def slope(tau, x, a, b):
        r"""f'(x) = \tfrac12\,(1 + \tau) + \tfrac12\, x\,(1 - \tau^2)\, a\,(1 + 3 b\, x^2) \tag{5}"""
        return HALF * (1 + tau) + HALF * x * (1 - tau**2) * a * (1 + 3 * b * x**2)

    def code(x, dy, a, b):
        return answers(layers.GELU("tanh"), x, dy)


def each(function, x):
    """Return the function of each element."""
    return table(lambda i: function(x[i]), len(x))


class FeedForward:
    of = layers.FeedForward
    output = "y"
    weights = dict(W1=symbols("W1", F, D), W2=symbols("W2", D, F))
    given = dict(weights, x=symbols("x", D), dy=symbols("dy", D), f=SiLU.y, f1=SiLU.slope)
    held = dict(f=f, f1=f1)

    def u(W1, x):
        r"""u = W_1 x, \qquad"""
        return W1 @ x

    def h(f, u):
        r"""h = f(u), \qquad"""
        return each(f, u)

    def y(W2, h):
        r"""y = W_2\, h \tag{1}"""
        return W2 @ h

    @gradient("h")
    def dh(W2, dy):
        r"""\bar h = W_2^\top \bar y, \qquad"""
        return W2.T @ dy

    @gradient("u")
    def du(dh, f1, u):
        r"""\bar u = \bar h \odot f'(u), \qquad"""
        return dh * each(f1, u)

    @gradient("x")
    def dx(W1, du):
        r"""\bar x = W_1^\top \bar u \tag{2}"""
        return W1.T @ du

    def code(x, W1, W2, dy):
        layer = layers.FeedForward(D, F, "silu", dtype=np.float64)
        layer.w1.weight.value, layer.w2.weight.value = W1, W2
        return {"y": layer(x), "dx": layer.backward(dy)}


class GLU:
    of = layers.GLU
    output = "y"
    given = dict(FeedForward.given, W3=symbols("W3", F, D))
    held = FeedForward.held

    def u(W1, x):
        r"""u = W_1 x, \qquad"""
        return W1 @ x

    def v(W3, x):
        r"""v = W_3 x \tag{1}"""
        return W3 @ x

    def g(f, u):
        r"""g = f(u) \tag{2}"""
        return each(f, u)

    def h(g, v):
        r"""h = g \odot v, \qquad"""
        return g * v

    def y(W2, h):
        r"""y = W_2\, h \tag{3}"""
        return W2 @ h

    @gradient("h")
    def dh(W2, dy):
        r"""\bar h = W_2^\top \bar y \tag{4}"""
        return W2.T @ dy

    @gradient("v")
    def dv(dh, g):
        r"""\bar v = \bar h \odot g \tag{5}"""
        return dh * g

    @gradient("g")
    def dg(dh, v):
        r"""\bar g = \bar h \odot v \tag{6}"""
        return dh * v

    @gradient("u")
    def du(dg, f1, u):
        r"""\bar u = \bar g \odot f'(u) \tag{7}"""
        return dg * each(f1, u)

    @gradient("x")
    def dx(W1, du, W3, dv):
        r"""\bar x = W_1^\top \bar u + W_3^\top \bar v \tag{8}"""
        return W1.T @ du + W3.T @ dv

    def code(x, W1, W2, W3, dy):
        layer = layers.GLU(D, F, "silu", dtype=np.float64)
        layer.w1.weight.value, layer.w2.weight.value, layer.w3.weight.value = W1, W2, W3
        return {"y": layer(x), "dx": layer.backward(dy)}


class SwiGLU(GLU):
    of = layers.SwiGLU
    held = dict()

    def code(x, W1, W2, W3, dy):
        layer = layers.SwiGLU(D, F, dtype=np.float64)
        layer.w1.weight.value, layer.w2.weight.value, layer.w3.weight.value = W1, W2, W3
        return {"y": layer(x), "dx": layer.backward(dy)}


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


T = 2  # positions in a sequence


class SinusoidalPositions:
    of = layers.SinusoidalPositions
    output = "y"
    given = dict(x=symbols("x", T, D), dy=symbols("dy", T, D))

    def P_even():
        r"""P_{t,2i} = \sin\big(t / 10000^{2i/D}\big), \qquad"""
        return table(lambda t, i: sin(t / 10000 ** Rational(2 * i, D)), T, (D + 1) // 2)

    def P_odd():
        r"""P_{t,2i+1} = \cos\big(t / 10000^{2i/D}\big) \tag{1}"""
        return table(lambda t, i: cos(t / 10000 ** Rational(2 * i, D)), T, D // 2)

    def P(P_even, P_odd):
        return table(lambda t, c: (P_odd if c % 2 else P_even)[t, c // 2], T, D)

    def y(x, P):
        r"""y_{tc} = x_{tc} + P_{tc} \tag{2}"""
        return table(lambda t, c: x[t, c] + P[t, c], T, D)

    @gradient("x")
    def dx(dy):
        r"""\bar x = \bar y \tag{3}"""
        return dy

    def code(x, dy):
        layer = layers.SinusoidalPositions(T, D, dtype=np.float64)
        return {"y": layer(x, np.arange(T)), "dx": layer.backward(dy)}


class LearnedPositions:
    of = layers.LearnedPositions
    output = "y"
    given = dict(x=symbols("x", 3, D), P=symbols("P", V, D), t_=np.array([2, 0, 2]), dy=symbols("dy", 3, D))

    def y(x, P, t_):
        r"""y_{nc} = x_{nc} + P_{t_n c} \tag{1}"""
        return table(lambda n, c: x[n, c] + P[t_[n], c], 3, D)

    @gradient("x")
    def dx(dy):
        r"""\bar x_{nc} = \bar y_{nc}, \qquad"""
        return table(lambda n, c: dy[n, c], 3, D)

    @gradient("P")
    def dP(t_, dy):
        r"""\bar P_{tc} = \sum_{n:\, t_n = t} \bar y_{nc} \tag{2}"""
        return table(lambda t, c: sum(dy[n, c] for n in range(3) if t_[n] == t), V, D)

    def code(x, P, t_, dy):
        layer = layers.LearnedPositions(V, D, dtype=np.float64)
        layer.embeddings.weight.value = P
        return {"y": layer(x, t_), "dx": layer.backward(dy), "dP": layer.embeddings.weight.grad}


class RoPE:
    of = layers.RotaryPositionalEmbedding
    output = "y"
    given = dict(
        x=symbols("x", T, 4),
        t_=np.array([Integer(1), Integer(3)]),
        theta=positive("theta"),
        d_k=4,
        dy=symbols("dy", T, 4),
    )
    cases = {layout: dict(layout=layout) for layout in ("interleaved", "half")}

    def pairs(layout, d_k):
        half = d_k // 2
        return [(2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + half) for i in range(half)]

    def x1(x, pairs):
        return x[:, [first for first, _ in pairs]]

    def x2(x, pairs):
        return x[:, [second for _, second in pairs]]

    def phi(t_, theta, d_k):
        r"""\phi_{ti} = t\; \theta^{-2i/d_k} \tag{1}"""
        return table(lambda t, i: t_[t] * theta ** Rational(-2 * i, d_k), len(t_), d_k // 2)

    def y_pairs(R, phi, x1, x2):
        r"""\begin{pmatrix} y_1 \\ y_2 \end{pmatrix} = R(\phi) \begin{pmatrix} x_1 \\ x_2 \end{pmatrix}, \qquad"""
        turned = [R(angle) @ [a, b] for angle, a, b in zip(phi.flat, x1.flat, x2.flat, strict=True)]
        return np.array(turned).reshape(*phi.shape, 2)

    def R():
        r"""R(\phi) = \begin{pmatrix} \cos\phi & -\sin\phi \\ \sin\phi & \cos\phi \end{pmatrix} \tag{2}"""
        return lambda phi: np.array([[cos(phi), -sin(phi)], [sin(phi), cos(phi)]])

    def y(y_pairs, pairs):
        return in_place(y_pairs, pairs)

    def dy1(dy, pairs):
        return RoPE.x1(dy, pairs)

    def dy2(dy, pairs):
        return RoPE.x2(dy, pairs)

    @gradient("x1")
    def dx1_first(dy1, dy2, y_pairs, x1):
        r"""\bar x_1 = \bar y_1 \frac{\partial y_1}{\partial x_1} + \bar y_2 \frac{\partial y_2}{\partial x_1}"""
        y1, y2 = y_pairs[..., 0], y_pairs[..., 1]
        return table(lambda *i: dy1[i] * y1[i].diff(x1[i]) + dy2[i] * y2[i].diff(x1[i]), *x1.shape)

    @gradient("x1")
    def dx1(phi, dy1, dy2):
        r"""= \cos\phi\; \bar y_1 + \sin\phi\; \bar y_2, \qquad"""
        return table(lambda *i: cos(phi[i]) * dy1[i] + sin(phi[i]) * dy2[i], *phi.shape)

    @gradient("x2")
    def dx2(phi, dy1, dy2):
        r"""\bar x_2 = -\sin\phi\; \bar y_1 + \cos\phi\; \bar y_2 \tag{3}"""
        return table(lambda *i: -sin(phi[i]) * dy1[i] + cos(phi[i]) * dy2[i], *phi.shape)

    @gradient("x")
    def dx_transposed(R, phi, dy1, dy2, pairs):
        r"""\bar x = R(\phi)^\top \bar y"""
        return in_place(RoPE.y_pairs(lambda angle: R(angle).T, phi, dy1, dy2), pairs)

    @gradient("x")
    def dx(R, phi, dy1, dy2, pairs):
        r"""= R(-\phi)\, \bar y \tag{4}"""
        return in_place(RoPE.y_pairs(R, -phi, dy1, dy2), pairs)

    def code(x, t_, theta, d_k, layout, dy):
        layer = layers.RotaryPositionalEmbedding(theta, d_k, 4, layout, dtype=np.float64)
        return {"y": layer(x, t_.astype(int)), "dx": layer.backward(dy)}


def in_place(values, pairs):
    """Return the two values of each pair as the features that they are."""
    features = np.empty((len(values), 2 * len(pairs)), object)
    for i, pair in enumerate(pairs):
        features[:, pair] = values[:, i]
    return features


class Attention:
    of = layers.ScaledDotProductAttention
    output = "o"
    given = dict(  # 2 queries, 3 keys
        q=symbols("q", 2, 2), k=symbols("k", 3, 2), v=symbols("v", 3, 2), d_k=Integer(2), do=symbols("do", 2, 2)
    )
    cases = {
        "all visible": dict(visible=np.ones((2, 3), bool)),
        "a query that sees no key": dict(visible=np.array([[False, False, False], [True, False, True]])),
    }

    def a(d_k, q, k):
        r"""a_{ts} = \frac{1}{\sqrt{d_k}} \sum_d q_{td}\, k_{sd} \tag{1}"""
        return table(lambda t, s: 1 / sqrt(d_k) * sum(q[t, d] * k[s, d] for d in range(q.shape[1])), len(q), len(k))

    def m(a, visible):
        r"""m_{ts} = a_{ts} \text{ if query } t \text{ may see key } s, \quad -\infty \text{ if not} \tag{2}"""
        return table(lambda t, s: a[t, s] if visible[t, s] else -oo, *a.shape)

    def p(m):
        r"""p_{ts} = \mathrm{softmax}_s(m_{ts}) \tag{3}"""
        return np.array([value(Softmax, "p", dict(x=m_t, M=0)) for m_t in m])

    def o(p, v):
        r"""o_{te} = \sum_s p_{ts}\, v_{se} \tag{4}"""
        return table(lambda t, e: sum(p[t, s] * v[s, e] for s in range(len(v))), len(p), v.shape[1])

    @gradient("v")
    def dv(p, do):
        r"""\bar v_{se} = \sum_t p_{ts}\, \bar o_{te} \tag{5}"""
        return table(lambda s, e: sum(p[t, s] * do[t, e] for t in range(len(p))), p.shape[1], do.shape[1])

    @gradient("p")
    def dp(do, v):
        r"""\bar p_{ts} = \sum_e \bar o_{te}\, v_{se} \tag{6}"""
        return table(lambda t, s: sum(do[t, e] * v[s, e] for e in range(v.shape[1])), len(do), len(v))

    @gradient("m")
    def dm(p, dp):
        r"""\bar m_{ts} = p_{ts}\Big(\bar p_{ts} - \sum_{s'} \bar p_{ts'}\, p_{ts'}\Big) \tag{7}"""
        return table(lambda t, s: p[t, s] * (dp[t, s] - sum(dp[t, z] * p[t, z] for z in range(p.shape[1]))), *p.shape)

    @gradient("a")
    def da(dm):
        return dm

    @gradient("q")
    def dq(d_k, da, k, q):
        r"""\bar q_{td} = \frac{1}{\sqrt{d_k}} \sum_s \bar a_{ts}\, k_{sd} \tag{8}"""
        return table(lambda t, d: 1 / sqrt(d_k) * sum(da[t, s] * k[s, d] for s in range(len(k))), *q.shape)

    @gradient("k")
    def dk(d_k, da, q, k):
        r"""\bar k_{sd} = \frac{1}{\sqrt{d_k}} \sum_t \bar a_{ts}\, q_{td} \tag{9}"""
        return table(lambda s, d: 1 / sqrt(d_k) * sum(da[t, s] * q[t, d] for t in range(len(q))), *k.shape)

    def code(q, k, v, visible, do):
        layer = layers.ScaledDotProductAttention()
        o = layer(q, k, v, visible)
        return {"o": o, **dict(zip(("dq", "dk", "dv"), layer.backward(do), strict=True))}


H, G, R, d_k = 4, 2, 2, 2  # query heads, key/value heads, query heads that share one of those, features of a head


class MultiHeadAttention:
    of = layers.MultiHeadAttention
    output = "y"
    given = dict(
        x=symbols("x", T, H * d_k),
        Wq=symbols("Wq", H * d_k, H * d_k),
        Wk=symbols("Wk", G * d_k, H * d_k),
        Wv=symbols("Wv", G * d_k, H * d_k),
        Wo=symbols("Wo", H * d_k, H * d_k),
        dy=symbols("dy", T, H * d_k),
        position=np.array([Integer(1), Integer(3)]),
        theta=positive("theta"),
        mask=np.array([[True, True], [True, True]]),
        width=Integer(d_k),
    )

    def q(Wq, x):
        r"""q = W_q x, \qquad"""
        return x @ Wq.T

    def k(Wk, x):
        r"""k = W_k x, \qquad"""
        return x @ Wk.T

    def v(Wv, x):
        r"""v = W_v x \tag{1}"""
        return x @ Wv.T

    def q_split(q):
        r"""q_{grtd} = q_{t,\,(gR + r)\,d_k + d}, \qquad"""
        return table(lambda g, r, t, d: q[t, (g * R + r) * d_k + d], G, R, T, d_k)

    def k_split(k):
        r"""k_{gsd} = k_{s,\,g\,d_k + d}, \qquad"""
        return table(lambda g, s, d: k[s, g * d_k + d], G, T, d_k)

    def v_split(v):
        r"""v_{gsd} = v_{s,\,g\,d_k + d} \tag{2}"""
        return table(lambda g, s, d: v[s, g * d_k + d], G, T, d_k)

    def q_turned(turn, q_split):
        r"""q' = \mathrm{RoPE}(q), \qquad"""
        return turn("y", q_split)

    def k_turned(turn, k_split):
        r"""k' = \mathrm{RoPE}(k) \tag{3}"""
        return turn("y", k_split)

    def turn(position, theta):
        known = dict(t_=position, theta=theta, d_k=d_k, layout="half")

        def by(quantity, z):
            sequences = z.reshape(-1, T, d_k)
            return np.array([value(RoPE, quantity, dict(known, x=s, dy=s)) for s in sequences]).reshape(z.shape)

        return by

    def visible(position, mask):
        r"""\text{visible}_{ts} = \big[\mathrm{position}(s) \le \mathrm{position}(t)\big]
        \wedge \text{mask}_{ts} \tag{4}"""
        return table(lambda t, s: bool(position[s] <= position[t] and mask[t, s]), T, T)

    def groups(q_turned, k_turned, v_split, visible, width):
        known = dict(d_k=width, visible=np.tile(visible, (R, 1)))
        return [dict(known, q=q_turned[g].reshape(R * T, d_k), k=k_turned[g], v=v_split[g]) for g in range(G)]

    def o(groups):
        r"""o_{g,(rt),d} = \mathrm{attention}\big(q'_{g,(rt),d},\; k'_{gsd},\; v_{gsd},\;
        \text{visible}_{ts}\big) \tag{5}"""
        return np.array([value(Attention, "o", dict(known)) for known in groups]).reshape(G, R, T, d_k)

    def o_merged(o):
        r"""o_{t,\,(gR + r)\,d_k + d} = o_{grtd}, \qquad"""
        return table(lambda t, c: o[c // d_k // R, c // d_k % R, t, c % d_k], T, H * d_k)

    def y(Wo, o_merged):
        r"""y = W_o\, o \tag{6}"""
        return o_merged @ Wo.T

    @gradient("o_merged")
    def do_merged(Wo, dy):
        return dy @ Wo

    @gradient("o")
    def do(do_merged):
        r"""\bar o_{grtd} = \bar o_{t,\,(gR + r)\,d_k + d} \tag{7}"""
        return table(lambda g, r, t, d: do_merged[t, (g * R + r) * d_k + d], G, R, T, d_k)

    def handed_back(groups, do):
        def gradients(name):
            return [value(Attention, name, dict(groups[g], do=do[g].reshape(R * T, d_k))) for g in range(G)]

        return gradients

    @gradient("q_turned", of=["o"], beside=["k_turned", "v_split"])
    def dq_turned(handed_back):
        return np.array(handed_back("dq")).reshape(G, R, T, d_k)

    @gradient("k_turned", of=["o"], beside=["q_turned", "v_split"])
    def dk_turned(handed_back):
        return np.array(handed_back("dk"))

    @gradient("v_split", of=["o"], beside=["q_turned", "k_turned"])
    def dv_split(handed_back):
        return np.array(handed_back("dv"))

    @gradient("q_split", of=["q_turned"])
    def dq_split(turn, dq_turned):
        r"""\bar q = \mathrm{RoPE}^{-1}(\bar q'), \qquad"""
        return turn("dx", dq_turned)

    @gradient("k_split", of=["k_turned"])
    def dk_split(turn, dk_turned):
        r"""\bar k = \mathrm{RoPE}^{-1}(\bar k') \tag{8}"""
        return turn("dx", dk_turned)

    @gradient("q", of=["q_split"])
    def dq(dq_split):
        r"""\bar q_{t,\,(gR + r)\,d_k + d} = \bar q_{grtd}, \qquad"""
        return MultiHeadAttention.o_merged(dq_split)

    @gradient("k", of=["k_split"])
    def dk(dk_split):
        r"""\bar k_{s,\,g\,d_k + d} = \bar k_{gsd}, \qquad"""
        return table(lambda s, c: dk_split[c // d_k, s, c % d_k], T, G * d_k)

    @gradient("v", of=["v_split"])
    def dv(dv_split):
        r"""\bar v_{s,\,g\,d_k + d} = \bar v_{gsd} \tag{9}"""
        return table(lambda s, c: dv_split[c // d_k, s, c % d_k], T, G * d_k)

    @gradient("x", of=["q", "k", "v"])
    def dx(Wq, dq, Wk, dk, Wv, dv):
        r"""\bar x = W_q^\top \bar q + W_k^\top \bar k + W_v^\top \bar v \tag{10}"""
        return dq @ Wq + dk @ Wk + dv @ Wv

    def code(x, Wq, Wk, Wv, Wo, dy, position, theta, mask):
        rope = layers.RotaryPositionalEmbedding(theta, d_k, 4, "half", dtype=np.float64)
        layer = layers.MultiHeadAttention(H * d_k, H, G, rope, dtype=np.float64)
        layer.q_proj.weight.value, layer.k_proj.weight.value, layer.v_proj.weight.value = Wq, Wk, Wv
        layer.output_proj.weight.value = Wo
        return {"y": layer(x, position.astype(int), mask), "dx": layer.backward(dy)}


class AnyMap:
    """A map of two features of which nothing is known but that it has a Jacobian."""

    def __init__(self, name):
        self.slopes = table(lambda i, k: Function(f"{name}{i}_by_{k}"), 2, 2)
        self.components = [
            type(f"{name}{i}", (Function,), {"fdiff": lambda f, k=1, i=i: self.slopes[i, k - 1](*f.args)})
            for i in range(2)
        ]

    def __call__(self, x):
        return table(lambda i: self.components[i](*x), 2)

    def J(self, x):
        return table(lambda i, k: self.slopes[i, k](*x), 2, 2)


class Squares:
    """A map to compute with: the squares of A x."""

    def __init__(self, *rows):
        self.A = np.array(rows)

    def __call__(self, x):
        return (self.A @ x) ** 2

    def J(self, x):
        return 2 * (self.A @ x)[:, None] * self.A


class Sublayer(Module):
    """A map in the place of a sublayer or norm, for a sequence of one position."""

    def __init__(self, function):
        self.function = function

    def forward(self, x, *_):
        self.saved = x[0]
        return self.function(x[0])[None]

    def backward(self, dy):
        return dy @ self.function.J(self.saved)


class DecoderBlock:
    of = layers.DecoderBlock
    given = dict(
        x=symbols("x", 2),
        f=Squares([1, 2], [3, -1]),
        n=Squares([2, 0], [1, 1]),
        dy_pre=symbols("dy_pre", 2),
        dy_post=symbols("dy_post", 2),
    )
    held = dict(f=AnyMap("f"), n=AnyMap("n"))

    def y_pre(x, f, n):
        r"""\text{pre:}\quad y = x + f(n(x)) \tag{1}"""
        return x + f(n(x))

    def z(x, f):
        return x + f(x)

    def y_post(n, z):
        r"""\text{post (the original of 2017):}\quad y = n(x + f(x)) \tag{2}"""
        return n(z)

    @gradient("x", of=["y_pre"])
    def dx_pre(dy_pre, n, f, x):
        r"""\text{pre:}\quad \bar x = \bar y + J_n^\top J_f^\top\, \bar y \tag{3}"""
        return dy_pre + n.J(x).T @ f.J(n(x)).T @ dy_pre

    @gradient("z", of=["y_post"])
    def dz(n, z, dy_post):
        r"""\text{post:}\quad \bar z = J_n^\top \bar y, \qquad"""
        return n.J(z).T @ dy_post

    @gradient("x", of=["y_post"])
    def dx_post(dz, f, x):
        r"""\bar x = \bar z + J_f^\top \bar z \tag{4}"""
        return dz + f.J(x).T @ dz

    def code(x, f, n, dy_pre, dy_post):
        """Ask the first half of a block; the second one is two identities and two zeros."""
        config = TransformerConfig(vocab_size=2, context_length=2, d_model=2, num_layers=1, num_heads=1, d_ff=2)
        block = layers.DecoderBlock(config, dtype=np.float64)
        block.ln1, block.attn = Sublayer(n), Sublayer(f)
        block.ln2, block.ffn = layers.activation.Identity(), layers.Linear(2, 2, std=0, dtype=np.float64)
        answers = {}
        for place, dy in ("pre", dy_pre), ("post", dy_post):
            block.pre = place == "pre"
            answers[f"y_{place}"], answers[f"dx_{place}"] = block(x[None])[0], block.backward(dy[None])[0]
        return answers


STEPS = 3


def series(formula, start=0):
    """Return the values at t = 0 ... STEPS: the start, then formula(t, the value before)."""
    values = [start]
    for t in range(1, STEPS + 1):
        values.append(formula(t, values[-1]))
    return np.array(values, object)


class Adam:
    of = optim.Adam
    output = "p"
    given = dict(
        g=symbols("g", STEPS + 1),  # the first one is g_0, which is never used
        p0=Symbol("p0", real=True),
        **{name: positive(name) for name in ("lr", "eps", "b1", "b2")},
    )
    held = dict(Eg=Symbol("Eg", real=True))

    def m(b1, g):
        r"""m_t = \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \tag{1}"""
        return series(lambda t, before: b1 * before + (1 - b1) * g[t])

    def v(b2, g):
        r"""v_t = \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \tag{2}"""
        return series(lambda t, before: b2 * before + (1 - b2) * g[t] ** 2)

    def m_hat(m, b1):
        r"""\hat m_t = \frac{m_t}{1 - \beta_1^t}, \qquad"""
        return series(lambda t, _: m[t] / (1 - b1**t))

    def v_hat(v, b2):
        r"""\hat v_t = \frac{v_t}{1 - \beta_2^t} \tag{3}"""
        return series(lambda t, _: v[t] / (1 - b2**t))

    def p(p0, lr, m_hat, v_hat, eps):
        r"""p \leftarrow p - \eta\, \frac{\hat m_t}{\sqrt{\hat v_t} + \varepsilon} \tag{4}"""
        return series(lambda t, before: before - lr * m_hat[t] / (sqrt(v_hat[t]) + eps), p0)

    @same_as("m")
    def m_unrolled(b1, g):
        r"""m_t = (1 - \beta_1) \sum_{i=1}^t \beta_1^{t-i}\, g_i \tag{5}"""
        return series(lambda t, _: (1 - b1) * sum(b1 ** (t - i) * g[i] for i in range(1, t + 1)))

    @same_as("v")
    def v_unrolled(b2, g):
        return series(lambda t, _: (1 - b2) * sum(b2 ** (t - i) * g[i] ** 2 for i in range(1, t + 1)))

    def expected_m(m, g, Eg):
        return series(lambda t, _: sum(m[t].diff(g[i]) * Eg for i in range(1, t + 1)))  # m is linear in every g

    @same_as("expected_m")
    def expected_m_first(b1, Eg):
        r"""E[m_t] = (1 - \beta_1)\, E[g]\, \frac{1 - \beta_1^t}{1 - \beta_1}"""
        return series(lambda t, _: (1 - b1) * Eg * (1 - b1**t) / (1 - b1))

    @same_as("expected_m")
    def expected_m_is(b1, Eg):
        r"""= (1 - \beta_1^t)\, E[g] \tag{6}"""
        return series(lambda t, _: (1 - b1**t) * Eg)

    def code(g, p0, lr, eps, b1, b2):
        return run(optim.Adam, g, p0, lr=lr, eps=eps, betas=(b1, b2))


class AdamW(Adam):
    of = optim.AdamW
    given = dict(Adam.given, decay=positive("decay"))

    def p(p0, lr, decay, m_hat, v_hat, eps):
        r"""p \leftarrow p - \eta\, \lambda\, p - \eta\, \frac{\hat m_t}{\sqrt{\hat v_t} + \varepsilon} \tag{1}"""
        return series(lambda t, p: p - lr * decay * p - lr * m_hat[t] / (sqrt(v_hat[t]) + eps), p0)

    def code(g, p0, lr, eps, b1, b2, decay):
        return run(optim.AdamW, g, p0, lr=lr, eps=eps, betas=(b1, b2), weight_decay=decay)


def run(optimiser, g, p0, **settings):
    """Return what a matrix of one weight becomes, and its moments, step by step."""
    weight = Parameter(np.full((1, 1), p0))
    steps = optimiser([weight], **settings)
    seen = [(p0, 0.0, 0.0)]
    for t in range(1, STEPS + 1):
        weight.grad[...] = g[t]
        steps.step()
        seen.append((weight.value.item(), steps.m[0].item(), steps.v[0].item()))
    return dict(zip(("p", "m", "v"), np.transpose(seen), strict=True))
