r"""Normalisation: bring the features of each position to a common scale."""

import numpy as np
from jaxtyping import Float

from numpygpt.array import Array, at_least_float32, check_cotangent, check_features, check_not_negative, check_positive
from numpygpt.einsum import einsum
from numpygpt.module import Module, Parameter


class RMSNorm(Module):
    r"""$y = w \odot x / \mathrm{rms}(x)$ over the $D$ features of a position.

    Source: Zhang & Sennrich (2019), arXiv:1910.07467, eq. 4. **Departure:** $\varepsilon$ added inside the root.
    Against LayerNorm it drops the subtraction of the mean and the shift $b$.
    A float16 input is computed in float32 and returned as float16.
    Indices: $n$ runs over all positions together, $c, k$ over features. $\bar z$ means $\partial L/\partial z$.

    **Forward**

    $$r_n = \Big(\varepsilon + \tfrac1D \sum_c x_{nc}^2\Big)^{-1/2} \tag{1}$$
    $$h_{nc} = r_n\, x_{nc} \tag{2}$$
    $$y_{nc} = w_c\, h_{nc} \tag{3}$$

    **Backward**, given $\bar y$. By (3), $w_c$ touches every position, and $h_{nc}$ touches one $y$:

    $$\bar w_c = \sum_n \bar y_{nc}\, h_{nc} \tag{4}$$
    $$\bar h_{nc} = \bar y_{nc}\, w_c \tag{5}$$

    $x_{nc}$ reaches $h_{nc}$ directly, and through $r_n$ every $h_{nk}$.
    From (1), $\partial r_n/\partial x_{nc} = -\tfrac12 r_n^3 \cdot \tfrac2D x_{nc} = -r_n^2 h_{nc}/D$, so from (2)

    $$\frac{\partial h_{nk}}{\partial x_{nc}} = r_n \delta_{kc} + x_{nk} \frac{\partial r_n}{\partial x_{nc}}
      = r_n\Big(\delta_{kc} - \tfrac1D h_{nk} h_{nc}\Big) \tag{6}$$

    Multiply by $\bar h_{nk}$ and sum over $k$:

    $$s_n = \tfrac1D \sum_k \bar h_{nk}\, h_{nk} \tag{7}$$
    $$\bar x_{nc} = r_n\big(\bar h_{nc} - s_n\, h_{nc}\big) \tag{8}$$

    **Reading.** $y$ ignores the length of $x$ (as $\varepsilon \to 0$), so no gradient may point along $x$:
    (8) takes from $\bar h$ its component along $h$.
    """

    def __init__(self, d_model: int, eps: float = 1e-5, *, dtype: np.typing.DTypeLike = np.float32):
        check_positive(d_model=d_model)
        check_not_negative(eps=eps)
        self.eps = float(eps)
        self.weight = Parameter(np.ones(d_model, dtype))

    def forward(self, x: Float[Array, "... d_model"]) -> Float[Array, "... d_model"]:
        """Return x (..., d_model) with the mean square of each position brought to 1, times the gain."""
        check_features(x, self.weight.size)
        wide = at_least_float32(x)
        mean_square = einsum("...c,...c->...", wide, wide)[..., None] / x.shape[-1]
        r = (self.eps + mean_square) ** -0.5  # (1)
        h = r * wide  # (2)
        self.saved = r, h
        return (self.weight.value * h).astype(x.dtype, copy=False)  # (3)

    def backward(self, dy: Float[Array, "... d_model"]) -> Float[Array, "... d_model"]:
        """Add the gradient of the gain; return that of x."""
        r, h = self.saved
        check_cotangent(dy, h.shape)
        dtype, dy = dy.dtype, at_least_float32(dy)
        self.weight.grad += einsum("...c,...c->c", dy, h)  # (4)
        dx = dy * self.weight.value  # (5), dh
        s = einsum("...k,...k->...", dx, h)[..., None] / h.shape[-1]  # (7), from (6)
        dx -= s * h
        dx *= r  # (8)
        return dx.astype(dtype, copy=False)


