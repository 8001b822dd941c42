"""Figure of the page on notation."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from book.figures import BACKWARD, FORWARD, MUTED

X1, X2 = 2.0, 5.0
PLACES = {"x_1": (0, 1), "x_2": (0, 0), "y_1": (1, 1), "y_2": (1, 0), "L": (2, 0.5)}
GAP = np.array([0.27, 0])  # from the middle of a box to its arrows
FORMULAS = {"x_1": "", "x_2": "", "y_1": "= x_1 x_2", "y_2": "= x_1 + x_2", "L": "= y_1 y_2"}


def graph() -> Figure:
    """Draw five numbers, the local derivative on each arrow between them, and the gradients that follow."""
    y1, y2 = X1 * X2, X1 + X2
    value = {"x_1": X1, "x_2": X2, "y_1": y1, "y_2": y2, "L": y1 * y2}
    arrows = {
        ("x_1", "y_1"): X2,
        ("x_1", "y_2"): 1.0,
        ("x_2", "y_1"): X1,
        ("x_2", "y_2"): 1.0,
        ("y_1", "L"): y2,
        ("y_2", "L"): y1,
    }
    gradient = {"L": 1.0}
    for z in ("y_1", "y_2", "x_1", "x_2"):
        gradient[z] = sum(gradient[y] * slope for (start, y), slope in arrows.items() if start == z)
    figure = Figure(figsize=(6.6, 2.9))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-0.35, 2.4)
    axes.set_ylim(-0.35, 1.35)
    axes.axis("off")
    for (start, end), slope in arrows.items():
        a, b = np.array(PLACES[start]), np.array(PLACES[end])
        tail, head = a + GAP, b - GAP
        axes.annotate("", head, tail, arrowprops={"arrowstyle": "->", "color": MUTED, "linewidth": 1.2})
        x, y = tail + 0.2 * (head - tail)
        axes.text(x, y + 0.03, f"${slope:g}$", ha="center", va="bottom", fontsize=10, color=MUTED)
    for name, (x, y) in PLACES.items():
        bar = rf"\bar {{{name[0]}}}{name[1:]}"
        axes.add_patch(Rectangle((x - 0.26, y - 0.2), 0.52, 0.4, facecolor="none", edgecolor=MUTED, linewidth=0.8))
        axes.text(x, y + 0.13, f"${name} {FORMULAS[name]}$", ha="center", va="center", fontsize=12)
        axes.text(x, y, f"${value[name]:g}$", ha="center", va="center", fontsize=11, color=FORWARD)
        axes.text(x, y - 0.13, f"${bar} = {gradient[name]:g}$", ha="center", va="center", fontsize=12, color=BACKWARD)
    return figure
