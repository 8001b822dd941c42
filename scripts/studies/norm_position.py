"""The norm before the sublayer or behind it: how the gradient gets to the first block, and what warm-up is for."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.report import table
from numpygpt.array import Array
from numpygpt.module import Parameter
from numpygpt.train import Trainer
from studies.equal import equalised
from studies.picture import BLUE, RED
from studies.runs import Kind, Watch, common_numbers, spaced, train_kinds
from studies.setting import Setting
from studies.study import Study, spread
from studies.verdict import Claim, Criterion, Numbers, short

DEPTHS, QUICK_DEPTHS = (24, 12, 6, 2), (2, 1)
PLACES = {"pre": "before", "post": "behind"}
PARTS = {"norm": "layernorm", "ffn": "relu", "positions": "sinusoidal"}  # of 2017, of which the paper speaks
STEPS, RATE = 250, 1e-3
CONTEXT, BATCH = 32, 8


def norm_of(parameters: Sequence[Parameter]) -> float:
    """Return the norm of the gradients of some parameters together."""
    return float(np.sqrt(sum(np.sum(np.square(p.grad, dtype=np.float64)) for p in parameters)))


def gradient_norms(trainer: Trainer) -> list[float]:
    """Return the gradient's norm in each block, and last that of the last block's W2 alone, in the latest step."""
    blocks = trainer.model.layers
    (w2,) = [p for name, p in blocks[-1].named_parameters() if name == "ffn.w2.weight"]
    return [*(norm_of(block.parameters()) for block in blocks), norm_of([w2])]


def measure(setting: Setting) -> Numbers:
    """Train both kinds, with warm-up over a quarter of the steps and without, at every depth.

    Of the default parts, only the first step is made, at the greatest depth.
    """
    depths, steps = setting.pick(DEPTHS, QUICK_DEPTHS), setting.steps(STEPS)
    context, batch = {"context_length": setting.pick(CONTEXT, 8)}, {"batch_size": setting.pick(BATCH, 4)}
    kinds = {}
    for depth in depths:
        models = {place: setting.model(num_layers=depth, norm_position=place, **PARTS, **context) for place in PLACES}
        for place, config in equalised(models).items():
            for name, warmup in (("warm", max(1, steps // 4)), ("cold", 0)):
                train = {"steps": steps, "lr": RATE, "warmup_steps": warmup, **batch}
                kinds[f"{place} {name} {depth}"] = Kind(config, train)
    watch = Watch(gradient_norms, spaced(steps))
    outcomes = train_kinds(setting, kinds, watch)
    default = {
        place: Kind(setting.model(num_layers=depths[0], norm_position=place, **context), {"steps": 1, **batch})
        for place in PLACES
    }
    first_steps = train_kinds(setting, default, watch)
    norms = {name: np.array([outcome.watched for outcome in done]) for name, done in outcomes.items()}
    return {
        **(common := common_numbers(setting, kinds, outcomes)),
        "setting": common["setting"].replace(f"{depths[0]} layers", f"{' or '.join(map(str, sorted(depths)))} layers"),
        "depths": sorted(depths),
        "watched": watch.steps,
        "first_over_last": {name: over_last(values[:, 0]) for name, values in norms.items()},
        "first_over_last_at_end": {name: over_last(values[:, -1]) for name, values in norms.items()},
        "first_over_last_default": {
            place: over_last(np.array([outcome.watched[0] for outcome in done])) for place, done in first_steps.items()
        },
        "last_w2": {name: values[:, 0, -1].tolist() for name, values in norms.items()},
        "ratio_over_training": {name: geometric_mean(over_last(values)) for name, values in norms.items()},
        "blocks": {name: geometric_mean(values[:, [0, -1], :-1]) for name, values in norms.items()},
    }


def over_last(norms: Array) -> list:
    """Return the first block's norm over the last one's."""
    return (norms[..., 0] / norms[..., -2]).tolist()


def geometric_mean(values: Any) -> Any:
    """Return the geometric mean over the first axis, the seeds: a number, or a list of them."""
    return np.exp(np.mean(np.log(values), axis=0)).tolist()


def at_depth(values: str, place: str, warm: str, which: int) -> Any:
    """Return the function that reads a quantity at the least depth (0) or the greatest (-1)."""
    return lambda n: n[values][f"{place} {warm} {n['depths'][which]}"]


def growth(place: str) -> Any:
    """Return the function that says how first over last changes from the least depth to the greatest."""
    least, greatest = (at_depth("first_over_last", place, "cold", which) for which in (0, -1))
    return lambda n: [b / a for a, b in zip(least(n), greatest(n), strict=True)]


def slope(place: str) -> Any:
    """Return the function that fits the power of the depth by which the last W2's gradient goes, for each seed."""

    def fit(numbers: Numbers) -> list[float]:
        depths = numbers["depths"]
        norms = np.log([numbers["last_w2"][f"{place} cold {depth}"] for depth in depths])
        return np.polyfit(np.log(depths), norms, 1)[0].tolist()

    return fit


