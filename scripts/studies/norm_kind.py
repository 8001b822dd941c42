"""RMSNorm or LayerNorm: what the mean that RMSNorm leaves in does to the loss, and how much time it saves."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from numpygpt.device import mover
from numpygpt.layers.norm import LayerNorm, RMSNorm
from numpygpt.model import TransformerLM
from numpygpt.module import Module
from numpygpt.threads import one_blas_thread
from numpygpt.train import Trainer
from studies.equal import equalised
from studies.picture import BLUE, GREY, RED, dots
from studies.runs import Kind, Watch, common_numbers, less, train_kinds
from studies.setting import Setting
from studies.study import Study, loss_table, spread
from studies.verdict import Claim, Criterion, Numbers

LABELS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
ROUNDS, STEPS_A_ROUND, LAYERS_A_ROUND = 10, 30, 200
SAME_LOSS = 0.02  # nats
SMALL_SHARE = 0.05


def mean_shares(trainer: Trainer) -> list[float]:
    """Return, for what each RMSNorm was given, the square of the mean of the features over the mean of the squares."""
    shares = []
    for module in trainer.model.modules():
        if isinstance(module, RMSNorm):
            _, h = module.saved  # its input, brought to a mean square of 1
            shares.append(float(np.mean(np.mean(h, axis=-1) ** 2) / np.mean(h**2)))
    return shares


def time_ratios(calls: dict[str, Callable[[], Any]], rounds: int, repeats: int) -> list[float]:
    """Return the median time of the second call over the first's, for each round; within one, they take turns."""
    ratios = []
    with one_blas_thread():
        for call in calls.values():  # warm
            call()
        for _ in range(rounds):
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            for i in range(repeats):
                for name in list(calls)[:: 1 if i % 2 else -1]:
                    start = time.perf_counter()
                    calls[name]()
                    seconds[name].append(time.perf_counter() - start)
            first, second = (statistics.median(times) for times in seconds.values())
            ratios.append(second / first)
    return ratios


def layer_call(norm: Module, tokens: int, width: int, device: str) -> Callable[[], Any]:
    """Return a call that runs a norm forward and backward."""
    x, dy = mover(device)(np.random.default_rng(0).standard_normal((2, tokens, width)).astype(np.float32))
    norm.to(device)

    def call() -> None:
        norm.forward(x)
        float(norm.backward(dy)[0, 0])  # a GPU is done only once it is looked at

    return call


def measure(setting: Setting) -> Numbers:
    """Train with both norms; then time them, side by side in this process."""
    kinds = {name: Kind(config) for name, config in equalised({n: setting.model(norm=n) for n in LABELS}).items()}
    steps = setting.steps()
    outcomes = train_kinds(setting, kinds, Watch(mean_shares, (1, steps)))
    shares = np.array([outcome.watched for outcome in outcomes["rmsnorm"]])
    trainers = {
        name: Trainer(
            TransformerLM(kind.config, rng=0).to(setting.device),
            setting.training,
            setting.validation,
            setting.train(0),
            threads=1,
        )
        for name, kind in kinds.items()
    }
    rounds = setting.pick(ROUNDS, 3)
    width, tokens = setting.model().d_model, next(iter(trainers.values())).tokens_per_step
    layers = {
        "layernorm": layer_call(LayerNorm(width, bias=False), tokens, width, setting.device),
        "rmsnorm": layer_call(RMSNorm(width), tokens, width, setting.device),
    }
    return {
        **common_numbers(setting, kinds, outcomes),
        "width": width,
        "tokens": tokens,
        "share_at_start": np.mean(shares[:, 0], axis=0),
        "share_at_end": np.mean(shares[:, -1], axis=0),
        "shares": np.mean(shares[:, -1], axis=1),
        "layer_ratios": time_ratios(layers, rounds, setting.pick(LAYERS_A_ROUND, 3)),
        "step_ratios": time_ratios(
            {name: trainer.train_step for name, trainer in trainers.items()}, rounds, setting.pick(STEPS_A_ROUND, 2)
        ),
    }


