"""Figures of the page on Adam."""

import numpy as np
from matplotlib.figure import Figure

from book.figures import BACKWARD, FORWARD, FOURTH, MUTED, THIRD
from numpygpt.array import Array
from numpygpt.module import Parameter
from numpygpt.optim import Adam, AdamW

FOR_EVER = 10**6  # steps after which the factors of (3) are 1


def steps(gradients: Array, corrected: bool) -> Array:
    """Return the steps of one weight, in units of the learning rate, under a sequence of gradients."""
    p = Parameter(np.zeros(1))
    optimizer = Adam([p], lr=1.0)
    if not corrected:
        optimizer.t = FOR_EVER  # it takes its moments for old ones, and leaves them as they are
    taken = []
    for gradient in gradients:
        before = p.value.item()
        p.grad = np.array([gradient])
        optimizer.step()
        taken.append(before - p.value.item())
    return np.array(taken)


def correction() -> Figure:
    """Draw the first steps with and without the correction: of equal gradients, and of noisy ones."""
    figure = Figure(figsize=(7, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    noisy = 1.0 + 2.0 * np.random.default_rng(0).standard_normal(300)
    for axes, gradients, title in (
        (left, np.ones(3000), "$g = 1$"),
        (right, noisy, "$g = 1$ and noise of deviation 2"),
    ):
        t = np.arange(1, len(gradients) + 1)
        axes.axhline(1, color=MUTED, linewidth=0.8, linestyle=":")
        axes.plot(t, steps(gradients, False), color=BACKWARD, linewidth=1.3, label="without (3)")
        axes.plot(t, steps(gradients, True), color=FORWARD, linewidth=1.5, label="with (3)")
        axes.set_xscale("log")
        axes.set_xlabel("step $t$")
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel(r"step, in units of $\eta$")
    left.legend(frameon=False, fontsize=8.5)
    return figure


def decay() -> Figure:
    """Draw what decay does to a weight under gradients of pure noise, inside the gradient and outside it."""
    figure = Figure(figsize=(6, 2.9), layout="constrained")
    axes = figure.subplots()
    runs = [
        (Adam, 10.0, BACKWARD, "Adam, L2, gradients of size 10"),
        (AdamW, 10.0, FORWARD, "AdamW, gradients of size 10"),
        (AdamW, 0.1, THIRD, "AdamW, gradients of size 0.1"),
        (Adam, 0.1, FOURTH, "Adam, L2, gradients of size 0.1"),
    ]
    for kind, size, colour, name in runs:
        weights = Parameter(np.full((1, 500), 0.5))
        optimizer = kind([weights], lr=1e-3, weight_decay=0.5)
        rng = np.random.default_rng(0)
        mean = [0.5]
        for _ in range(400):
            weights.grad = size * rng.standard_normal(weights.shape)
            optimizer.step()
            mean.append(float(weights.value.mean()))
        dashes = "--" if kind is AdamW and size < 1 else "-"
        axes.plot(mean, color=colour, linestyle=dashes, linewidth=1.5, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("mean of 500 weights")
    axes.set_ylim(-0.05, 0.55)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
