"""The classic mistakes, by name: what would make a wrong gradient right?"""

import math

import numpy as np

from numpygpt.array import Array
from numpygpt.gradcheck.directions import Directions

CLOSE = 1e-3


def wrong_shape(claimed: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Say what is wrong with the shape of a gradient."""
    fault = f"has shape {claimed}, not {shape}"
    if claimed == shape[::-1]:
        return f"{fault}: it is transposed"
    if claimed[len(claimed) - len(shape) :] == shape:
        return f"{fault}: the sum over the leading axes is missing"
    return fault


def name_the_fault(dz: Array, v: Directions, j: Array, dy: Array, shapes: dict[str, tuple[int, ...]]) -> str:
    """Return the kind of mistake that the gradient `dz` shows, or "" if it is none of those known here.

    Given are the directions `v` and J v in the rows of `j`, the cotangent as a vector, and the shapes of outputs and
    inputs. One direction isn't enough to tell, and an expected gradient of zero tells nothing.
    """
    actual, expected = v.along(dz), j @ dy
    if not np.isfinite(dz).all():
        return "is not finite"
    if len(expected) < 2 or not expected.any():
        return ""
    if not actual.any():
        return "is zero"
    if dz.ndim >= 2 and dz.shape[-1] == dz.shape[-2] and agree(v.along(dz.swapaxes(-1, -2)), expected):
        return "is transposed"
    factor = float(actual @ expected / (expected @ expected))
    if abs(factor - 1) > CLOSE and agree(actual, factor * expected):
        return name_the_factor(factor, shapes)
    shape = next(iter(shapes.values()))
    if math.prod(shape) == len(dy) and len(shape) > 1:
        for k in (0, -1):
            alone = np.zeros(shape)
            alone[k] = dy.reshape(shape)[k]
            if agree(actual, j @ alone.reshape(-1)):
                return f"counts y[{k}] alone: the sum over the leading axis is missing"
    return ""


def agree(actual: Array, expected: Array) -> bool:
    """Whether two vectors are equal, as far as it takes to name a mistake."""
    return bool(np.linalg.norm(actual - expected) <= CLOSE * np.linalg.norm(expected))


def name_the_factor(factor: float, shapes: dict[str, tuple[int, ...]]) -> str:
    """Say by what a gradient is too large or too small, and where such a number could come from."""
    if abs(factor + 1) <= CLOSE:
        return "has the wrong sign"
    for name, shape in shapes.items():
        origins = {"the size": math.prod(shape), "the number of positions": math.prod(shape[:-1])}
        for origin, n in [*origins.items(), *((f"axis {i}", n) for i, n in enumerate(shape))]:
            if n > 1 and min(abs(factor / n - 1), abs(factor * n - 1)) <= CLOSE:
                return f"is {n if factor > 1 else f'1/{n}'} times what it should be ({n} is {origin} of {name})"
    return f"is {factor:.4g} times what it should be"
