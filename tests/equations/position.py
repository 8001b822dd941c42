"""Positions: sines and cosines added, rows of a table added, and RoPE's turns in both layouts."""

import numpy as np
from symbolic import gradient, same_as, table
from sympy import I, Integer, Max, Min, Rational, cos, exp, expand, pi, sin

from equations.sizes import D, T, V, positive, symbols
from numpygpt import layers
from numpygpt.config import RopeScaling


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
        f=Integer(3),
        C=Integer(20),  # in which the first pair makes 20 / (2 pi), more than 3, turns, and the second more
        low=Integer(2),
        high=Integer(4),
        dy=symbols("dy", T, 4),
    )
    cases = {
        "interleaved": dict(layout="interleaved", kind=None),
        "half": dict(layout="half", kind=None),
        "linear": dict(layout="interleaved", kind="linear"),
        "llama3": dict(layout="interleaved", kind="llama3"),
        "llama3, all slow": dict(layout="interleaved", kind="llama3", low=Integer(20), high=Integer(40)),
        "llama3, all fast": dict(layout="interleaved", kind="llama3", low=Integer(1), high=Integer(2)),
    }

    def pairs(layout, d_k):
        half = d_k // 2
        return [(2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + half) for i in range(half)]

    def x1(x, pairs):
        return x[:, [first for first, _ in pairs]]

    def x2(x, pairs):
        return x[:, [second for _, second in pairs]]

    def omega(theta, d_k):
        r"""\omega_i = \theta^{-2i/d_k} \tag{1}"""
        return table(lambda i: theta ** Rational(-2 * i, d_k), d_k // 2)

    def omega_linear(omega, f):
        r"""\omega'_i = \omega_i / f \tag{2}"""
        return omega / f

    def n(C, omega):
        r"""n_i = \frac{C\, \omega_i}{2\pi}, \qquad"""
        return C * omega / (2 * pi)

    def s(n, low, high):
        r"""s_i = \min\Big(\max\Big(\frac{n_i - l}{h - l},\, 0\Big),\, 1\Big) \tag{3}"""
        return table(lambda i: Min(Max((n[i] - low) / (high - low), 0), 1), len(n))

    def omega_llama3(s, omega, f):
        r"""\omega'_i = (1 - s_i)\, \omega_i / f + s_i\, \omega_i \tag{4}"""
        return (1 - s) * omega / f + s * omega

    def phi(t_, omega, omega_linear, omega_llama3, kind):
        r"""\phi_{ti} = t\; \omega'_i \tag{5}"""
        frequency = {None: omega, "linear": omega_linear, "llama3": omega_llama3}[kind]
        return table(lambda t, i: t_[t] * frequency[i], len(t_), len(frequency))

    def y_pairs(R, phi, x1, x2):
        r"""\begin{pmatrix} y_1 \\ y_2 \end{pmatrix} = R(\phi) \begin{pmatrix} x_1 \\ x_2 \end{pmatrix}, \qquad"""
        turned = [R(angle) @ [a, b] for angle, a, b in zip(phi.flat, x1.flat, x2.flat, strict=True)]
        return np.array(turned).reshape(*phi.shape, 2)

    def R():
        r"""R(\phi) = \begin{pmatrix} \cos\phi & -\sin\phi \\ \sin\phi & \cos\phi \end{pmatrix} \tag{6}"""
        return lambda phi: np.array([[cos(phi), -sin(phi)], [sin(phi), cos(phi)]])

    @same_as("y_pairs")
    def y_by_product(phi, x1, x2):
        r"""y_1 + \mathrm i\, y_2 = e^{\mathrm i \phi}\, (x_1 + \mathrm i\, x_2) \tag{7}"""
        products = [
            expand(exp(I * p) * (a + I * b), complex=True) for p, a, b in zip(phi.flat, x1.flat, x2.flat, strict=True)
        ]
        return np.array([product.as_real_imag() for product in products]).reshape(*phi.shape, 2)

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
        r"""\bar x_2 = -\sin\phi\; \bar y_1 + \cos\phi\; \bar y_2 \tag{8}"""
        return table(lambda *i: -sin(phi[i]) * dy1[i] + cos(phi[i]) * dy2[i], *phi.shape)

    @gradient("x")
    def dx_transposed(R, phi, dy1, dy2, pairs):
        r"""\bar x = R(\phi)^\top \bar y"""
        return in_place(RoPE.y_pairs(lambda angle: R(angle).T, phi, dy1, dy2), pairs)

    @gradient("x")
    def dx(R, phi, dy1, dy2, pairs):
        r"""= R(-\phi)\, \bar y \tag{9}"""
        return in_place(RoPE.y_pairs(R, -phi, dy1, dy2), pairs)

    def code(x, t_, theta, d_k, layout, kind, f, C, low, high, dy):
        scaling = {
            None: None,
            "linear": RopeScaling("linear", float(f)),
            "llama3": RopeScaling("llama3", float(f), float(low), float(high), int(C)),
        }[kind]
        layer = layers.RotaryPositionalEmbedding(theta, d_k, 4, layout, scaling, dtype=np.float64)
        return {"y": layer(x, t_.astype(int)), "dx": layer.backward(dy)}


def in_place(values, pairs):
    """Return the two values of each pair as the features that they are."""
    features = np.empty((len(values), 2 * len(pairs)), object)
    for i, pair in enumerate(pairs):
        features[:, pair] = values[:, i]
    return features
