"""Figures of the page on norms."""

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from book.figures import BACKWARD, FORWARD, MUTED
from numpygpt.layers import LayerNorm, RMSNorm

COTANGENT = np.array([0.9, 0.45])


def arrow(axes: Any, start: Any, step: Any, colour: str, width: float = 1.6) -> None:
    """Draw an arrow that begins at `start`."""
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}
    axes.annotate("", (start[0] + step[0], start[1] + step[1]), start, arrowprops=style)


def tangent() -> Figure:
    """Draw RMSNorm of two features: the cotangent at points of its circle, and what of it goes back to x."""
    norm = RMSNorm(2, 0.0, dtype=np.float64)
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    angle = np.linspace(0, 2 * math.pi, 200)
    for axes in (left, right):
        axes.plot(math.sqrt(2) * np.cos(angle), math.sqrt(2) * np.sin(angle), color=FORWARD, linewidth=1)
        axes.plot(0, 0, ".", color="black", markersize=3)
        axes.set_aspect("equal")
        axes.axis("off")
    turned = 2 * math.pi * (np.arange(8) + 0.35) / 8
    h = norm.forward(np.stack([np.cos(turned), np.sin(turned)], axis=-1) * math.sqrt(2))  # of rms 1 already
    dx = norm.backward(np.tile(COTANGENT, (8, 1)))
    for point, gradient in zip(h, dx, strict=True):
        arrow(left, point, COTANGENT, MUTED, 1.1)
        arrow(left, point, gradient, BACKWARD)
        left.plot(*point, "o", color=FORWARD, markersize=4)
    left.set_xlim(-2, 2.6)
    left.set_ylim(-2, 2.2)
    left.set_title(r"grey $\bar h$, red $\bar x$, where rms is 1", fontsize=10)
    for turn in (0.25, 2.0, 4.3):
        line = np.array([math.cos(turn), math.sin(turn)]) * math.sqrt(2)
        right.plot([0, 2.2 * line[0]], [0, 2.2 * line[1]], color=MUTED, linewidth=0.7)
        x = np.array([0.5, 1, 2])[:, None] * line
        norm.forward(x)
        for point, gradient in zip(x, norm.backward(np.tile(COTANGENT, (3, 1))), strict=True):
            arrow(right, point, gradient, BACKWARD)
            right.plot(*point, "o", color=FORWARD, markersize=4)
    right.set_xlim(-3.2, 3.6)
    right.set_ylim(-3.1, 3)
    right.set_title(r"$\bar x$ at rms 1/2, 1 and 2: one over the length", fontsize=10)
    return figure


def removed() -> Figure:
    """Draw one cotangent of eight features, and what each norm leaves of it."""
    rng = np.random.default_rng(4)
    x, dh = rng.standard_normal(8) + 1.0, rng.standard_normal(8) + 0.6
    figure = Figure(figsize=(7, 2.3), layout="constrained")
    panels: list[tuple[str, Any, str]] = [(r"$x$", x, FORWARD), (r"$\bar h = \bar y$ (gain 1)", dh, BACKWARD)]
    for norm in (RMSNorm(8, 0.0, dtype=np.float64), LayerNorm(8, 0.0, dtype=np.float64)):
        norm.forward(x)
        panels.append((rf"$\bar x$ of {type(norm).__name__}", norm.backward(dh), BACKWARD))
    for axes, (title, values, colour) in zip(figure.subplots(1, 4, sharey=True), panels, strict=True):
        axes.bar(range(8), values, color=colour, width=0.75)
        axes.axhline(0, color="black", linewidth=0.7)
        axes.axhline(values.mean(), color="black", linewidth=1, linestyle="--")
        axes.set_title(title, fontsize=9.5)
        axes.set_xticks([])
        total, along = (abs(round(z, 9)) and z for z in (values.sum(), values @ x))  # rounding may leave -1e-16
        axes.set_xlabel(f"sum {total:.2f}\nalong $x$: {along:.2f}", fontsize=8.5)
        axes.tick_params(axis="y", labelsize=8)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    return figure
