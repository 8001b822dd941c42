"""Figure of the page on clipping and the schedule."""

import numpy as np
from matplotlib.figure import Figure

from book.figures import BACKWARD, FORWARD, MUTED
from numpygpt import AdamW, CrossEntropy, TransformerConfig, TransformerLM, clip_grad_norm, cosine_schedule

STEPS, WARMUP, BOUND = 80, 8, 1.0


def run() -> Figure:
    """Draw the rate of a short training run, and the norm of its gradient before and after clipping."""
    config = TransformerConfig(16, 16, d_model=32, num_layers=2, num_heads=4)
    model, loss, rng = TransformerLM(config, rng=0), CrossEntropy(), np.random.default_rng(0)
    optimizer = AdamW(model.parameters())
    rates, before, after = [], [], []
    for step in range(STEPS):
        optimizer.lr = cosine_schedule(step, max_lr=1e-2, min_lr=1e-3, warmup_steps=WARMUP, decay_steps=70)
        ids = (rng.integers(0, 16, (8, 1)) + rng.integers(1, 4, (8, 1)) * np.arange(17)) % 16
        model.zero_grad()
        loss.forward(model.forward(ids[:, :-1]), ids[:, 1:])
        model.backward(loss.backward())
        before.append(clip_grad_norm(model.parameters(), BOUND))
        after.append(clip_grad_norm(model.parameters(), BOUND))
        rates.append(optimizer.lr)
        optimizer.step()
    figure = Figure(figsize=(7, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(rates, color=FORWARD, marker="o", markersize=2.5, linewidth=1.2)
    left.set_title(r"learning rate $\eta_s$", fontsize=10)
    left.set_ylim(0, 0.0107)
    right.plot(before, color=MUTED, linewidth=1.2, label="$N$, as backward left it")
    right.plot(after, color=BACKWARD, linewidth=1.5, label="after clipping")
    right.set_title("norm of all gradients together", fontsize=10)
    right.set_ylim(0, None)
    right.legend(frameon=False, fontsize=8.5)
    for axes in (left, right):
        axes.set_xlabel("step $s$")
        axes.spines[["top", "right"]].set_visible(False)
    return figure
