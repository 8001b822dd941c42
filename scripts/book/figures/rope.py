"""Figures of the page on positions."""

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from book.figures import BACKWARD, FORWARD, MUTED, THIRD
from numpygpt.array import Array
from numpygpt.config import RopeScaling
from numpygpt.layers import RotaryPositionalEmbedding

SHADES = (0.3, 0.5, 0.75, 1.0)


def draw_arrows(axes: Any, arrows: Array, colour: str, names: list[str]) -> None:
    """Draw arrows from the centre of the unit circle, fainter the earlier, with a name at each tip."""
    angle = np.linspace(0, 2 * math.pi, 100)
    axes.plot(np.cos(angle), np.sin(angle), color=MUTED, linewidth=0.8)
    for (x, y), shade, name in zip(arrows, SHADES, names, strict=True):
        style = {"arrowstyle": "-|>", "color": colour, "alpha": shade, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (x, y), (0, 0), arrowprops=style)
        axes.text(1.22 * x, 1.22 * y, name, ha="center", va="center", fontsize=9)
    axes.set_xlim(-1.5, 1.5)
    axes.set_ylim(-1.45, 1.45)
    axes.set_aspect("equal")
    axes.axis("off")


def turns() -> Figure:
    """Draw one pair at four positions: the value turned forward, and a gradient turned back."""
    rope = RotaryPositionalEmbedding(10000.0, 2, 4, dtype=np.float64)
    t = np.arange(4)
    y = rope.forward(np.tile([1.0, 0.0], (4, 1)), t)
    dx = rope.backward(np.tile([0.0, 1.0], (4, 1)))
    figure = Figure(figsize=(6, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_arrows(left, y, FORWARD, [f"$t={i}$" for i in t])
    draw_arrows(right, dx, BACKWARD, [f"$t={i}$" for i in t])
    left.set_title(r"forward: $y$ of $x = (1, 0)$", fontsize=10)
    right.set_title(r"backward: $\bar x$ of $\bar y = (0, 1)$", fontsize=10)
    return figure


def periods() -> Figure:
    """Draw how many tokens each pair of a head needs for a full turn, without scaling and with both."""
    figure = Figure(figsize=(6.5, 3), layout="constrained")
    axes = figure.subplots()
    scalings = [
        ("as trained", None, FORWARD),
        ("linear, $f = 8$", RopeScaling("linear", 8.0), BACKWARD),
        ("llama3, $f = 8$", RopeScaling("llama3", 8.0, 1.0, 4.0, 8192), THIRD),
    ]
    for name, scaling, colour in scalings:
        rope = RotaryPositionalEmbedding(500000.0, 64, 2, scaling=scaling, dtype=np.float64)
        period = 2 * math.pi / np.angle(rope.turn[1])
        axes.plot(period, color=colour, marker="o", markersize=3, linewidth=1.2, label=name)
    axes.axhline(8192, color=MUTED, linewidth=0.8, linestyle="--")
    axes.text(0, 9500, "context of the training, 8192 tokens", fontsize=8, va="bottom")
    axes.set_yscale("log")
    axes.set_xlabel("pair $i$ of a head of width 64")
    axes.set_ylabel("tokens for a full turn")
    axes.legend(frameon=False, fontsize=8.5, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
