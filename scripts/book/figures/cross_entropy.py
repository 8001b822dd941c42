"""Figure of the page on the cross-entropy."""

import numpy as np
from matplotlib.figure import Figure

from book.figures import BACKWARD, FORWARD, MUTED
from numpygpt.layers import CrossEntropy, Softmax

LOGITS, TARGET = np.log([1.0, 2, 5]), 1


def said_less_so() -> Figure:
    """Draw the gradient of three logits, and the loss against the target's logit with its slopes."""
    loss, target = CrossEntropy(), np.array([TARGET])
    loss.forward(LOGITS[None], target)
    gradient = loss.backward()[0]
    figure = Figure(figsize=(7, 2.9), layout="constrained")
    bars, curve = figure.subplots(1, 2, width_ratios=[1.15, 1])
    places = np.arange(3)
    bars.bar(places - 0.27, Softmax().forward(LOGITS), 0.25, color=FORWARD, label="said: $p_v$")
    bars.bar(places, np.eye(3)[TARGET], 0.25, color=MUTED, label="was so: one-hot of $y$")
    bars.bar(places + 0.27, gradient, 0.25, color=BACKWARD, label="gradient (4)")
    bars.axhline(0, color="black", linewidth=0.8)
    bars.set_xticks(places, ["$v = 0$", "$v = 1 = y$", "$v = 2$"])
    bars.set_ylim(-0.85, 1.75)
    bars.legend(frameon=False, fontsize=8, loc="upper right")

    def at(x: float) -> tuple[float, float]:
        """Return the loss and its slope where the target's logit is x."""
        logits = LOGITS.copy()
        logits[TARGET] = x
        value = loss.forward(logits[None], target)
        return value, float(loss.backward()[0, TARGET])

    xs = np.linspace(-6, 8, 60)
    curve.plot(xs, [at(x)[0] for x in xs], color=FORWARD)
    for x in (-4.0, float(LOGITS[TARGET]), 5.0):
        value, slope = at(x)
        curve.plot([x - 1.6, x + 1.6], [value - 1.6 * slope, value + 1.6 * slope], color=BACKWARD, linewidth=1.5)
        curve.plot([x], [value], "o", color=BACKWARD, markersize=4)
        curve.text(x - 0.2, value + 0.45, f"slope {slope:.3f}", fontsize=8)
    curve.set_xlabel("the target's logit $x_y$")
    curve.set_ylabel("loss (nats)")
    for axes in (bars, curve):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    return figure
