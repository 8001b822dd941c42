r"""The linear map: every output feature is a weighted sum of the input features."""

import math

import numpy as np
from jaxtyping import Float

from numpygpt.array import Array, check_cotangent, check_features, check_not_negative, check_positive
from numpygpt.einsum import einsum
from numpygpt.init import Seed, truncated_normal
from numpygpt.module import Module, Parameter


class Linear(Module):
    r"""$y = W x + b$ at every position; $W$ has shape (out, in), $b$ is left out by default.

    Source: the affine map of Rumelhart, Hinton & Williams (1986), doi:10.1038/323533a0, eq. 1.
    Starting weights: truncated normal of deviation $\sqrt{2/(\text{in}+\text{out})}$ (Glorot & Bengio, 2010,
    eq. 12), cut at ±3 deviations. **Departure:** one published listing of this model takes
    $2/(\text{in}+\text{out})$ for the deviation, which is the variance; `std=` overrides ours.
    Indices: $n$ runs over all leading axes together, $i$ input, $o$ output. $\bar z$ means $\partial L/\partial z$.

    **Forward**

    $$y_{no} = \sum_i W_{oi}\, x_{ni} + b_o \tag{1}$$

    **Backward**, given $\bar y$. By the chain rule, the gradient of anything is the sum over all $y_{no}$ of
    $\bar y_{no}$ times the derivative of $y_{no}$. From (1),

    $$\frac{\partial y_{no}}{\partial W_{pi}} = \delta_{op}\, x_{ni}, \qquad
      \frac{\partial y_{no}}{\partial b_p} = \delta_{op}, \qquad
      \frac{\partial y_{no}}{\partial x_{mi}} = \delta_{nm}\, W_{oi} \tag{2}$$

    Each $\delta$ removes the sum over its index; the sum over the other one stays. $W$ and $b$ serve every position,
    so positions are summed; $x_{ni}$ reaches all outputs of its own position, so outputs are summed.

    $$\bar W_{oi} = \sum_n \bar y_{no}\, x_{ni} \tag{3}$$
    $$\bar b_o = \sum_n \bar y_{no} \tag{4}$$
    $$\bar x_{ni} = \sum_o \bar y_{no}\, W_{oi} \tag{5}$$

    **Reading.** Of the three letters in (1), each gradient takes the two arrays it isn't and sums the letter it
    lacks. This rule (swap the output with the operand) holds for every contraction of two arrays.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        std: float | None = None,
        *,
        dtype: np.typing.DTypeLike = np.float32,
        rng: Seed = None,
    ):
        check_positive(in_features=in_features, out_features=out_features)
        if std is None:
            std = math.sqrt(2 / (in_features + out_features))
        check_not_negative(std=std)
        self.weight = Parameter(truncated_normal((out_features, in_features), std, rng, dtype))
        self.bias = Parameter(np.zeros(out_features, dtype)) if bias else None

    def forward(self, x: Float[Array, "... in_features"]) -> Float[Array, "... out_features"]:
        """Return W x + b for x of shape (..., in_features)."""
        check_features(x, self.weight.shape[1])
        self.saved = x
        y = einsum("...i,oi->...o", x, self.weight.value)  # (1)
        if self.bias is not None:
            y += self.bias.value
        return y

    def backward(self, dy: Float[Array, "... out_features"]) -> Float[Array, "... in_features"]:
        """Add the gradients of W and b; return that of x."""
        x = self.saved
        check_cotangent(dy, (*x.shape[:-1], self.weight.shape[0]))
        for o in self.weight.blocks() if self.weight.trainable else ():  # some rows of W, of outputs
            self.weight.grad[o] += einsum("...o,...i->oi", dy[..., o], x)  # (3), from (2)
        if self.bias is not None:
            self.bias.grad += einsum("...o->o", dy)  # (4)
        return einsum("...o,oi->...i", dy, self.weight.value)  # (5)
