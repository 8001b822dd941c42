"""Figure of the page on softmax."""

import numpy as np
from matplotlib.figure import Figure

from book.figures import BACKWARD, FORWARD, MUTED
from book.figures.matrices import bare, draw_matrix
from numpygpt.layers import Softmax

SCORES = np.log([1.0, 2, 5])
DP = np.array([-1.0, 0, 1])


def jacobian() -> Figure:
    """Draw the Jacobian of three scores, row by row from backward, and one gradient with its parts."""
    layer = Softmax()
    p = layer.forward(SCORES)
    rows = np.array([layer.backward(unit) for unit in np.eye(3)])
    dx = layer.backward(DP)
    figure = Figure(figsize=(7, 2.7))
    axes = figure.add_axes((0, 0, 0.38, 1))
    bare(axes, 4.5, 4.6)
    draw_matrix(axes, rows, 1.0, 3.95, MUTED, "ks", r"$\partial p_k/\partial x_s$, (3)")
    parts = [
        (p, FORWARD, "$p$", None),
        (DP, BACKWARD, r"$\bar p$", float(DP @ p)),
        (dx, BACKWARD, r"$\bar x$, (4)", None),
    ]
    for k, (values, colour, title, average) in enumerate(parts):
        axes = figure.add_axes((0.43 + 0.205 * k, 0.14, 0.13, 0.7))
        axes.bar(range(3), values, color=colour, width=0.7)
        axes.axhline(0, color="black", linewidth=0.8)
        if average is not None:
            axes.axhline(average, color="black", linewidth=1, linestyle="--")
            axes.text(-0.45, average + 0.06, f"average {average:g}", fontsize=7, va="bottom")
        axes.set_title(title, fontsize=10)
        axes.set_xticks(range(3), ["1", "2", "3"], fontsize=8)
        axes.tick_params(axis="y", labelsize=8)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    return figure
