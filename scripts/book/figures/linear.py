"""Figure of the page on the linear map."""

import numpy as np
from matplotlib.figure import Figure

from book.figures import BACKWARD, FORWARD
from book.figures.matrices import bare, draw_product
from numpygpt.layers import Linear

X = np.array([[1.0, 2], [0, 1], [3, -1], [2, 0]])
W = np.array([[1.0, 0], [2, -1], [0, 3]])
DY = np.array([[1.0, 0, 0], [0, 1, -1], [0, 0, 2], [1, 0, 0]])


def products() -> Figure:
    """Draw the three products of a linear layer with their numbers, as its forward and backward give them."""
    layer = Linear(2, 3, dtype=np.float64)
    layer.weight.value = W
    y, dx = layer.forward(X), layer.backward(DY)
    figure = Figure(figsize=(4.9, 6.1))
    axes = figure.add_axes((0, 0, 1, 1))
    bare(axes, 13, 16.4)
    rows = [
        [(X, FORWARD, "ni", "$x$"), (W.T, FORWARD, "io", r"$W^\top$"), (y, FORWARD, "no", "$y$, (1)")],
        [
            (DY.T, BACKWARD, "on", r"$\bar y^\top$"),
            (X, FORWARD, "ni", "$x$"),
            (layer.weight.grad, BACKWARD, "oi", r"$\bar W$, (3)"),
        ],
        [(DY, BACKWARD, "no", r"$\bar y$"), (W, FORWARD, "oi", "$W$"), (dx, BACKWARD, "ni", r"$\bar x$, (5)")],
    ]
    for row, middle in zip(rows, (13.6, 8.4, 3.1), strict=True):
        draw_product(axes, row, 0.9, middle)
    return figure
