"""The deviation of a linear map's starting weights: sqrt(2 / (in + out)), or 2 / (in + out), which is the variance."""

import math
from typing import Any

import numpy as np

from numpygpt.layers.linear import Linear
from numpygpt.train import Trainer
from studies.picture import BLUE, GREY, RED, curves
from studies.runs import Kind, common_numbers, less, train_kinds
from studies.setting import Setting
from studies.study import Study, loss_table
from studies.verdict import Claim, Criterion, Numbers

LABELS = {
    "root pre": "root, norm before",
    "variance pre": "variance, norm before",
    "root post": "root, norm behind",
    "variance post": "variance, norm behind",
}
LOOKS = [(BLUE, "-"), (RED, "-"), (BLUE, "--"), (RED, "--")]
MAPS = 12  # in a row
POSITIONS = 256


def shrink(trainer: Trainer) -> None:
    """Bring the weights of every linear map from the deviation sqrt(2 / (in + out)) to 2 / (in + out)."""
    for module in trainer.model.modules():
        if isinstance(module, Linear):
            module.weight.value *= math.sqrt(2 / sum(module.weight.shape))


def sizes_along(width: int, std: float, seed: int) -> tuple[list[float], list[float]]:
    """Return the root mean square of a signal after each of some square maps, and of a gradient on its way back."""
    rng = np.random.default_rng(seed)
    maps = [Linear(width, width, std=std, rng=rng) for _ in range(MAPS)]
    x, dx = rng.standard_normal((2, POSITIONS, width)).astype(np.float32)
    forward, backward = [rms(x)], [rms(dx)]
    for layer in maps:
        x = layer.forward(x)
        forward.append(rms(x))
    for layer in reversed(maps):
        dx = layer.backward(dx)
        backward.append(rms(dx))
    return forward, backward


def rms(x: np.ndarray) -> float:
    """Return the root mean square."""
    return math.sqrt(np.mean(np.square(x, dtype=np.float64)))


def measure(setting: Setting) -> Numbers:
    """Send signals through maps in a row; then train with both, the norm before the sublayer and behind it."""
    width = setting.model().d_model
    stds = {"root": math.sqrt(1 / width), "variance": 1 / width}
    along = {
        name: np.array([sizes_along(width, std, seed) for seed in range(setting.seeds)]) for name, std in stds.items()
    }
    kinds = {
        f"{name} {place}": Kind(setting.model(norm_position=place), change=change)
        for place in ("pre", "post")
        for name, change in (("root", None), ("variance", shrink))
    }
    outcomes = train_kinds(setting, kinds)
    return {
        **common_numbers(setting, kinds, outcomes),
        "width": width,
        "forward": {name: np.exp(np.mean(np.log(values[:, 0]), axis=0)) for name, values in along.items()},
        "backward": {name: np.exp(np.mean(np.log(values[:, 1]), axis=0)) for name, values in along.items()},
        "kept": {name: values[:, :, -1] for name, values in along.items()},  # of each seed: forward, backward
    }


def kept(name: str, way: int, expected: Any = lambda numbers: 1.0) -> Any:
    """Return the function that says how many times as large a signal is after one map, over what is expected."""
    return lambda n: [seed[way] ** (1 / MAPS) / expected(n) for seed in n["kept"][name]]


GLOROT = "Glorot & Bengio (2010), section 4.2.1"
LISTING = "a published listing of this model takes the variance for the deviation (numpygpt/layers/linear.py)"
CLAIMS = (
    Claim(
        "With the root, signals and gradients keep their size from one square map to the next, to a tenth.",
        f"{GLOROT}, eqs. 8 to 12",
        tuple(
            Criterion(f"factor a map, {way}", kept("root", i), 0.9, 1.1, ratio=True)
            for i, way in enumerate(("forward", "backward"))
        ),
    ),
    Claim(
        "With the variance, each map divides them by the root of the width.",
        f"{GLOROT}, eqs. 5 and 6, with that deviation",
        tuple(
            Criterion(
                f"factor a map times the root of the width, {way}",
                kept("variance", i, lambda n: n["width"] ** -0.5),
                0.9,
                1.1,
                ratio=True,
            )
            for i, way in enumerate(("forward", "backward"))
        ),
    ),
    *(
        Claim(
            f"The model learns better with the root, the norm {word} the sublayer.",
            LISTING,
            (
                Criterion(
                    f"norm {word}: loss with the variance less that with the root",
                    less(f"variance {place}", f"root {place}"),
                    low=0,
                ),
            ),
        )
        for place, word in (("pre", "before"), ("post", "behind"))
    ),
)


def draw(figure: Any, numbers: Numbers) -> None:
    """Draw the sizes along the maps, and the losses over training."""
    sizes, training = figure.subplots(1, 2)
    for name, color in (("root", BLUE), ("variance", RED)):
        for way, line in (("forward", "-"), ("backward", "--")):
            sizes.semilogy(range(MAPS + 1), numbers[way][name], line, color=color, label=f"{name}, {way}")
    sizes.semilogy(range(MAPS + 1), [numbers["width"] ** (-i / 2) for i in range(MAPS + 1)], ":", color=GREY)
    sizes.set(xlabel="maps passed", ylabel="root mean square")
    sizes.legend()
    curves(training, numbers, LABELS, LOOKS)


STUDY = Study(
    title="How large linear maps begin",
    about=f"A signal of independent standard normal numbers goes through {MAPS} square maps in a row, and a gradient "
    "comes back. Then the default model is trained, its linear maps begun with either deviation from the same draws, "
    "with the norm before the sublayers and behind them. Pairs have the same parameters.",
    claims=CLAIMS,
    measure=measure,
    table=lambda numbers: loss_table(numbers, LABELS),
    draw=draw,
    caption="The size of a signal and of a gradient on their way through maps in a row (dotted: one over the root of "
    "the width a map); training losses.",
    reading="A norm before every sublayer gives each map an input of unit size, however small the maps are, and Adam's "
    "steps have the same length whatever the size of the gradients. What is left of the difference is how much each "
    "sublayer adds to the stream at the start, and how sure of itself the first prediction is.",
)
