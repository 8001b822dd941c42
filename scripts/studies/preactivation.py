"""Where units work: the mean of what an activation is given, over training."""

from typing import Any

import numpy as np

from benchmarks.report import table
from numpygpt.data import sequential_batches
from numpygpt.layers.feedforward import GLU, FeedForward
from numpygpt.module import evaluating
from numpygpt.train import Trainer
from studies.equal import equalised
from studies.picture import BLUE, GREEN, GREY, RED, VIOLET
from studies.runs import Kind, Watch, common_numbers, spaced, train_kinds
from studies.setting import Setting
from studies.study import Study, spread
from studies.verdict import Claim, Criterion, Numbers

LABELS = {"relu": "ReLU", "gelu": "GELU", "silu": "SiLU", "swiglu": "SwiGLU's gate"}
COLORS = {"relu": BLUE, "gelu": RED, "silu": GREEN, "swiglu": VIOLET}
BATCH = 16  # sequences
NEAR_ZERO = 0.05  # deviations


def preactivations(trainer: Trainer) -> list[float]:
    """Return the mean of W1 x in units of its deviation, and the share above zero: means over the layers.

    On the first sequences of the held-out text, the same each time.
    """
    model = trainer.model
    inputs, _ = next(sequential_batches(trainer.validation_tokens, BATCH, trainer.context_length))
    model.forward(np.asarray(inputs, like=model.flat.value))
    means, shares = [], []
    for module in model.modules():
        if isinstance(module, FeedForward | GLU):
            given = module.w1.saved
            with evaluating([module.w1]):
                u = module.w1.forward(given)
            means.append(float(np.mean(u) / np.std(u)))
            shares.append(float(np.mean(u > 0)))
    return [float(np.mean(means)), float(np.mean(shares))]


def measure(setting: Setting) -> Numbers:
    """Train with each activation, and look now and then."""
    kinds = {name: Kind(config) for name, config in equalised({n: setting.model(ffn=n) for n in LABELS}).items()}
    watch = Watch(preactivations, (0, *spaced(setting.steps())))
    outcomes = train_kinds(setting, kinds, watch)
    watched = {name: np.array([outcome.watched for outcome in done]) for name, done in outcomes.items()}
    return {
        **common_numbers(setting, kinds, outcomes),
        "watched": watch.steps,
        "means": {name: values[..., 0] for name, values in watched.items()},
        "positive": {name: values[:, -1, 1] for name, values in watched.items()},
    }


def mean_at(name: str, when: int) -> Any:
    """Return the function that reads the mean at the start (0) or at the end (-1)."""
    return lambda n: [seed[when] for seed in n["means"][name]]


CLAIMS = (
    Claim(
        "At the start the mean is zero.",
        "weights of mean 0, drawn apart from what they meet: Glorot & Bengio (2010), section 4.2.1",
        tuple(
            Criterion(f"mean at the start, in deviations, {label}", mean_at(name, 0), -NEAR_ZERO, NEAR_ZERO)
            for name, label in LABELS.items()
        ),
    ),
    *(
        Claim(
            f"Training moves it below zero: {label}.",
            "Li et al. (2022), arXiv:2210.06313, who find few units of trained ReLU models active",
            (Criterion(f"mean at the end, in deviations, {label}", mean_at(name, -1), high=0),),
        )
        for name, label in LABELS.items()
    ),
)


def make_table(numbers: Numbers) -> str:
    """Return the means at both ends, and the share above zero."""
    rows = []
    for name, label in LABELS.items():
        start, end = ([seed[when] for seed in numbers["means"][name]] for when in (0, -1))
        positive = spread([100 * share for share in numbers["positive"][name]], 1)
        size = f"{numbers['parameters'][name]:,}"
        rows.append([label, size, spread(start), spread(end), positive, spread(numbers["losses"][name])])
    head = ["activation", "parameters", "mean / deviation, start", "end", "above zero at the end, %", "held-out loss"]
    return table(head, rows)


def draw(figure: Any, numbers: Numbers) -> None:
    """Draw the means over training."""
    axes = figure.subplots()
    for name, label in LABELS.items():
        for i, seed in enumerate(numbers["means"][name]):
            label_once = {"label": label} if i == 0 else {}
            axes.plot(numbers["watched"], seed, color=COLORS[name], linewidth=0.9, **label_once)
    axes.axhline(0, color=GREY, linestyle=":")
    axes.set(xlabel="step", ylabel="mean of W1 x, in deviations")
    axes.legend()


STUDY = Study(
    title="The mean of the pre-activations",
    about="The default model with three plain activations and one gate, at equal parameters (the gated layer's hidden "
    "width is two thirds of the others'). On one fixed batch of held-out text, $u = W_1 x$ is taken of every "
    "feed-forward layer: its mean over units and positions, over its standard deviation, and of that the mean over "
    "the layers.",
    claims=CLAIMS,
    measure=measure,
    table=make_table,
    draw=draw,
    caption="The mean of the pre-activations over training, a line a seed.",
    reading="There is no bias in these layers: the mean of $u$ can leave zero only because the rows of $W_1$ turn "
    "towards or away from what they are given. A unit of ReLU that is below zero for all inputs gets no gradient "
    "any more.",
)
