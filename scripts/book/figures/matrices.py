"""Matrices drawn as cells with their numbers, and products of them."""

from typing import Any

import numpy as np
from matplotlib.patches import Rectangle

from numpygpt.array import Array


def draw_matrix(axes: Any, array: Array, left: float, top: float, colour: str, axes_names: str, title: str) -> float:
    """Draw `array` in unit cells, darker where larger, its two axes named; return the x of its right edge."""
    rows, columns = array.shape
    largest = max(float(np.abs(array).max()), 1e-9)
    for i in range(rows):
        for j in range(columns):
            value = float(array[i, j])
            box = (left + j, top - i - 1), 1, 1
            axes.add_patch(Rectangle(*box, facecolor=colour, alpha=0.08 + 0.42 * abs(value) / largest, linewidth=0))
            axes.add_patch(Rectangle(*box, facecolor="none", edgecolor=colour, linewidth=0.8))
            axes.text(left + j + 0.5, top - i - 0.53, f"{value:.3g}", ha="center", va="center", fontsize=8)
    axes.text(left - 0.15, top - rows / 2, f"${axes_names[0]}$", ha="right", va="center", fontsize=11)
    axes.text(left + columns / 2, top + 0.12, f"${axes_names[1]}$", ha="center", va="bottom", fontsize=11)
    axes.text(left + columns / 2, top - rows - 0.2, title, ha="center", va="top", fontsize=10)
    return left + columns


def draw_product(axes: Any, factors: list[tuple[Array, str, str, str]], left: float, middle: float) -> float:
    """Draw matrices in a row, all but the last as factors and that one as their product; return the right edge.

    Each comes as (array, colour, names of its axes, title); `middle` is the y of the row's middle.
    """
    for k, (array, colour, names, title) in enumerate(factors):
        if k:
            sign = "=" if k == len(factors) - 1 else r"$\cdot$"
            axes.text(left + 0.55, middle, sign, ha="center", va="center", fontsize=12)
            left += 1.6
        left = draw_matrix(axes, array, left, middle + array.shape[0] / 2, colour, names, title)
    return left


def bare(axes: Any, width: float, height: float) -> None:
    """Show the rectangle (0, 0) to (width, height) in square units, without a frame."""
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.set_aspect("equal")
    axes.axis("off")
