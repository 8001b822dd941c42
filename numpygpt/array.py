"""Arrays of either device: their type, their transfer, and the checks made before anything is changed."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any  # a numpy.ndarray, or any array that answers NumPy's calls (NEP 13, 18, 35), as CuPy's do


def mover(device: str) -> Callable[[Array], Array]:
    """Return the function that copies an array to "cpu" or "cuda"."""
    if device == "cpu":
        return lambda x: x.get() if hasattr(x, "get") else x  # .get() is CuPy's explicit copy to the host
    if device == "cuda":
        try:
            import cupy
        except ImportError as error:
            raise ImportError('device "cuda" needs CuPy: pip install -e ".[cuda12]" or ".[cuda13]"') from error
        return cupy.asarray
    raise ValueError(f'device must be "cpu" or "cuda", not {device!r}')


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


def check_ids(ids: Array, size: int, what: str) -> None:
    """Raise unless `ids` are integers in 0..size-1 (NumPy would wrap negative ones, CuPy all of them)."""
    if not hasattr(ids, "dtype"):
        raise TypeError(f"{what}s must be an array of integers, not a {type(ids).__name__}")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"{what}s must be integers, not {ids.dtype}")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= size):
        bad = ids[(ids < 0) | (ids >= size)].reshape(-1)[0]
        raise IndexError(f"{what} {int(bad)} is outside 0..{size - 1}")
