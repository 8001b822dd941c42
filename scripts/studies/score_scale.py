"""Why scores are divided by the root of the head's width."""

import math
from typing import Any

import numpy as np

from benchmarks.report import table
from numpygpt.array import Array
from numpygpt.einsum import einsum
from numpygpt.layers.attention import ScaledDotProductAttention
from numpygpt.layers.softmax import Softmax
from numpygpt.train import Trainer
from studies.picture import BLUE, RED, curves
from studies.runs import Kind, common_numbers, less, train_kinds
from studies.setting import Setting
from studies.study import Study, loss_table, spread
from studies.verdict import Claim, Criterion, Numbers

WIDTHS, QUICK_WIDTHS = (4, 8, 16, 32, 64, 128, 256, 512), (4, 64, 512)
QUERIES, KEYS = 512, 64
SCALES = {"scaled": "divided", "unscaled": "not divided"}
LABELS = {"scaled": "divided", "unscaled": "not divided"}
LOOKS = [(BLUE, "-"), (RED, "-")]


class UnscaledAttention(ScaledDotProductAttention):
    r"""Attention without its division: queries are multiplied by $\sqrt{d_k}$ first, and so are their gradients."""

    def forward(self, q: Array, k: Array, v: Array, mask: Array | None = None, causal: int = 0) -> Array:
        """Return the attended values."""
        return super().forward(q * math.sqrt(q.shape[-1]), k, v, mask, causal)

    def backward(self, do: Array) -> tuple[Array, Array, Array]:
        """Return the gradients of q, k and v."""
        dq, dk, dv = super().backward(do)
        return dq * math.sqrt(dq.shape[-1]), dk, dv


def unscale(trainer: Trainer) -> None:
    """Take the division out of every block."""
    for block in trainer.model.layers:
        block.attn.attention = UnscaledAttention()


def look(width: int, scaled: bool, seed: int) -> dict[str, float]:
    """Draw queries, keys and a gradient of the weights; return the entropy and the sizes of the scores' gradient."""
    rng = np.random.default_rng((seed, width))
    q, k = rng.standard_normal((QUERIES, width)), rng.standard_normal((KEYS, width))
    scores = einsum("td,sd->ts", q, k)
    softmax = Softmax()
    p = softmax.forward(scores / math.sqrt(width) if scaled else scores)
    dscores = softmax.backward(rng.standard_normal(p.shape))
    norms = np.linalg.norm(dscores, axis=-1)  # of each query
    entropy = -np.sum(p * np.log(np.maximum(p, np.finfo(p.dtype).tiny)), axis=-1)
    return {
        "entropy": float(np.mean(entropy)) / math.log(KEYS),
        "median": float(np.median(norms)),
        "rms": math.sqrt(np.mean(norms**2)),
    }


def measure(setting: Setting) -> Numbers:
    """Look at random queries and keys of many widths; then train with one head, its scores divided or not."""
    widths = setting.pick(WIDTHS, QUICK_WIDTHS)
    looked = {
        name: [[look(width, name == "scaled", seed) for width in widths] for seed in range(setting.seeds)]
        for name in SCALES
    }
    kinds = {name: Kind(setting.model(num_heads=1), change=unscale if name == "unscaled" else None) for name in LABELS}
    outcomes = train_kinds(setting, kinds)
    return {
        **common_numbers(setting, kinds, outcomes),
        "widths": widths,
        **{
            what: {name: [[at[what] for at in seed] for seed in seeds] for name, seeds in looked.items()}
            for what in ("entropy", "median", "rms")
        },
    }


def at_widest(what: str, name: str) -> Any:
    """Return the function that reads a quantity at the greatest width."""
    return lambda n: [seed[-1] for seed in n[what][name]]


def over_narrowest(numbers: Numbers) -> list[float]:
    """Return the entropy at the greatest width over that at the least, scores divided."""
    return [seed[-1] / seed[0] for seed in numbers["entropy"]["scaled"]]


def gradient_ratio(what: str) -> Any:
    """Return the function that takes the gradient's size without the division over that with it, at the widest."""
    return lambda n: [a[-1] / b[-1] for a, b in zip(n[what]["unscaled"], n[what]["scaled"], strict=True)]


