"""Activations: the rule for any f, and the slope of each of ours."""

import numpy as np
from symbolic import delta, derivative, gradient, table
from sympy import Function, Max, Rational, Symbol, erf, exp, pi, sqrt, tanh

from equations.sizes import D, symbols
from numpygpt import layers
from numpygpt.layers import activation

HALF = Rational(1, 2)


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
    return {"y": layer(np.array([x]))[0], "dx": layer.backward(np.array([dy]))[0]}


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
    def slope(x, y):
        r"""= \sigma(x) + y\,(1 - \sigma(x)) \tag{2}"""
        return sigma(x) + y * (1 - sigma(x))

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
