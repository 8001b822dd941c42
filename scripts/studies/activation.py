"""Which nonlinearity, and whether it gates: the nine feed-forward layers at one number of parameters."""

from typing import Any

import numpy as np

from studies.equal import equalised
from studies.picture import BLUE, RED, curves, dots
from studies.runs import Kind, common_numbers, less, train_kinds
from studies.setting import Setting
from studies.study import Study, loss_table
from studies.verdict import Claim, Criterion, Numbers

PLAIN = {"relu": "ReLU", "gelu": "GELU", "gelu_tanh": "GELU, tanh form", "silu": "SiLU"}
GATED = {"glu": "GLU", "bilinear": "bilinear", "reglu": "ReGLU", "geglu": "GEGLU", "swiglu": "SwiGLU"}
LABELS = PLAIN | GATED
PAIRS = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}
SAME_LOSS = 0.01  # nats


def measure(setting: Setting) -> Numbers:
    """Train with every feed-forward layer."""
    kinds = {name: Kind(config) for name, config in equalised({n: setting.model(ffn=n) for n in LABELS}).items()}
    outcomes = train_kinds(setting, kinds)
    numbers = common_numbers(setting, kinds, outcomes)
    return {**numbers, "d_ff": {name: kind.config.d_ff or 4 * kind.config.d_model for name, kind in kinds.items()}}


def gated_less_plain(numbers: Numbers) -> list[float]:
    """Return the mean loss of the gated layers less that of the plain ones, seed by seed."""
    gated, plain = (np.mean([numbers["losses"][name] for name in names], axis=0) for names in (GATED, PLAIN))
    return (gated - plain).tolist()


def gate_gain(gated: str, plain: str) -> Criterion:
    """Return the criterion that a gate lowers the loss."""
    quantity = f"loss of {LABELS[gated]} less that of {LABELS[plain]}"
    return Criterion(quantity, less(gated, plain), high=0)


SHAZEER = "Shazeer (2020), arXiv:2002.05202, table 1"
CLAIMS = (
    Claim(
        "Gated layers end on a lower loss than plain ones.",
        SHAZEER,
        (Criterion("mean loss of the gated layers less that of the plain ones", gated_less_plain, high=0),),
    ),
    Claim(
        "A gate helps each activation: ReGLU is below ReLU, GEGLU below GELU, SwiGLU below SiLU.",
        SHAZEER,
        tuple(gate_gain(gated, plain) for gated, plain in PAIRS.items()),
    ),
    Claim(
        "GELU ends on a lower loss than ReLU.",
        "Hendrycks & Gimpel (2016), arXiv:1606.08415, section 3",
        (Criterion("loss of GELU less that of ReLU", less("gelu", "relu"), high=0),),
    ),
    Claim(
        f"GELU's tanh form trains as the exact one does, to {SAME_LOSS} nats.",
        "the two functions are within 5e-4 of each other (numpygpt/layers/activation.py)",
        (
            Criterion(
                "loss of the tanh form less that of the exact one",
                less("gelu_tanh", "gelu"),
                -SAME_LOSS,
                SAME_LOSS,
            ),
        ),
    ),
)


def make_table(numbers: Numbers) -> str:
    """Return the losses, and below them the hidden widths."""
    plain, gated = (numbers["d_ff"][name] for name in ("relu", "swiglu"))
    return f"{loss_table(numbers, LABELS)}\n\nHidden width: {plain} of the plain layers, {gated} of the gated ones."


def draw(figure: Any, numbers: Numbers) -> None:
    """Draw the losses and the curves."""
    losses, training = figure.subplots(1, 2)
    colors = [BLUE if name in PLAIN else RED for name in LABELS]
    dots(losses, list(LABELS.values()), [numbers["losses"][name] for name in LABELS], colors)
    losses.set(xlabel="held-out loss, nats a character")
    shown = {name: LABELS[name] for name in ("relu", "gelu", "bilinear", "swiglu")}
    curves(training, numbers, shown, [(BLUE, "--"), (BLUE, "-"), (RED, "--"), (RED, "-")])


STUDY = Study(
    title="Nine feed-forward layers",
    about="The default model with each feed-forward layer. A gated one has three matrices where a plain one has two, "
    "so its hidden width is two thirds of 4 times the model's, rounded to the nearest whole number: all nine have the "
    "same number of parameters, to 1 %.",
    claims=CLAIMS,
    measure=measure,
    table=make_table,
    draw=draw,
    caption="Held-out losses, a dot a seed and a bar at the mean (blue: plain; red: gated); training losses of four.",
    reading="A gated unit multiplies two linear maps of its input, which no unit of a plain layer can. The bilinear "
    "layer has no other nonlinearity.",
)
