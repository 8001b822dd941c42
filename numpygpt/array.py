"""Arrays of either device: their type, and the checks made before anything is changed."""

import math
from typing import Any

import numpy as np

Array = Any  # a numpy.ndarray, or any array that answers NumPy's calls (NEP 13, 18, 35), as CuPy's do


def at_least_float32(x: Array) -> Array:
    """Return a float16 array as float32 (in float16 the square of 1e-4 is 0), any other as it is."""
    return x.astype(np.float32) if x.dtype == np.float16 else x


def check_positive(**sizes: int) -> None:
    """Raise ValueError, naming the argument, unless every size is an integer of at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, not {size!r}")


def check_not_negative(**numbers: float) -> None:
    """Raise ValueError, naming the argument, unless every number is finite and at least 0."""
    for name, number in numbers.items():
        if not (number >= 0 and math.isfinite(number)):
            raise ValueError(f"{name} must be a finite number of at least 0, not {number!r}")


def check_features(x: Array, features: int) -> None:
    """Raise unless x holds floating-point numbers, `features` of them along its last axis."""
    if x.dtype.kind != "f":
        raise TypeError(f"the input must hold floating-point numbers, not {x.dtype}")
    if x.shape[-1:] != (features,):
        raise ValueError(f"the last axis of the input must have size {features}, but its shape is {x.shape}")


def check_cotangent(dy: Array, shape: tuple[int, ...]) -> None:
    """Raise unless the cotangent has the shape of what forward returned (broadcasting would lose a sum)."""
    if dy.shape != shape:
        raise ValueError(f"the cotangent has shape {dy.shape}, but forward returned shape {shape}")


def check_integers(ids: Array, what: str) -> None:
    """Raise TypeError unless `ids` is an array of integers."""
    if not hasattr(ids, "dtype"):
        raise TypeError(f"{what}s must be an array of integers, not a {type(ids).__name__}")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"{what}s must be integers, not {ids.dtype}")


def check_ids(ids: Array, size: int, what: str) -> None:
    """Raise unless `ids` are integers in 0..size-1 (NumPy would wrap negative ones, CuPy all of them)."""
    check_integers(ids, what)
    # Read as unsigned, negative ones are the largest of all: one number to look at, for which a GPU is waited for.
    if ids.size and int(ids.astype(np.int64, copy=False).view(np.uint64).max()) >= size:
        bad = ids[(ids < 0) | (ids >= size)].reshape(-1)[0]
        raise IndexError(f"{what} {int(bad)} is outside 0..{size - 1}")
