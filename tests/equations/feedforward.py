"""Feed-forward layers and gates: for an activation of which nothing is known, and SwiGLU for its own."""

import numpy as np
from symbolic import gradient, table

from equations.activation import SiLU, f, f1
from equations.sizes import D, F, symbols
from numpygpt import layers


def each(function, x):
    """Return the function of each element."""
    return table(lambda i: function(x[i]), len(x))


class FeedForward:
    of = layers.FeedForward
    output = "y"
    weights = dict(W1=symbols("W1", F, D), W2=symbols("W2", D, F))
    given = dict(weights, x=symbols("x", D), dy=symbols("dy", D), f=SiLU.y, f1=lambda u: SiLU.slope(u, SiLU.y(u)))
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
    given = dict(GLU.given, W1=symbols("W1", 1, D), W2=symbols("W2", D, 1), W3=symbols("W3", 1, D))  # F is 1 here
    held = dict()

    def code(x, W1, W2, W3, dy):
        layer = layers.SwiGLU(D, 1, dtype=np.float64)
        layer.w1.weight.value, layer.w2.weight.value, layer.w3.weight.value = W1, W2, W3
        return {"y": layer(x), "dx": layer.backward(dy)}
