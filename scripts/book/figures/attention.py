"""Figures of the page on attention."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from book.figures import BACKWARD, FORWARD, MUTED
from book.figures.matrices import bare
from numpygpt.array import Array
from numpygpt.layers import ScaledDotProductAttention, Softmax

LENGTH, WIDTH, SEED = 5, 4, 3


def draw_row_by_row(axes: Any, array: Array, visible: Array, colour: str, title: str, form: str) -> None:
    """Draw a matrix of queries and keys in unit cells, stronger where larger, a dash where a key is hidden."""
    queries, keys = array.shape
    bare(axes, keys + 0.7, queries + 1.2)
    largest = float(np.abs(array[visible]).max())
    for t in range(queries):
        for s in range(keys):
            seen, value = bool(visible[t, s]), float(array[t, s])
            shade = 0.08 + 0.42 * abs(value) / largest if seen else 0.0
            box = (0.6 + s, queries - t - 1), 1, 1
            axes.add_patch(Rectangle(*box, facecolor=colour, alpha=shade, linewidth=0))
            axes.add_patch(Rectangle(*box, facecolor="none", edgecolor=colour if seen else MUTED, linewidth=0.6))
            text = format(round(value, int(form[1])) + 0.0, form).replace("-", "−") if seen else "–"
            axes.text(1.1 + s, queries - t - 0.54, text, ha="center", va="center", fontsize=7.5)
        axes.text(0.45, queries - t - 0.54, str(t), ha="right", va="center", fontsize=7.5)
    axes.text(0.6 + keys / 2, queries + 0.3, title, ha="center", va="bottom", fontsize=9.5)


def probabilities() -> Figure:
    """Draw one causal head of five tokens: probabilities, their gradient, and that of the scores."""
    rng = np.random.default_rng(SEED)
    q, k, v, do = rng.standard_normal((4, LENGTH, WIDTH))
    visible = np.tri(LENGTH, dtype=bool)
    attention = ScaledDotProductAttention()
    p = attention.forward(q, k, np.eye(LENGTH), visible)  # values that name their key: the output is p itself
    attention.forward(q, k, v, visible)
    dq = attention.backward(do)[0]
    softmax = Softmax()
    softmax.forward(np.where(visible, q @ k.T / WIDTH**0.5, -np.inf))
    dp = do @ v.T  # (6)
    da = softmax.backward(dp)
    np.testing.assert_allclose(da @ k / WIDTH**0.5, dq)  # the layer's own way, by (7), is the same
    figure = Figure(figsize=(7, 2.6))
    panels = [
        (p, FORWARD, r"$p_{ts}$: each row sums to 1", ".2f"),
        (dp, BACKWARD, r"$\bar p_{ts} = \bar o_t \cdot v_s$", ".1f"),
        (da, BACKWARD, r"$\bar a_{ts}$: each row sums to 0", ".2f"),
    ]
    for i, (array, colour, title, form) in enumerate(panels):
        axes = figure.add_axes((0.005 + 0.335 * i, 0.02, 0.325, 0.96))
        draw_row_by_row(axes, array, visible, colour, title, form)
    return figure


def masks() -> Figure:
    """Draw which keys are visible: in one pass, to two new tokens behind three cached ones, and to a single one."""
    figure = Figure(figsize=(7, 2.2))
    for i, (title, queries) in enumerate(
        [("no cache: 5 queries", range(5)), ("3 cached, 2 new", range(3, 5)), ("4 cached, 1 new", range(4, 5))]
    ):
        axes = figure.add_axes((0.01 + 0.335 * i, 0.02, 0.31, 0.96))
        bare(axes, 6.2, 5.8)
        axes.set_ylim(-0.8, 5.8)
        axes.text(3.4, 5.15, title, ha="center", va="bottom", fontsize=9.5)
        cached = 5 - len(queries) if len(queries) < 5 else 0
        for t in queries:
            axes.text(0.75, 4.5 - t, f"$q_{t}$", ha="right", va="center", fontsize=9)
            for s in range(5):
                shade = 0.35 if s <= t else 0.0
                box = (0.9 + s, 4 - t), 1, 1
                axes.add_patch(Rectangle(*box, facecolor=MUTED if s < cached else FORWARD, alpha=shade, linewidth=0))
                axes.add_patch(Rectangle(*box, facecolor="none", edgecolor=MUTED, linewidth=0.6))
        for s in range(5):
            axes.text(1.4 + s, -0.08, f"$k_{s}$", ha="center", va="top", fontsize=9)
    return figure
