"""Directions in which an array is moved: some of its elements, each by itself, or all of them at random."""

from collections.abc import Iterator

import numpy as np

from numpygpt.array import Array


def at(element: int, shape: tuple[int, ...]) -> str:
    """Return the index of an element counted in memory order, as one would type it."""
    return str([int(i) for i in np.unravel_index(element, shape)])


class Elements:
    """Unit vectors of some elements, made one at a time."""

    def __init__(self, shape: tuple[int, ...], elements: Array):
        self.shape, self.elements = shape, elements
        self.complete = len(elements) == np.prod(shape)
        self.moved = f"{len(elements)} of {np.prod(shape)} elements"

    def __iter__(self) -> Iterator[Array]:
        for element in self.elements:
            v = np.zeros(self.shape)
            v[np.unravel_index(element, self.shape)] = 1
            yield v

    def along(self, dz: Array) -> Array:
        """Return the product of dz with each direction."""
        return dz.reshape(-1)[self.elements]

    def where(self, k: int) -> str:
        """Return what to call direction k."""
        return at(int(self.elements[k]), self.shape)


class Random:
    """Directions of standard normal numbers."""

    complete = False

    def __init__(self, shape: tuple[int, ...], number: int, rng: np.random.Generator):
        self.vectors = rng.standard_normal((number, *shape))
        self.moved = f"{number} directions"

    def __iter__(self) -> Iterator[Array]:
        return iter(self.vectors)

    def along(self, dz: Array) -> Array:
        """Return the product of dz with each direction."""
        return self.vectors.reshape(len(self.vectors), -1) @ dz.reshape(-1)

    def where(self, k: int) -> str:
        """Return what to call direction k."""
        return f"direction {k}"


Directions = Elements | Random
