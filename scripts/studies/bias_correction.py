"""Adam's bias correction, on and off."""

import math
from typing import Any

import numpy as np

from numpygpt.array import Array
from numpygpt.train import Trainer
from studies.picture import BLUE, GREY, RED, curves
from studies.runs import Kind, Watch, common_numbers, less, train_kinds
from studies.setting import Setting
from studies.study import Study, loss_table
from studies.verdict import Claim, Criterion, Numbers

LABELS = {
    "on cold": "corrected, no warm-up",
    "off cold": "uncorrected, no warm-up",
    "on warm": "corrected, warm-up",
    "off warm": "uncorrected, warm-up",
}
LOOKS = [(BLUE, "-"), (RED, "-"), (BLUE, "--"), (RED, "--")]
BETAS = {"beta1": 0.9, "beta2": 0.999}  # Adam's own
FIRST = (1 - BETAS["beta1"]) / math.sqrt(1 - BETAS["beta2"])
LOOKED_AT = 100  # steps
SAME_LOSS = 0.02  # nats


def uncorrected(trainer: Trainer) -> None:
    """Let the optimiser take it that it has made so many steps that there is nothing left to correct: beta^t is 0."""
    trainer.optimizer.t = 2**60


class StepLength:
    """The length of the latest update of all weights together. The first call sets out, and says 0."""

    before: Array

    def __call__(self, trainer: Trainer) -> float:
        """Return it."""
        now = trainer.model.flat.value.astype(float)
        before, self.before = now if trainer.step == 0 else self.before, now
        return float(np.linalg.norm(now - before))


def measure(setting: Setting) -> Numbers:
    """Train with and without the correction, with and without warm-up."""
    steps = setting.steps()
    kinds = {}
    for warm, warmup in (("cold", 0), ("warm", max(1, min(100, steps // 2)))):
        for name, change in (("on", None), ("off", uncorrected)):
            kinds[f"{name} {warm}"] = Kind(setting.model(), {**BETAS, "warmup_steps": warmup}, change)
    watch = Watch(StepLength(), tuple(range(min(LOOKED_AT, steps) + 1)))
    outcomes = train_kinds(setting, {name: kinds[name] for name in LABELS}, watch)
    on, off = (np.array([outcome.watched[1:] for outcome in outcomes[f"{name} cold"]]) for name in ("on", "off"))
    return {
        **common_numbers(setting, kinds, outcomes),
        "first_step": off[:, 0] / on[:, 0],
        "step_ratio": np.exp(np.mean(np.log(off / on), axis=0)),
    }


def factor(step: Any) -> Any:
    """Return how many times as long an uncorrected step is, for gradients that are always the same."""
    return (1 - BETAS["beta1"] ** step) / np.sqrt(1 - BETAS["beta2"] ** step)


CLAIMS = (
    Claim(
        "Uncorrected, the first step is (1 - beta1) / sqrt(1 - beta2) times as long.",
        "equations (5) and (6) of Adam in numpygpt/optim.py, after Kingma & Ba (2015), arXiv:1412.6980, section 3",
        (
            Criterion(
                f"length of the first update without the correction over that with it, over {FIRST:.3f}",
                lambda n: [ratio / FIRST for ratio in n["first_step"]],
                0.99,
                1.01,
                ratio=True,
            ),
        ),
    ),
    Claim(
        "Without the correction, and without warm-up, the model ends on a higher loss.",
        "Kingma & Ba (2015), arXiv:1412.6980, section 6.4",
        (
            Criterion(
                "no warm-up: loss without the correction less that with it",
                less("off cold", "on cold"),
                low=0,
            ),
        ),
    ),
    Claim(
        f"With warm-up the correction makes no difference, to {SAME_LOSS} nats.",
        "ours: both keep the first steps short",
        (
            Criterion(
                "warm-up: loss without the correction less that with it",
                less("off warm", "on warm"),
                -SAME_LOSS,
                SAME_LOSS,
            ),
        ),
    ),
)


def draw(figure: Any, numbers: Numbers) -> None:
    """Draw the step lengths' ratio, and the losses over training."""
    ratio, training = figure.subplots(1, 2)
    steps = np.arange(1, len(numbers["step_ratio"]) + 1)
    ratio.plot(steps, numbers["step_ratio"], color=RED, label="measured")
    ratio.plot(steps, factor(steps), ":", color=GREY, label="for equal gradients")
    ratio.set(xlabel="step", title="step length, uncorrected over corrected", ylim=(0, None))
    ratio.legend()
    curves(training, numbers, LABELS, LOOKS)


STUDY = Study(
    title="Adam's bias correction",
    about=f"The default model, trained by AdamW with Adam's own betas ({BETAS['beta1']} and {BETAS['beta2']}), with "
    "the correction and without, from the same weights on the same batches; with the full rate from the first step on, "
    "or with a warm-up of 100 steps. It is taken out by letting the optimiser begin at a step t so late that beta to "
    "the power t is 0.",
    claims=CLAIMS,
    measure=measure,
    table=lambda numbers: loss_table(numbers, LABELS),
    draw=draw,
    caption="How much longer the uncorrected steps are, without warm-up, and what the formula gives if gradients were "
    "always the same; training losses.",
    reading="Both moments begin at zero. The first needs some ten steps to reach its gradient's size, and the second, "
    "of which the root is taken, some thousand: in between, a numerator of nearly full size is divided by a root that "
    "is too small.",
)
