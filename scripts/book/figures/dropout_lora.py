"""Figures of the page on dropout and LoRA."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from book.figures import BACKWARD, FORWARD, MUTED
from book.figures.matrices import bare
from numpygpt.layers import Dropout, Linear, LoRALinear


def mask() -> Figure:
    """Draw one mask of dropout: what forward makes of ones, and backward of a cotangent of ones."""
    rows, columns = 4, 10
    layer = Dropout(0.25, rng=2)
    y = layer.forward(np.ones((rows, columns)))
    dx = layer.backward(np.ones((rows, columns)))
    figure = Figure(figsize=(7, 1.75))
    for i, (array, colour, title) in enumerate(
        [(y, FORWARD, "$y$ of $x = 1$ everywhere"), (dx, BACKWARD, r"$\bar x$ of $\bar y = 1$ everywhere")]
    ):
        axes = figure.add_axes((0.01 + 0.5 * i, 0.02, 0.48, 0.96))
        bare(axes, columns, rows + 1)
        for (r, c), value in np.ndenumerate(array):
            box = (c, rows - r - 1), 1, 1
            axes.add_patch(Rectangle(*box, facecolor=colour, alpha=0.3 * float(value > 0), linewidth=0))
            axes.add_patch(Rectangle(*box, facecolor="none", edgecolor=MUTED, linewidth=0.6))
            axes.text(c + 0.5, rows - r - 0.54, f"{value:.3g}", ha="center", va="center", fontsize=7)
        axes.text(columns / 2, rows + 0.2, title, ha="center", va="bottom", fontsize=9.5)
    return figure


def start() -> Figure:
    """Draw the gradients of both adapters, and what they add to W, over the first steps of plain descent."""
    rng = np.random.default_rng(0)
    layer = LoRALinear(Linear(16, 12, dtype=np.float64, rng=0), rank=2, alpha=4.0, rng=1)
    layer.linear.weight.buffer.freeze()
    wanted = layer.merged() + 0.3 * rng.standard_normal((12, 1)) * rng.standard_normal(16)
    sizes: dict[str, list[float]] = {"A": [], "B": [], "added": []}
    x = rng.standard_normal((256, 16))
    for _ in range(40):
        layer.zero_grad()
        error = layer.forward(x) - x @ wanted.T
        layer.backward(error / len(x))  # of half the mean squared error
        added = layer.merged() - layer.linear.weight.value
        for name, array in (("A", layer.A.grad), ("B", layer.B.grad), ("added", added)):
            sizes[name].append(float(np.linalg.norm(array)))
        for p in (layer.A, layer.B):
            p.value = p.value - 0.05 * p.grad
    figure = Figure(figsize=(6, 2.7), layout="constrained")
    axes = figure.subplots()
    axes.plot(sizes["B"], color=BACKWARD, linewidth=1.6, label=r"$|\bar B|$")
    axes.plot(sizes["A"], color=BACKWARD, linewidth=1.6, linestyle="--", label=r"$|\bar A|$")
    axes.plot(sizes["added"], color=FORWARD, linewidth=1.6, label=r"$|\gamma B A|$, what is added to $W$")
    axes.set_xlabel("step")
    axes.set_ylabel("norm")
    axes.legend(frameon=False, fontsize=8.5)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
