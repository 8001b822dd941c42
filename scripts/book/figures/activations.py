"""Figures of the page on activations."""

import numpy as np
from matplotlib.figure import Figure

from book.figures import BACKWARD, FORWARD, FOURTH, MUTED, THIRD
from numpygpt.array import Array
from numpygpt.layers import GLU
from numpygpt.layers.activation import make_activation

COLOURS = {"relu": MUTED, "sigmoid": FOURTH, "silu": FORWARD, "gelu": THIRD}
NAMES = {"relu": "ReLU", "sigmoid": "sigmoid", "silu": "SiLU", "gelu": "GELU", "identity": "identity"}


def slopes() -> Figure:
    """Draw the activations and their derivatives."""
    figure = Figure(figsize=(7, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    x = np.linspace(-4, 4, 161)
    for name, colour in COLOURS.items():
        layer = make_activation(name)
        left.plot(x, layer.forward(x), color=colour, linewidth=1.5, label=NAMES[name])
        right.plot(x, layer.backward(np.ones_like(x)), color=colour, linewidth=1.5)
    left.set_ylim(-0.5, 3)
    left.set_title("$f(x)$", fontsize=10)
    right.set_title("$f'(x)$: what a cotangent of 1 comes back as", fontsize=10)
    left.legend(frameon=False, fontsize=8.5)
    for axes in (left, right):
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set_xlabel("$x$")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def paths(activation: str, u: Array, v: float) -> tuple[Array, Array]:
    """Return the gradients of u and of v in one unit of a gated layer, for W1 x = u, W3 x = v and dy = 1."""
    unit = GLU(2, 1, activation, dtype=np.float64)
    for linear, weight in ((unit.w1, [1.0, 0.0]), (unit.w3, [0.0, 1.0]), (unit.w2, [1.0, 0.0])):
        linear.weight.value = np.reshape(weight, linear.weight.shape)
    unit.forward(np.stack([u, np.full_like(u, v)], axis=-1))  # the first input feature is u, the second v
    dx = unit.backward(np.pad(np.ones((u.size, 1)), ((0, 0), (0, 1))))
    return dx[:, 0], dx[:, 1]


def gates() -> Figure:
    """Draw the gradients of both paths of a gated unit against the gate's input, for three gates."""
    figure = Figure(figsize=(7, 2.5), layout="constrained")
    u = np.linspace(-5, 5, 121)
    for axes, name in zip(figure.subplots(1, 3, sharey=True), ("sigmoid", "identity", "silu"), strict=True):
        du, dv = paths(name, u, 1.0)
        axes.plot(u, dv, color=THIRD, linewidth=1.5, label=r"$\bar v = g$")
        axes.plot(u, du, color=BACKWARD, linewidth=1.5, label=r"$\bar u = v\,f'(u)$")
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set_title(f"gate: {NAMES[name]}", fontsize=10)
        axes.set_xlabel("$u$")
        axes.set_ylim(-1.2, 3)
        axes.spines[["top", "right"]].set_visible(False)
        if name == "sigmoid":
            axes.legend(frameon=False, fontsize=8.5, loc="upper left")
    return figure
