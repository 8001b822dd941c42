r"""Activations: one function, applied to each element by itself.

All share one rule. If $y = f(x)$ element by element, $\partial y_k/\partial x_c = \delta_{kc} f'(x_c)$, so

$$\bar x = \bar y\, f'(x) \tag{A}$$

and each class below needs no more than its $f'$.
"""

import math

import numpy as np
from jaxtyping import Float

from numpygpt.array import Array, check_cotangent
from numpygpt.module import Module
from numpygpt.special import normal_cdf, normal_pdf


def sigmoid(x: Array) -> Array:
    r"""Return $1/(1 + e^{-x})$, where $e^{-x}$ may overflow to infinity: $1/(1 + \infty) = 0$ is the right answer."""
    with np.errstate(over="ignore"):
        y = np.exp(-x)
    y += 1
    return np.reciprocal(y, out=y)


class Identity(Module):
    """$y = x$: the activation of the bilinear gated unit."""

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return x."""
        return x

    def backward(self, dy: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return dy."""
        return dy


class ReLU(Module):
    r"""Rectified linear unit.

    Source: Nair & Hinton (2010), *Rectified linear units improve restricted Boltzmann machines*, ICML, section 2.

    $$y = \max(x, 0) \tag{1}$$
    $$f'(x) = \mathbb 1[x > 0] \tag{2}$$

    At $x = 0$ there is no derivative; 0 is taken, one of the two one-sided ones, as is usual.
    **Reading.** An element lets its gradient pass if it let its value pass.
    """

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return max(x, 0)."""
        self.saved = x > 0
        return np.maximum(x, 0)  # (1)

    def backward(self, dy: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the gradient of x."""
        positive = self.saved
        check_cotangent(dy, positive.shape)
        return dy * positive  # (A), (2)


class Sigmoid(Module):
    r"""The logistic function.

    Source: Rumelhart, Hinton & Williams (1986), doi:10.1038/323533a0, eq. 2.

    $$y = \sigma(x) = \frac{1}{1 + e^{-x}} \tag{1}$$

    By the quotient rule $f' = e^{-x}/(1 + e^{-x})^2$, the product of $y$ and $e^{-x}/(1 + e^{-x}) = 1 - y$:

    $$f'(x) = y\,(1 - y) \tag{2}$$

    **Reading.** Steepest in the middle (1/4 at 0), flat at both ends: a saturated gate passes no gradient.
    """

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return 1 / (1 + exp(-x))."""
        y = sigmoid(x)  # (1)
        self.saved = y
        return y

    def backward(self, dy: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the gradient of x."""
        y = self.saved
        check_cotangent(dy, y.shape)
        return dy * y * (1 - y)  # (A), (2)


class SiLU(Module):
    r"""Sigmoid-weighted linear unit, also called swish.

    Source: Elfwing, Uchibe & Doya (2018), arXiv:1702.03118, section 2; as swish: Ramachandran, Zoph & Le (2017),
    arXiv:1710.05941.

    $$y = x\, \sigma(x) \tag{1}$$

    By the product rule, with $\sigma' = \sigma(1 - \sigma)$,

    $$f'(x) = \sigma(x) + x\, \sigma(x)\,(1 - \sigma(x)) = \sigma(x) + y\,(1 - \sigma(x)) \tag{2}$$

    **Reading.** A soft gate: for large $x$ the identity, for very negative $x$ zero. The slope goes from 0 to 1,
    overshooting to 1.10 at $x \approx 2.4$.
    """

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return x sigmoid(x)."""
        s = sigmoid(x)
        y = x * s  # (1)
        self.saved = s, y
        return y

    def backward(self, dy: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the gradient of x."""
        s, y = self.saved
        check_cotangent(dy, y.shape)
        dx = 1 - s
        dx *= y
        dx += s  # (2)
        dx *= dy  # (A)
        return dx


class GELU(Module):
    r"""Gaussian error linear unit: exact (`approximate="none"`) or by tanh (`"tanh"`, which GPT-2 uses).

    Source: Hendrycks & Gimpel (2016), arXiv:1606.08415, section 2. Two functions, up to 5e-4 apart: a checkpoint
    was trained with one of them, and the other is wrong for it.

    **Where it comes from.** Drop $x$ at random, more readily the smaller it is: keep it, $m = 1$, with probability
    $\Phi(x) = P(Z \le x)$, $Z$ standard normal, and set it to zero, $m = 0$, otherwise. Then
    $E[x\, m] = x \cdot P(m = 1) + 0 \cdot P(m = 0) = x\, \Phi(x)$: GELU is the expected value of that dropout.

    **Exact**

    $$y = x\, \Phi(x) \tag{1}$$

    $\Phi' = \varphi$, the density $e^{-x^2/2}/\sqrt{2\pi}$, so by the product rule

    $$f'(x) = \Phi(x) + x\, \varphi(x) \tag{2}$$

    **Tanh form**, with $a = \sqrt{2/\pi}$ and $b = 0.044715$. $\tfrac12(1 + \tanh u)$ stands for $\Phi(x)$:

    $$u = a\,(x + b\, x^3), \qquad \tau = \tanh u \tag{3}$$
    $$y = \tfrac12\, x\,(1 + \tau) \tag{4}$$

    $\tanh' = 1 - \tanh^2$ and $du/dx = a\,(1 + 3 b\, x^2)$, so by the product and the chain rule

    $$f'(x) = \tfrac12\,(1 + \tau) + \tfrac12\, x\,(1 - \tau^2)\, a\,(1 + 3 b\, x^2) \tag{5}$$

    Beyond $|x| = 10$, $\tau = \pm 1$ to all digits of float64; $u$ is taken at $\pm 10$ there and the second term
    of (5) is 0, which keeps powers of large $x$ from overflowing.

    **Reading.** Like SiLU a soft gate. The slope exceeds 1 beyond $x \approx 0.75$ (1.13 at $\sqrt2$) and is slightly
    negative below $x \approx -0.75$.
    """

    def __init__(self, approximate: str = "none"):
        if approximate not in ("none", "tanh"):
            raise ValueError(f'approximate must be "none" or "tanh", not {approximate!r}')
        self.approximate = approximate

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return x Phi(x), or its tanh form."""
        if self.approximate == "none":
            cdf = normal_cdf(x)
            self.saved = x, cdf
            return x * cdf  # (1)
        c = np.clip(x, -10, 10)
        t = np.tanh(math.sqrt(2 / math.pi) * c * (1 + 0.044715 * c * c))  # (3)
        self.saved = c, t
        return 0.5 * x * (1 + t)  # (4)

    def backward(self, dy: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the gradient of x."""
        check_cotangent(dy, self.saved[0].shape)
        if self.approximate == "none":
            x, cdf = self.saved
            return dy * (cdf + x * normal_pdf(x))  # (A), (2)
        c, t = self.saved
        slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * c * c)  # du/dx
        return dy * (0.5 * (1 + t) + 0.5 * c * (1 - t * t) * slope)  # (A), (5)


ACTIVATIONS = {
    "relu": ReLU,
    "sigmoid": Sigmoid,
    "silu": SiLU,
    "gelu": GELU,
    "gelu_tanh": lambda: GELU("tanh"),
    "identity": Identity,
}


def make_activation(name: str) -> Module:
    """Return a new activation by name: one of the keys of ACTIVATIONS."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}, not {name!r}")
    return ACTIVATIONS[name]()
