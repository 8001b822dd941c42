"""Starting weights."""

import math

import numpy as np

from numpygpt.array import Array

Seed = np.random.Generator | int | None


class Blank(np.random.Generator):
    """A generator for weights that are about to be read from a file: their start is zeros and isn't drawn.

    Their memory isn't even touched before they are written, so a model takes none until then. All else that is drawn
    from it, such as dropout's masks, is random as ever.
    """


def truncated_normal(shape: tuple[int, ...], std: float, rng: Seed, dtype: np.typing.DTypeLike) -> Array:
    """Draw from a normal distribution of mean 0 and deviation `std`, cut at ±3 std by drawing again.

    Drawn in float64 and then rounded to `dtype`, so that a seed means the same weights in every precision.
    """
    rng = np.random.default_rng(rng)
    if isinstance(rng, Blank):
        return np.zeros(shape, dtype)
    x = rng.standard_normal(math.prod(shape))
    while (outside := np.flatnonzero(np.abs(x) > 3)).size:
        x[outside] = rng.standard_normal(outside.size)
    return (std * x).reshape(shape).astype(dtype)
