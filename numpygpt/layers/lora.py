r"""LoRA: a linear map of many weights learns through two small matrices beside it."""

import numpy as np
from jaxtyping import Float

from numpygpt.array import Array, check_positive
from numpygpt.einsum import einsum
from numpygpt.init import Seed, truncated_normal
from numpygpt.layers.linear import Linear
from numpygpt.module import Module, Parameter


class LoRALinear(Module):
    r"""$y = W x + b + \gamma\, B A x$: a Linear that stays, and beside it a map of low rank that learns.

    Source: Hu et al. (2021), arXiv:2106.09685, eq. 3, with $\gamma = \alpha/R$ (section 4.1). $A$ has shape (R, in)
    and $B$ (out, R): $R\,(\text{in} + \text{out})$ weights in place of $\text{in} \cdot \text{out}$. As there, $B$
    starts at zero and $A$ normal; its deviation, which the paper doesn't give, is $1/\sqrt{\text{in}}$ here, cut at
    ±3, so that the features of $A x$ are as large as those of $x$. Indices: $n$ runs over all leading axes together,
    $i$ input, $o$ output, $r$ feature of low rank. $\bar z$ means $\partial L/\partial z$.

    **Forward**

    $$h_{nr} = \gamma \sum_i A_{ri}\, x_{ni} \tag{1}$$
    $$y_{no} = \sum_i W_{oi}\, x_{ni} + b_o + \sum_r B_{or}\, h_{nr} \tag{2}$$

    **Backward**, given $\bar y$. From (2) and (1),

    $$\frac{\partial y_{no}}{\partial B_{pr}} = \delta_{op}\, h_{nr}, \qquad
      \frac{\partial y_{no}}{\partial h_{mr}} = \delta_{nm}\, B_{or}, \qquad
      \frac{\partial h_{nr}}{\partial A_{qi}} = \gamma\, \delta_{rq}\, x_{ni}, \qquad
      \frac{\partial h_{nr}}{\partial x_{mi}} = \gamma\, \delta_{nm}\, A_{ri} \tag{3}$$

    As in Linear, each $\delta$ removes one sum, and what serves every position sums over positions:

    $$\bar B_{or} = \sum_n \bar y_{no}\, h_{nr} \tag{4}$$
    $$\bar h_{nr} = \sum_o \bar y_{no}\, B_{or} \tag{5}$$
    $$\bar A_{ri} = \gamma \sum_n \bar h_{nr}\, x_{ni} \tag{6}$$

    $x$ fed both maps, so two gradients add: Linear's (5), and the one through $h$.

    $$\bar x_{ni} = \sum_o \bar y_{no}\, W_{oi} + \gamma \sum_r \bar h_{nr}\, A_{ri} \tag{7}$$

    **Merging.** Two linear maps side by side are one. Put (1) into (2):

    $$M_{oi} = W_{oi} + \gamma \sum_r B_{or}\, A_{ri}, \qquad y_{no} = \sum_i M_{oi}\, x_{ni} + b_o \tag{8}$$

    **Reading.** With $\bar W$ for the gradient that Linear's (3) would give, (4) to (6) say
    $\bar B = \gamma\, \bar W A^\top$ and $\bar A = \gamma\, B^\top \bar W$: each adapter sees the gradient of the whole
    matrix through the other one, and that gradient itself is never formed. $B = 0$ makes the first output the
    pretrained one exactly. At that step $\bar A = 0$ by (5), and $B$ alone learns; that it learns at all is due to
    $A \ne 0$. Were both zero, both gradients would be zero for ever.

    $W$ and $b$ are the Linear's own parameters. Frozen, as `numpygpt.adapters.add_lora` has them, they cost neither a
    gradient nor a product; otherwise they learn too, by Linear's (3) and (4).
    """

    def __init__(self, linear: Linear, rank: int, alpha: float = 16.0, *, rng: Seed = None):
        out_features, in_features = linear.weight.shape
        check_positive(rank=rank)
        if rank > min(in_features, out_features):
            raise ValueError(f"rank {rank} is more than a map of {in_features} to {out_features} features can have")
        if not 0 < alpha < float("inf"):
            raise ValueError(f"alpha must be a positive number, not {alpha!r}")
        here = linear.weight.value
        self.linear, self.alpha, self.scale = linear, float(alpha), float(alpha) / int(rank)
        self.A = Parameter(
            np.asarray(truncated_normal((rank, in_features), in_features**-0.5, rng, here.dtype), like=here)
        )
        self.B = Parameter(np.zeros((out_features, rank), here.dtype, like=here))

    def forward(self, x: Float[Array, "... in_features"]) -> Float[Array, "... out_features"]:
        """Return W x + b + (alpha / rank) B A x for x of shape (..., in_features)."""
        y = self.linear.forward(x)  # (2), its first two terms
        h = einsum("...i,ri->...r", x, self.A.value)
        h *= self.scale  # (1)
        self.saved = x, h
        y += einsum("...r,or->...o", h, self.B.value)  # (2)
        return y

    def backward(self, dy: Float[Array, "... out_features"]) -> Float[Array, "... in_features"]:
        """Add the gradients of A and B, and of W and b unless they are frozen; return that of x."""
        x, h = self.saved
        dx = self.linear.backward(dy)  # (7), its first term
        self.B.grad += einsum("...o,...r->or", dy, h)  # (4), from (3)
        dh = einsum("...o,or->...r", dy, self.B.value)  # (5)
        dh *= self.scale  # the factor of (6) and (7)
        self.A.grad += einsum("...r,...i->ri", dh, x)  # (6)
        dx += einsum("...r,ri->...i", dh, self.A.value)  # (7)
        return dx

    def merged(self) -> Float[Array, "out_features in_features"]:
        """Return the one matrix that does what W, A and B do together."""
        return self.linear.weight.value + self.scale * einsum("or,ri->oi", self.B.value, self.A.value)  # (8)
