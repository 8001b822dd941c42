r"""Cross-entropy: what the model should have said, scored."""

import math

import numpy as np
from jaxtyping import Float, Integer

from numpygpt.array import Array, at_least_float32, check_ids, check_integers
from numpygpt.module import Module


class CrossEntropy(Module):
    r"""Mean of $-\log p(\text{target})$ over the counted positions, straight from logits, in nats.

    Source: Bishop (2006), *Pattern Recognition and Machine Learning*, eqs. 4.104 and 4.108-4.109, averaged over
    positions. Positions whose target is `ignore_index` are not counted. **Departure:** with none counted the loss
    is 0 and the gradient 0 (others return NaN). For float16 logits the loss is computed in float32.
    Indices: $n$ runs over all positions together, $v, k$ over the vocabulary; $y_n$ is the target; $N$ positions
    count, those with $a_n = 1$ (others have $a_n = 0$). $\bar z$ means $\partial L/\partial z$.

    **Forward.** With $p = \mathrm{softmax}(x)$, $-\log p_{y} = \log \sum_v e^{x_v} - x_y$. Taking the largest logit
    $M_n$ out of the sum keeps every exponential at or below 1 and the logarithm's argument at or above 1:

    $$z_{nv} = x_{nv} - M_n, \qquad M_n = \max_v x_{nv} \tag{1}$$
    $$\ell_n = \log \sum_v e^{z_{nv}} - z_{n y_n} \tag{2}$$
    $$L = \frac1N \sum_n a_n\, \ell_n \tag{3}$$

    **Backward**, given $\bar L$ (1, when the loss is the end). From (3), $\bar\ell_n = a_n \bar L/N$. In (2) the
    shift $M_n$ cancels, so it may be held fixed: $\partial z_{nk}/\partial x_{nv} = \delta_{kv}$, and

    $$\frac{\partial \ell_n}{\partial x_{nv}} = \frac{e^{z_{nv}}}{\sum_k e^{z_{nk}}} - \mathbb 1[v = y_n]
      = p_{nv} - \mathbb 1[v = y_n] \tag{4}$$
    $$\bar x_{nv} = \frac{a_n\, \bar L}{N}\,\big(p_{nv} - \mathbb 1[v = y_n]\big) \tag{5}$$

    The same through softmax's own backward: $\bar p_v = -\mathbb 1[v = y]/p_y$ put into
    $\bar x_v = p_v(\bar p_v - \sum_k \bar p_k p_k)$ gives
    $p_v\big(-\mathbb 1[v = y]/p_y + 1\big) = p_v - \mathbb 1[v = y]$: the division by a probability, which may be 0,
    cancels. That is why the loss starts from logits.

    **Reading.** The gradient is what the model said less what was so; at each counted position it sums to zero.
    """

    def __init__(self, ignore_index: int | None = None):
        self.ignore_index = ignore_index

    def forward(self, logits: Float[Array, "... vocab"], targets: Integer[Array, "..."]) -> float:
        """Return the mean loss. IndexError for a target outside 0..V-1 that isn't `ignore_index`."""
        return self.number(self.mean(logits, targets), targets, logits.shape[-1])

    def mean(self, logits: Float[Array, "... vocab"], targets: Integer[Array, "..."]) -> Float[Array, ""]:
        """Return the mean loss as an array in float64, which nobody waits for on a GPU; NaN for a wrong target."""
        vocab_size = logits.shape[-1]
        check_integers(targets, "target")
        if targets.shape != logits.shape[:-1]:
            raise ValueError(f"targets of shape {targets.shape} don't fit logits of shape {logits.shape}")
        x, target = at_least_float32(logits).reshape(-1, vocab_size), targets.reshape(-1)
        n = np.arange(target.size, like=target)
        a = np.ones_like(target, dtype=bool) if self.ignore_index is None else target != self.ignore_index
        right = (target >= 0) & (target < vocab_size)
        target = np.where(right, target, 0)
        z = x - np.max(x, axis=-1, keepdims=True)  # (1)
        target_z = np.where(right, z[n, target], np.nan)
        exp_z = np.exp(z, out=z)
        total = np.sum(exp_z, axis=-1, keepdims=True)
        losses = np.log(total[:, 0]) - target_z  # (2)
        count = np.maximum(np.sum(a), 1)
        self.saved = exp_z, total, n, target, a, count, logits.shape, logits.dtype
        return np.sum(np.where(a, losses, 0)).astype(np.float64) / count  # (3)

    def number(self, mean: Float[Array, ""], targets: Integer[Array, "..."], vocab_size: int) -> float:
        """Return `mean` as a number, for which a GPU is waited for. IndexError as in `forward`."""
        loss = mean.item()
        if math.isnan(loss):
            ignored = self.ignore_index
            check_ids(targets if ignored is None else np.where(targets == ignored, 0, targets), vocab_size, "target")
        return loss

    def backward(self, dloss: float = 1.0) -> Float[Array, "... vocab"]:
        """Return the gradient of the logits."""
        exp_z, total, n, target, a, count, shape, dtype = self.saved
        dx = exp_z / total  # (4), p
        dx[n, target] -= 1  # (4)
        dx *= np.where(a, dloss / count, 0)[:, None].astype(dx.dtype)  # (5)
        return dx.reshape(shape).astype(dtype, copy=False)
