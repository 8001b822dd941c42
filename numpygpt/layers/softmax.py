r"""Softmax: scores become probabilities."""

import numpy as np
from jaxtyping import Float

from numpygpt.array import Array, check_cotangent
from numpygpt.einsum import einsum
from numpygpt.module import Module


def exponentials(x: Array, axis: int, out: Array | None = None) -> tuple[Array, Array]:
    """Return (1) and (2)'s sum of Softmax, or 1 for that where all of x is -inf; `out` may be x."""
    largest = np.max(x, axis=axis, keepdims=True)
    largest = np.where(largest == -np.inf, 0, largest)  # -inf - -inf would be NaN
    e = np.subtract(x, largest, out=out)
    np.exp(e, out=e)  # (1)
    total = np.sum(e, axis=axis, keepdims=True)
    return e, np.where(total == 0, 1, total)


class Softmax(Module):
    r"""$p_s = e^{x_s} / \sum_{s'} e^{x_{s'}}$ along one axis.

    Source: Bishop (2006), *Pattern Recognition and Machine Learning*, eqs. 4.104 and 4.106 (the Jacobian).
    A score of $-\infty$ gets probability 0 exactly. **Departure:** a row of nothing but $-\infty$ gives zeros
    (others give NaN), since an attention query that sees no key must not disturb the rest.
    Indices: $s, k$ run along the axis. $\bar z$ means $\partial L/\partial z$.

    **Forward.** Dividing numerator and denominator by $e^M$, $M = \max_s x_s$, changes nothing but the size of
    the numbers: every exponent is at most 0, and the sum lies between 1 and its number of terms.

    $$e_s = e^{x_s - M} \tag{1}$$
    $$p_s = e_s \Big/ \sum_k e_k \tag{2}$$

    **The Jacobian.** Since $M$ changes nothing, it may be held fixed. With $Z = \sum_k e_k$,
    $\partial e_k/\partial x_s = \delta_{ks}\, e_s$ and $\partial Z/\partial x_s = e_s$, so by the quotient rule

    $$\frac{\partial p_k}{\partial x_s} = \frac{\delta_{ks}\, e_s}{Z} - \frac{e_k\, e_s}{Z^2}
      = p_s\,(\delta_{ks} - p_k) \tag{3}$$

    **Backward**, given $\bar p$. Multiply (3) by $\bar p_k$ and sum over $k$; no Jacobian is ever stored:

    $$\bar x_s = \sum_k \bar p_k\, p_s\,(\delta_{ks} - p_k)
      = p_s \Big(\bar p_s - \sum_k \bar p_k\, p_k\Big) \tag{4}$$

    **Reading.** The gradient of a score is the excess of its cotangent over the average under $p$, times $p_s$: descent
    lowers the scores that cost more than the average and raises the others. Adding a
    constant to all scores changes nothing, so $\sum_s \bar x_s = 0$. Where $p_s = 0$, the gradient is 0 exactly: a
    hidden key gets none.
    """

    def __init__(self, axis: int = -1):
        self.axis = axis

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return probabilities along the axis; zeros where all of x is -inf."""
        p, total = exponentials(x, self.axis)  # (1)
        p /= total  # (2)
        self.saved = p
        return p

    def backward(self, dp: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the gradient of x."""
        p = self.saved
        check_cotangent(dp, p.shape)
        along = np.moveaxis(dp, self.axis, -1), np.moveaxis(p, self.axis, -1)
        average = einsum("...k,...k->...", *along)
        dx = dp - np.expand_dims(average, self.axis)  # the bracket of (4), from (3)
        dx *= p  # (4)
        return dx