VASWANI = "Vaswani et al. (2017), arXiv:1706.03762, section 3.2.1"
CLAIMS = (
    Claim(
        "Divided by the root, scores leave the weights as spread out in a wide head as in a narrow one.",
        VASWANI,
        (Criterion("entropy at the greatest width over that at the least", over_narrowest, 0.9, 1.1, ratio=True),),
    ),
    Claim(
        "Not divided, in a wide head they leave nearly all weight on one key.",
        VASWANI,
        (
            Criterion(
                "not divided: entropy at the greatest width over that of equal weights",
                at_widest("entropy", "unscaled"),
                high=0.2,
            ),
        ),
    ),
    Claim(
        "Softmax then hands most queries' scores next to no gradient: less than a tenth.",
        VASWANI,
        (
            Criterion(
                "gradient of the scores of the median query at the greatest width, not divided over divided",
                gradient_ratio("median"),
                high=0.1,
                ratio=True,
            ),
        ),
    ),
    Claim(
        "Over all queries together, the root mean square of that gradient is less than a tenth too.",
        "ours: a few queries in doubt between two keys could make up for the rest",
        (
            Criterion(
                "root mean square gradient of the scores at the greatest width, not divided over divided",
                gradient_ratio("rms"),
                high=0.1,
                ratio=True,
            ),
        ),
    ),
    Claim(
        "A model with one wide head learns worse without the division.",
        VASWANI,
        (Criterion("loss without the division less that with it", less("unscaled", "scaled"), low=0),),
    ),
)


def make_table(numbers: Numbers) -> str:
    """Return entropies and gradients by width, and below the losses of the trained models."""
    rows = []
    for i, width in enumerate(numbers["widths"]):
        cells = [
            spread([seed[i] for seed in numbers[what][name]], digits)
            for what, digits in (("entropy", 3), ("median", 4))
            for name in SCALES
        ]
        rows.append([str(width), *cells])
    head = [
        "d_k",
        *(f"{what}, {word}" for what in ("entropy / ln keys", "median gradient") for word in SCALES.values()),
    ]
    return f"{table(head, rows)}\n\n{loss_table(numbers, LABELS)}"


def draw(figure: Any, numbers: Numbers) -> None:
    """Draw entropies, gradients and losses."""
    entropy, gradient, training = figure.subplots(1, 3)
    for name, color in (("scaled", BLUE), ("unscaled", RED)):
        entropy.semilogx(
            numbers["widths"], np.mean(numbers["entropy"][name], axis=0), "o-", color=color, label=SCALES[name]
        )
        for what, line in (("median", "o-"), ("rms", "o:")):
            values = np.mean(numbers[what][name], axis=0)
            gradient.loglog(numbers["widths"], values, line, color=color, label=f"{SCALES[name]}, {what}")
    entropy.set(xlabel="d_k", title="entropy over ln keys", ylim=(0, 1))
    gradient.set(xlabel="d_k", title="gradient of a query's scores")
    for axes in (entropy, gradient):
        axes.legend()
    curves(training, numbers, LABELS, LOOKS)


STUDY = Study(
    title="Why scores are divided by the root of d_k",
    about=f"Queries and keys of independent standard normal numbers, {QUERIES} against {KEYS}, at many widths: the "
    "mean entropy of the weights over that of equal weights, and the norm of the gradient that softmax hands each "
    "query's scores, given a random gradient of the weights. Then the default model is trained with one head as "
    "wide as the model, its scores divided by the root or not; both have the same parameters and start.",
    claims=CLAIMS,
    measure=measure,
    table=make_table,
    draw=draw,
    caption="Entropy of the attention weights and gradient of the scores by the width of a head, scores divided by "
    "its root (blue) or not (red); training losses of a model with one head.",
    reading="A score is a sum of d_k products, so its deviation is the root of d_k. Softmax of scores that far apart "
    "is nearly the maximum, and its gradient, p times an excess over the average under p, is zero where one p is 1. A "
    "trained model isn't bound to scores of that size: its projections can learn to be smaller.",
)
