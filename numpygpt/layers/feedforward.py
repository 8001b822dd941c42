r"""The feed-forward half of a block: widen each position, apply a nonlinearity, and narrow it again."""

import math

import numpy as np
from jaxtyping import Float

from numpygpt.array import Array, check_positive
from numpygpt.init import Seed
from numpygpt.layers.activation import make_activation
from numpygpt.layers.linear import Linear
from numpygpt.module import Module


class FeedForward(Module):
    r"""$y = W_2\, f(W_1 x)$.

    Source: Vaswani et al. (2017), arXiv:1706.03762, eq. 2, with any activation $f$; default width $F = 4D$.

    **Forward**

    $$u = W_1 x, \qquad h = f(u), \qquad y = W_2\, h \tag{1}$$

    (with `bias=True` each linear map has its own, which changes nothing below.)

    **Backward.** A chain is undone from its end: each step hands its input's gradient to the one before it.

    $$\bar h = W_2^\top \bar y, \qquad \bar u = \bar h \odot f'(u), \qquad \bar x = W_1^\top \bar u \tag{2}$$

    ($W^\top \bar y$ is equation (5) of Linear, which also derives $\bar W_1$ and $\bar W_2$; $f'$ is in
    activation.py.)

    **Reading.** Each position by itself: nothing flows between positions, forward or backward.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        activation: str = "gelu",
        bias: bool = False,
        *,
        dtype: np.typing.DTypeLike = np.float32,
        rng: Seed = None,
    ):
        check_positive(d_model=d_model)
        d_ff = 4 * d_model if d_ff is None else d_ff
        check_positive(d_ff=d_ff)
        rng = np.random.default_rng(rng)
        self.w1 = Linear(d_model, d_ff, bias, dtype=dtype, rng=rng)
        self.w2 = Linear(d_ff, d_model, bias, dtype=dtype, rng=rng)
        self.activation = make_activation(activation)

    def forward(self, x: Float[Array, "... d_model"]) -> Float[Array, "... d_model"]:
        """Return W2 f(W1 x)."""
        return self.w2.forward(self.activation.forward(self.w1.forward(x)))  # (1)

    def backward(self, dy: Float[Array, "... d_model"]) -> Float[Array, "... d_model"]:
        """Add the gradients of the weights; return that of x."""
        return self.w1.backward(self.activation.backward(self.w2.backward(dy)))  # (2)


class GLU(Module):
    r"""Gated linear unit: $y = W_2\,(f(W_1 x) \odot W_3 x)$.

    Source: Shazeer (2020), arXiv:2002.05202, eqs. 4 to 6; the gate is Dauphin et al. (2017), arXiv:1612.08083, eq. 1.
    The activation names the family: sigmoid is GLU, identity bilinear, ReLU ReGLU, GELU GEGLU, SiLU SwiGLU. Default
    width $F = 64\lceil\lfloor 8D/3\rfloor/64\rceil$: three matrices then have about as many weights as two of width
    $4D$.

    **Forward**

    $$u = W_1 x, \qquad v = W_3 x \tag{1}$$
    $$g = f(u) \tag{2}$$
    $$h = g \odot v, \qquad y = W_2\, h \tag{3}$$

    **Backward**, given $\bar y$. Through the last map, by Linear,

    $$\bar h = W_2^\top \bar y \tag{4}$$

    In $h_c = g_c v_c$, $\partial h_c/\partial v_c = g_c$ and $\partial h_c/\partial g_c = v_c$: each factor's
    gradient is the cotangent times the other factor. There are two paths back from $h$, and the second leads on
    through $f$:

    $$\bar v = \bar h \odot g \tag{5}$$
    $$\bar g = \bar h \odot v \tag{6}$$
    $$\bar u = \bar g \odot f'(u) \tag{7}$$

    They meet in $x$, which fed both; gradients of two uses add:

    $$\bar x = W_1^\top \bar u + W_3^\top \bar v \tag{8}$$

    **Reading.** Each path is scaled by what the other carries. Where the gate is shut ($g = 0$), $v$ learns nothing
    by (5), but the gate may by (6), unless it is saturated ($f' = 0$ in (7)). Where the value is zero ($v = 0$), the
    gate learns nothing, however steep it is. Where a gate is saturated open (sigmoid: $g = 1$, $f' = 0$), only the
    value path is left and the unit is linear. The identity gate is never saturated, SiLU's and GELU's have $f' \to 1$
    on the open side.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        activation: str = "sigmoid",
        bias: bool = False,
        *,
        dtype: np.typing.DTypeLike = np.float32,
        rng: Seed = None,
    ):
        check_positive(d_model=d_model)
        d_ff = math.ceil(int(8 * d_model / 3) / 64) * 64 if d_ff is None else d_ff
        check_positive(d_ff=d_ff)
        rng = np.random.default_rng(rng)
        self.w1 = Linear(d_model, d_ff, bias, dtype=dtype, rng=rng)
        self.w2 = Linear(d_ff, d_model, bias, dtype=dtype, rng=rng)
        self.w3 = Linear(d_model, d_ff, bias, dtype=dtype, rng=rng)
        self.activation = make_activation(activation)

    def forward(self, x: Float[Array, "... d_model"]) -> Float[Array, "... d_model"]:
        """Return W2 (f(W1 x) * W3 x)."""
        u, v = self.w1.forward(x), self.w3.forward(x)  # (1)
        g = self.activation.forward(u)  # (2)
        self.saved = g, v
        return self.w2.forward(g * v)  # (3)

    def backward(self, dy: Float[Array, "... d_model"]) -> Float[Array, "... d_model"]:
        """Add the gradients of the weights; return that of x."""
        g, v = self.saved
        dh = self.w2.backward(dy)  # (4)
        dv = dh * g  # (5)
        dg = dh * v  # (6)
        du = self.activation.backward(dg)  # (7)
        return self.w1.backward(du) + self.w3.backward(dv)  # (8)


class SwiGLU(GLU):
    r"""The GLU whose gate is SiLU: $y = W_2\,(\mathrm{SiLU}(W_1 x) \odot W_3 x)$, as in Llama. See GLU."""

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        bias: bool = False,
        *,
        dtype: np.typing.DTypeLike = np.float32,
        rng: Seed = None,
    ):
        super().__init__(d_model, d_ff, "silu", bias, dtype=dtype, rng=rng)
