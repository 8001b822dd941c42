"""Figure of the page on tying."""

import dataclasses

import numpy as np
from matplotlib.figure import Figure

from book.figures import BACKWARD, THIRD
from numpygpt import CrossEntropy, TransformerConfig, TransformerLM

LETTERS = "abcdefghij"
TEXT = "abacabadab"


def rows() -> Figure:
    """Draw the sizes of the two gradients of a tied table, row by row, and of their sum."""
    ids = np.array([[LETTERS.index(c) for c in TEXT]])
    config = TransformerConfig(len(LETTERS), len(TEXT), 16, 1, 2, tie_embeddings=True, init="gpt2")
    tied = TransformerLM(config, dtype=np.float64, rng=0)
    untied = TransformerLM(dataclasses.replace(config, tie_embeddings=False), dtype=np.float64, rng=0)
    untied.load_state_dict({**tied.state_dict(), "lm_head.weight": tied.lm_head.weight.value})
    for model in (tied, untied):
        loss = CrossEntropy()
        loss.forward(model.forward(ids[:, :-1]), ids[:, 1:])
        model.backward(loss.backward())
    head, table = untied.lm_head.weight.grad, untied.token_embeddings.weight.grad
    np.testing.assert_allclose(head + table, tied.lm_head.weight.grad, atol=1e-12)  # (5)
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.subplots()
    place = np.arange(len(LETTERS))
    bars = [(head, THIRD, r"$\bar U_v$: as a candidate"), (table, BACKWARD, r"$\bar E_v$: as an input")]
    for shift, (gradient, colour, name) in zip((-0.2, 0.2), bars, strict=True):
        axes.bar(place + shift, np.linalg.norm(gradient, axis=1), 0.38, color=colour, label=name)
    both = np.linalg.norm(head + table, axis=1)
    axes.plot(place, both, "_", color="black", markersize=22, markeredgewidth=1.5, label=r"$\bar W_v$: their sum")
    axes.set_xticks(place, [f"{c}\n{TEXT[:-1].count(c)}×" for c in LETTERS])
    axes.set_ylabel("norm of the row's gradient")
    axes.legend(frameon=False, fontsize=8.5)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
