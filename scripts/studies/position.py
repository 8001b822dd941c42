"""How a model knows the order of its tokens, and what becomes of that beyond the length it was trained on."""

from typing import Any

import numpy as np

from benchmarks.report import table
from numpygpt.data import sequential_batches
from numpygpt.layers.cross_entropy import CrossEntropy
from numpygpt.module import evaluating
from numpygpt.train import Trainer
from studies.equal import equalised
from studies.picture import BLUE, GREEN, GREY, RED, VIOLET
from studies.runs import Kind, Watch, common_numbers, less, train_kinds
from studies.setting import Setting
from studies.study import Study, spread
from studies.verdict import Claim, Criterion, Numbers

LABELS = {"rope": "RoPE", "sinusoidal": "sinusoidal", "learned": "learned", "none": "none"}
COLORS = {"rope": BLUE, "sinusoidal": GREEN, "learned": RED, "none": VIOLET}
BATCH = 32  # sequences evaluated at once
GROUPS = 16  # of neighbouring positions


def losses_by_position(trainer: Trainer) -> list[float]:
    """Return the mean held-out loss in each of GROUPS groups of positions, of sequences as long as the model takes.

    These begin a group apart from each other, so that each token is a target once in every group, but for those near
    the ends of the text: groups differ by what stands before a token, not by the tokens.
    """
    model, loss = trainer.model, CrossEntropy()
    length = model.config.context_length
    size = length // GROUPS
    total, count = np.zeros(GROUPS), 0
    with evaluating([*model.modules(), loss]):
        for start in range(0, length, size):
            for inputs, targets in sequential_batches(trainer.validation_tokens[start:], BATCH, length):
                if inputs.shape[1] == length:  # what is left at the end is shorter
                    x, y = (np.asarray(ids, like=model.flat.value) for ids in (inputs, targets))
                    groups = np.split(model.forward(x), GROUPS, axis=1), np.split(y, GROUPS, axis=1)
                    total += [len(inputs) * loss.forward(z, y) for z, y in zip(*groups, strict=True)]
                    count += len(inputs)
    return (total / count).tolist()


def measure(setting: Setting) -> Numbers:
    """Train on sequences half as long as the models take; then read the loss at every position."""
    trained, half = setting.model().context_length, GROUPS // 2
    models = {name: setting.model(positions=name, context_length=2 * trained) for name in LABELS}
    train = {"context_length": trained}
    kinds = {name: Kind(config, train) for name, config in equalised(models).items()}
    outcomes = train_kinds(setting, kinds, Watch(losses_by_position, (setting.steps(),)))
    by_position = {name: np.array([outcome.watched[0] for outcome in done]) for name, done in outcomes.items()}
    return {
        **common_numbers(setting, kinds, outcomes),
        "trained": trained,
        "by_position": {name: np.mean(values, axis=0) for name, values in by_position.items()},
        "twice": {name: np.mean(values, axis=1) for name, values in by_position.items()},
        "beyond": {
            name: np.mean(values[:, half:], axis=1) - np.mean(values[:, half // 2 : half], axis=1)
            for name, values in by_position.items()
        },
    }


def beyond(one: str, other: str | None = None) -> Any:
    """Return the function that says how much the loss rises beyond the trained length: one's, or more than other's."""
    if other is None:
        return lambda n: n["beyond"][one]
    return lambda n: [a - b for a, b in zip(n["beyond"][one], n["beyond"][other], strict=True)]


RISE = "rise of the loss beyond the trained length"
CLAIMS = (
    Claim(
        "A model that is told no positions ends on a higher loss than one that is told them in any way.",
        "Vaswani et al. (2017), arXiv:1706.03762, section 3.5",
        tuple(
            Criterion(
                f"loss with none less that with {LABELS[name]}",
                less("none", name),
                low=0,
            )
            for name in ("rope", "sinusoidal", "learned")
        ),
    ),
    Claim(
        "RoPE ends on a lower loss than positions that are added.",
        "Su et al. (2021), arXiv:2104.09864, section 4",
        tuple(
            Criterion(
                f"loss with {LABELS[name]} less that with RoPE",
                less(name, "rope"),
                low=0,
            )
            for name in ("sinusoidal", "learned")
        ),
    ),
    Claim(
        "Beyond the trained length the loss rises with RoPE and with sinusoidal positions.",
        "Press, Smith & Lewis (2021), arXiv:2108.12409, section 2",
        tuple(Criterion(f"{RISE}, {LABELS[name]}", beyond(name), low=0) for name in ("rope", "sinusoidal")),
    ),
    Claim(
        "It rises less with RoPE than with sinusoidal positions, and less with these than with learned ones.",
        "Press, Smith & Lewis (2021), arXiv:2108.12409, figure 1; that learned ones fail is plain",
        (
            Criterion(f"{RISE}, sinusoidal less RoPE", beyond("sinusoidal", "rope"), low=0),
            Criterion(f"{RISE}, learned less sinusoidal", beyond("learned", "sinusoidal"), low=0),
        ),
    ),
    Claim(
        "It rises least with no positions at all.",
        "Kazemnejad et al. (2023), arXiv:2305.19466, section 4",
        (Criterion(f"{RISE}, none less RoPE", beyond("none", "rope"), high=0),),
    ),
)


def make_table(numbers: Numbers) -> str:
    """Return the losses at the trained length, at twice that, and the rise."""
    rows = [
        [
            label + (" (never met there)" if name == "learned" else ""),
            f"{numbers['parameters'][name]:,}",
            *(spread(numbers[what][name]) for what in ("losses", "twice", "beyond")),
        ]
        for name, label in LABELS.items()
    ]
    trained = numbers["trained"]
    head = ["positions", "parameters", f"loss at {trained}", f"loss at {2 * trained}", f"rise beyond {trained}"]
    return table(head, rows)


def draw(figure: Any, numbers: Numbers) -> None:
    """Draw the loss by position."""
    axes = figure.subplots()
    middles = (np.arange(GROUPS) + 0.5) * (2 * numbers["trained"] / GROUPS) + 0.5
    for name, label in LABELS.items():
        axes.plot(middles, numbers["by_position"][name], "o-", color=COLORS[name], label=label)
    axes.axvline(numbers["trained"] + 0.5, color=GREY, linestyle=":")
    axes.set(xlabel="position (trained up to the dotted line)", ylabel="held-out loss")
    axes.legend()


STUDY = Study(
    title="Sinusoidal, learned, RoPE, none",
    about="The default model with each kind of positions. It takes sequences twice as long as those it is trained on. "
    "Learned positions are parameters, half of which no training sequence reaches; the feed-forward layers of that "
    "model have fewer: all four have the same number, to 1 %. The rise is the mean loss at the positions beyond the "
    "trained length less that at the second half of those within it, over the same held-out tokens.",
    claims=CLAIMS,
    measure=measure,
    table=make_table,
    draw=draw,
    caption="The held-out loss in groups of neighbouring positions, of sequences twice as long as those trained on: "
    "the same tokens in each group, with more before them. The mean over the seeds.",
    reading="Learned positions can't go beyond the trained length: a table of that length has no vector there and "
    "refuses, and the longer table that is used here holds vectors there that were drawn at the start and that no "
    "gradient ever reached. The other kinds have an answer at any position. Without positions the order isn't lost "
    "altogether: the mask hides later tokens, and so lets the model count the earlier ones.",
)