def higher(one: tuple[str, str], other: tuple[str, str]) -> Any:
    """Return the function that takes one loss at the greatest depth from another."""
    read, read_other = (at_depth("losses", *kind, -1) for kind in (one, other))
    return lambda n: [a - b for a, b in zip(read(n), read_other(n), strict=True)]


def warmup_gain(place: str) -> Any:
    """Return the function that says how much lower the loss is with warm-up, at the greatest depth."""
    return higher((place, "cold"), (place, "warm"))


XIONG = "Xiong et al. (2020), arXiv:2002.04745"
CLAIMS = (
    Claim(
        "With the norm before, the gradient reaches the first block of a deep model undiminished.",
        "equation (3) of numpygpt/layers/block.py",
        (
            Criterion(
                "norm before, greatest depth: the first block's gradient at the start over the last one's",
                at_depth("first_over_last", "pre", "cold", -1),
                low=0.5,
                ratio=True,
            ),
        ),
    ),
    Claim(
        "With the norm behind, it gets weaker on its way to the first block, and more so the deeper the model.",
        f"{XIONG}, section 3.3",
        (
            Criterion(
                "norm behind, greatest depth: the first block's gradient at the start over the last one's",
                at_depth("first_over_last", "post", "cold", -1),
                high=0.5,
                ratio=True,
            ),
            Criterion(
                "norm behind: that ratio at the greatest depth over the same at the least",
                growth("post"),
                high=1,
                ratio=True,
            ),
        ),
    ),
    Claim(
        "So it does with the default parts of this project.",
        "the reading of numpygpt/layers/block.py: behind, the norm scales it twice a block. Added after a trial of the "
        "program had shown that these parts start otherwise than those of 2017",
        (
            Criterion(
                "norm behind, RMSNorm, SwiGLU and RoPE, greatest depth: the first block's gradient at the start over "
                "the last one's",
                lambda n: n["first_over_last_default"]["post"],
                high=0.5,
                ratio=True,
            ),
        ),
    ),
    Claim(
        "At the start the gradient of the last block falls as one over the root of the depth with the norm before, "
        "and doesn't depend on the depth with the norm behind.",
        f"{XIONG}, theorem 1",
        (
            Criterion("norm before: the power of the depth in the gradient of the last W2", slope("pre"), -0.75, -0.25),
            Criterion("norm behind: the power of the depth in the gradient of the last W2", slope("post"), -0.25, 0.25),
        ),
    ),
    Claim(
        "With the norm behind, a deep model needs warm-up.",
        f"{XIONG}, section 3.2",
        (Criterion("norm behind, greatest depth: loss without warm-up less that with it", warmup_gain("post"), low=0),),
    ),
    Claim(
        "Warm-up matters less with the norm before.",
        f"{XIONG}, section 4",
        (
            Criterion(
                "what warm-up takes from the loss with the norm behind, less what it takes with the norm before",
                lambda n: [a - b for a, b in zip(warmup_gain("post")(n), warmup_gain("pre")(n), strict=True)],
                low=0,
            ),
        ),
    ),
    Claim(
        "Without warm-up, a deep model ends on a lower loss with the norm before.",
        f"{XIONG}, section 4",
        (
            Criterion(
                "no warm-up, greatest depth: loss with the norm behind less that with the norm before",
                higher(("post", "cold"), ("pre", "cold")),
                low=0,
            ),
        ),
    ),
)


