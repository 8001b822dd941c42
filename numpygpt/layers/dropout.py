r"""Dropout: set features to zero at random while training."""

import numpy as np
from jaxtyping import Float

from numpygpt.array import Array, check_cotangent
from numpygpt.init import Seed
from numpygpt.module import Module


class Dropout(Module):
    r"""Drops each element with probability $p$ in training; the identity in evaluation.

    Source: Srivastava et al. (2014), JMLR 15:1929-1958, section 4. **Departures:** $p$ here is the probability of
    dropping, not of keeping; and the 'inverted' form of section 10, what is kept is scaled by $1/(1-p)$ while
    training, so that the expected value is right and evaluation needs no factor. The layer draws from its own
    generator `rng`. It draws on the host whatever the device, so that a seed means the same masks everywhere.

    **Forward**, with independent $m \in \{0, 1\}$, $P(m = 1) = 1 - p$:

    $$y = \frac{m}{1-p}\, x, \qquad E[y] = x \tag{1}$$

    **Backward.** (1) is linear in $x$ with the factor $m/(1-p)$, which doesn't depend on $x$:

    $$\bar x = \frac{m}{1-p}\, \bar y \tag{2}$$

    **Reading.** What was dropped had no say in the loss and gets no gradient. Backward uses the mask of its
    forward.
    """

    def __init__(self, p: float, rng: Seed = None):
        if not 0 <= p < 1:
            raise ValueError(f"dropout p must be at least 0 and below 1, not {p!r}")
        self.p = float(p)
        self.rng = np.random.default_rng(rng)

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return x with elements dropped (training), or x itself."""
        if not self.training or self.p == 0:
            self.saved = None
            return x
        keep = self.rng.random(x.shape, dtype=np.float32) >= self.p
        factor = np.asarray(keep.astype(x.dtype) / (1 - self.p), like=x)
        self.saved = factor
        return factor * x  # (1)

    def backward(self, dy: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the gradient of x."""
        factor = self.saved
        if factor is not None:
            check_cotangent(dy, factor.shape)
        return dy if factor is None else factor * dy  # (2)