class LayerNorm(Module):
    r"""$y = w \odot (x - \mu)/\sigma + b$ over the $D$ features of a position; `bias=False` leaves out $b$.

    Source: Ba, Kiros & Hinton (2016), arXiv:1607.06450, eqs. 3 and 4. The variance is the biased one (divide by $D$,
    not $D-1$). **Departure:** $\varepsilon$ added inside the root, as in GPT-2's code.
    A float16 input is computed in float32 and returned as float16.
    Indices: $n$ runs over all positions together, $c, k$ over features. $\bar z$ means $\partial L/\partial z$.

    **Forward**

    $$u_{nc} = x_{nc} - \tfrac1D \sum_k x_{nk} \tag{1}$$
    $$r_n = \Big(\varepsilon + \tfrac1D \sum_c u_{nc}^2\Big)^{-1/2} \tag{2}$$
    $$h_{nc} = r_n\, u_{nc} \tag{3}$$
    $$y_{nc} = w_c\, h_{nc} + b_c \tag{4}$$

    **Backward**, given $\bar y$. From (4),

    $$\bar b_c = \sum_n \bar y_{nc} \tag{5}$$
    $$\bar w_c = \sum_n \bar y_{nc}\, h_{nc} \tag{6}$$
    $$\bar h_{nc} = \bar y_{nc}\, w_c \tag{7}$$

    (2) and (3) are RMSNorm of $u$, equations (1) to (8) there:

    $$s_n = \tfrac1D \sum_k \bar h_{nk}\, h_{nk} \tag{8}$$
    $$\bar u_{nc} = r_n\big(\bar h_{nc} - s_n h_{nc}\big) \tag{9}$$

    From (1), $\partial u_{nk}/\partial x_{nc} = \delta_{kc} - \tfrac1D$, so
    $\bar x_{nc} = \bar u_{nc} - \tfrac1D \sum_k \bar u_{nk}$: the mean is subtracted from the gradient as it was from
    $x$. In the mean of (9) the term $s_n h_{nk}$ drops out, since $\sum_k h_{nk} = r_n \sum_k u_{nk} = 0$. What is left
    is $\tfrac1D \sum_k \bar u_{nk} = r_n m_n$ with

    $$m_n = \tfrac1D \sum_k \bar h_{nk} \tag{10}$$
    $$\bar x_{nc} = r_n\big(\bar h_{nc} - m_n - s_n\, h_{nc}\big) \tag{11}$$

    **Reading.** $y$ ignores a shift and (as $\varepsilon \to 0$) a stretch of $x$. So no gradient may point along
    either: (11) takes from $\bar h$ its component along $(1, \dots, 1)$ and its component along $h$.
    """

    def __init__(self, d_model: int, eps: float = 1e-5, bias: bool = True, *, dtype: np.typing.DTypeLike = np.float32):
        check_positive(d_model=d_model)
        check_not_negative(eps=eps)
        self.eps = float(eps)
        self.weight = Parameter(np.ones(d_model, dtype))
        self.bias = Parameter(np.zeros(d_model, dtype)) if bias else None

    def forward(self, x: Float[Array, "... d_model"]) -> Float[Array, "... d_model"]:
        """Return x (..., d_model) with each position brought to mean 0 and variance 1, times gain plus bias."""
        check_features(x, self.weight.size)
        wide = at_least_float32(x)
        u = wide - np.mean(wide, axis=-1, keepdims=True)  # (1)
        variance = einsum("...c,...c->...", u, u)[..., None] / x.shape[-1]
        r = (self.eps + variance) ** -0.5  # (2)
        h = r * u  # (3)
        self.saved = r, h
        y = self.weight.value * h  # (4)
        if self.bias is not None:
            y += self.bias.value
        return y.astype(x.dtype, copy=False)

    def backward(self, dy: Float[Array, "... d_model"]) -> Float[Array, "... d_model"]:
        """Add the gradients of gain and bias; return that of x."""
        r, h = self.saved
        check_cotangent(dy, h.shape)
        dtype, dy = dy.dtype, at_least_float32(dy)
        if self.bias is not None:
            self.bias.grad += einsum("...c->c", dy)  # (5)
        self.weight.grad += einsum("...c,...c->c", dy, h)  # (6)
        dx = dy * self.weight.value  # (7), dh
        s = einsum("...k,...k->...", dx, h)[..., None] / h.shape[-1]  # (8)
        dx -= np.mean(dx, axis=-1, keepdims=True)  # (10)
        dx -= s * h
        dx *= r  # (11), from (9)
        return dx.astype(dtype, copy=False)