def make_table(numbers: Numbers) -> str:
    """Return a row for each depth and place."""
    rows = []
    for depth in numbers["depths"]:
        for place, word in PLACES.items():
            warm, cold = (f"{place} {name} {depth}" for name in ("warm", "cold"))
            ratios = [short(geometric_mean(numbers[f"first_over_last{when}"][warm])) for when in ("", "_at_end")]
            losses = [spread(numbers["losses"][name]) for name in (warm, cold)]
            rows.append([f"{depth}, {word}", f"{numbers['parameters'][cold]:,}", *ratios, *losses])
    ratio = "gradient, first block / last"
    head = ["depth, norm", "parameters", f"{ratio}, start", "end (warm-up)", "loss, warm-up", "loss, no warm-up"]
    default = numbers["first_over_last_default"]
    before, behind = (f"{short(geometric_mean(default[place]))} with the norm {PLACES[place]}" for place in PLACES)
    where = f"At depth {numbers['depths'][-1]} with the default parts, at the start"
    return f"{table(head, rows)}\n\n{where}, the same ratio is {before} and {behind}."


def draw(figure: Any, numbers: Numbers) -> None:
    """Draw the gradient by block, its ratio over training, and the losses by depth."""
    by_block, over_training, losses = figure.subplots(1, 3)
    depths = numbers["depths"]
    for place, color in (("pre", BLUE), ("post", RED)):
        blocks = np.arange(1, depths[-1] + 1)
        for values, line, when in zip(
            numbers["blocks"][f"{place} warm {depths[-1]}"], ("-", ":"), ("start", "end"), strict=True
        ):
            by_block.semilogy(blocks, values, line, color=color, label=f"{PLACES[place]}, {when}")
        for name, line, words in (("warm", "-", "warm-up"), ("cold", "--", "none")):
            ratio = numbers["ratio_over_training"][f"{place} {name} {depths[-1]}"]
            over_training.loglog(numbers["watched"], ratio, line, color=color)
            means = [np.mean(numbers["losses"][f"{place} {name} {depth}"]) for depth in depths]
            losses.plot(depths, means, f"o{line}", color=color, label=f"{PLACES[place]}, {words}")
            for depth in depths:
                seeds = numbers["losses"][f"{place} {name} {depth}"]
                losses.plot([depth, depth], [min(seeds), max(seeds)], color=color, linewidth=0.8)
    by_block.set(xlabel="block", title=f"gradient norm, depth {depths[-1]}")
    over_training.set(xlabel="step", title="the same, first block over last")
    losses.set(xlabel="depth", title="held-out loss", xticks=depths)
    for axes in (by_block, losses):
        axes.legend()


STUDY = Study(
    title="The norm before the sublayer or behind it",
    about="A model of the parts of 2017 (LayerNorm, ReLU, sinusoidal positions), of which the paper speaks, with the "
    "norm before each sublayer (pre-norm) or behind it (post-norm, the original), at several depths, with a warm-up "
    "over a quarter of the steps and with none. At one depth both have the same matrices; pre-norm has the gain of a "
    "final norm besides, less than 1 % of the parameters. The first step is also made with this project's default "
    "parts.",
    claims=CLAIMS,
    measure=measure,
    table=make_table,
    draw=draw,
    caption="The norm of the gradient in each block of the deepest model, in the first step and in the last (left); "
    "what the first block has of it over what the last one has, over training, with warm-up (solid) and without "
    "(dashed); held-out losses, and their range over the seeds. Blue: norm before; red: norm behind.",
    reading="With the norm before, the residual path adds and never rescales, so the cotangent of the last block "
    "arrives at the first one whole. The stream grows with every block that adds to it, and each norm divides by its "
    "size: later blocks get smaller gradients. With the norm behind, each block's output has unit size whatever the "
    "depth, and a cotangent passes two norms a block.",
)