ZHANG = "Zhang & Sennrich (2019), arXiv:1910.07467"
CLAIMS = (
    Claim(
        f"RMSNorm ends on LayerNorm's loss, to {SAME_LOSS} nats.",
        f"{ZHANG}, section 6",
        (
            Criterion(
                "loss with RMSNorm less that with LayerNorm",
                less("rmsnorm", "layernorm"),
                -SAME_LOSS,
                SAME_LOSS,
            ),
        ),
    ),
    Claim(
        "The mean that it leaves in is small: below a twentieth of the mean square, in a trained model.",
        f"{ZHANG}, section 4, which says that the mean isn't needed; the number is ours",
        (Criterion("share of the squared mean in the mean square", lambda n: n["shares"], high=SMALL_SHARE),),
    ),
    Claim(
        "RMSNorm takes less time, forward and backward.",
        f"{ZHANG}, section 6",
        (
            Criterion(
                "time of RMSNorm over LayerNorm's, the layer alone", lambda n: n["layer_ratios"], high=1, ratio=True
            ),
        ),
    ),
    Claim(
        "A training step of the whole model takes less time.",
        f"{ZHANG}, section 6",
        (Criterion("time of a step over that with LayerNorm", lambda n: n["step_ratios"], high=1, ratio=True),),
    ),
)


def make_table(numbers: Numbers) -> str:
    """Return losses, and in lines below the shares and times."""
    start, end = (", ".join(f"{100 * s:.1f}" for s in numbers[f"share_at_{when}"]) for when in ("start", "end"))
    return (
        f"{loss_table(numbers, LABELS)}\n\n"
        f"Share of the squared mean in the mean square, norm by norm, in %: {start} in the first step; {end} in the "
        f"last. Independent features of mean 0 have {100 / numbers['width']:.1f}.\n\n"
        f"Time with RMSNorm over that with LayerNorm, on {numbers['tokens']:,} positions: the layer alone "
        f"{spread(numbers['layer_ratios'], 2)}, a whole step {spread(numbers['step_ratios'], 2)}."
    )


def draw(figure: Any, numbers: Numbers) -> None:
    """Draw the losses, the shares of the mean, and the ratios of times."""
    losses, shares, times = figure.subplots(1, 3)
    dots(losses, list(LABELS.values()), [numbers["losses"][name] for name in LABELS], [RED, BLUE])
    losses.set(title="held-out loss")
    norms = range(1, len(numbers["share_at_end"]) + 1)
    for when, line in (("start", "o--"), ("end", "o-")):
        shares.plot(norms, numbers[f"share_at_{when}"], line, color=BLUE, label=when)
    shares.axhline(1 / numbers["width"], color=GREY, linestyle=":", label="1 / width")
    shares.set(title="share of the mean", xlabel="norm, from the first", ylim=(0, None), xticks=norms)
    shares.legend()
    dots(times, ["layer", "step"], [numbers["layer_ratios"], numbers["step_ratios"]], [BLUE, BLUE])
    times.axvline(1, color=GREY, linestyle=":")
    times.set(title="time over LayerNorm's")


STUDY = Study(
    title="RMSNorm or LayerNorm",
    about="The default model with either norm; both have a gain and no shift, and so the same number of parameters. "
    "Times are taken in one process and on one core: steps of the two take turns, a round's ratio is that of the two "
    "medians, and the spread is that of the rounds.",
    claims=CLAIMS,
    measure=measure,
    table=make_table,
    draw=draw,
    caption="Held-out losses; how much of the mean square of what each RMSNorm is given is its mean; ratios of times, "
    "a dot a round.",
    reading="LayerNorm takes the mean away and RMSNorm doesn't; nothing else differs here. Features that know nothing "
    "of each other have a mean of one over the root of their number, so there is little to take away as long as "
    "training gives the stream no common shift.",
)
