"""Figure of the page on the embedding."""

import numpy as np
from matplotlib.figure import Figure

from book.figures import BACKWARD, FORWARD, MUTED
from book.figures.matrices import bare, draw_product
from numpygpt.layers import Embedding

IDS = np.array([2, 0, 2, 4])
TABLE = np.array([[1.0, 5], [2, 6], [3, 7], [4, 8], [5, 9]])
DY = np.array([[10.0, 1], [20, 2], [30, 3], [40, 4]])


def gather_and_scatter() -> Figure:
    """Draw the one-hot matrix of four ids times the table, and its transpose times the cotangent."""
    layer = Embedding(*TABLE.shape, dtype=np.float64)
    layer.weight.value = TABLE
    y = layer.forward(IDS)
    layer.backward(DY)
    one_hot = np.eye(len(TABLE))[IDS]
    figure = Figure(figsize=(5.1, 5.1))
    axes = figure.add_axes((0, 0, 1, 1))
    bare(axes, 13.6, 13.6)
    gather = [
        (one_hot, MUTED, "nv", "ids 2, 0, 2, 4"),
        (TABLE, FORWARD, "vc", "$W$"),
        (y, FORWARD, "nc", "$y$, (1)"),
    ]
    scatter = [
        (one_hot.T, MUTED, "vn", "its transpose"),
        (DY, BACKWARD, "nc", r"$\bar y$"),
        (layer.weight.grad, BACKWARD, "vc", r"$\bar W$, (2)"),
    ]
    draw_product(axes, gather, 0.9, 10.2)
    draw_product(axes, scatter, 0.9, 3.7)
    return figure
