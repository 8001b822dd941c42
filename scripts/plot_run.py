"""Draw the losses of one or more runs from their metrics.jsonl, as a picture and, without a display, as text."""

import argparse
import os
import shutil
import string
import sys
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from numpygpt import cli, durable, metrics
from numpygpt.extras import need
from numpygpt.progress import Smoothed

CHARACTER, TOKEN = "nats a character", "nats a token"
POINTS = 2000  # of a curve, at most
LOOKS = [  # of each run: color and marker in the picture, color in the terminal
    ("#0072b2", "o", "blue"),
    ("#e69f00", "s", "yellow"),
    ("#000000", "^", "white"),
    ("#cc79a7", "D", "magenta"),
    ("#009e73", "v", "green"),
    ("#d55e00", "P", "red"),
]


@dataclass(frozen=True)
class Run:
    """What is drawn of a run. A curve is an array (2, points) of steps and losses in the run's unit.

    That is nats a character, or nats a token if the log doesn't say how many characters a token has.
    """

    name: str
    training: np.ndarray
    smoothed: np.ndarray
    validation: np.ndarray
    unit: str


def parse() -> argparse.Namespace:
    """Read the flags."""
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("folders", type=Path, nargs="+", metavar="folder", help="folder of a run, such as runs/shakespeare")
    add("--out", type=Path, default=Path("loss.png"), metavar="FILE", help="picture to write (default: loss.png)")
    add(
        "--terminal",
        action=argparse.BooleanOptionalAction,
        help="draw the curves as text too (unless given: if there is no display)",
    )
    return parser.parse_args()


def load(folder: Path, name: str) -> Run:
    """Read a run, which may still go on. ValueError names a log that is missing, empty or no log of losses."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} isn't there: name the folder of a run, such as runs/shakespeare")
    rows = metrics.read(path)
    if not rows:
        raise ValueError(f"{path} holds no whole line: wait for the run's first step, or name another run")
    try:
        evaluated = [row for row in rows if "validation_loss" in row]
        key = "validation_loss_per_character"
        factors = [row[key] / row["validation_loss"] for row in evaluated if key in row]
        scale = np.array([[1.0], [factors[-1] if factors else 1.0]])
        training = scale * curve([(row["step"], row["loss"]) for row in rows])
        validation = scale * curve([(row["step"], row["validation_loss"]) for row in evaluated])
        if not (np.isfinite(training).all() and np.isfinite(validation).all()):
            raise ValueError("a loss isn't finite")
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path} isn't a log that train_shakespeare.py wrote: {error!r}") from error
    average, smoothed = Smoothed(), training.copy()
    for i, loss in enumerate(training[1].tolist()):
        average.add(loss)
        smoothed[1, i] = average.value
    return Run(name, thinned(training), thinned(smoothed), validation, CHARACTER if factors else TOKEN)


def curve(points: list[tuple[float, float]]) -> np.ndarray:
    """Return pairs as an array (2, points)."""
    return np.array(points, float).reshape(-1, 2).T


def thinned(points: np.ndarray) -> np.ndarray:
    """Return every so many-th point of a curve, the last among them, and at most POINTS."""
    stride = -(-points.shape[1] // POINTS)
    return points[:, ::-1][:, ::stride][:, ::-1]


def short_name(folder: Path, folders: list[Path]) -> str:
    """Return the last parts of a path, as few as no other of `folders` ends on."""
    parts = 1
    while sum(other.parts[-parts:] == folder.parts[-parts:] for other in folders) > 1:
        parts += 1
    return str(Path(*folder.parts[-parts:]))


def load_all(folders: list[Path]) -> list[Run]:
    """Read each run once, however often it is named."""
    different = list(dict.fromkeys(Path(os.path.abspath(folder)) for folder in folders))
    return [load(folder, short_name(folder, different)) for folder in different]


def unit(runs: list[Run]) -> str:
    """Return the unit of the axis."""
    return CHARACTER if any(run.unit == CHARACTER for run in runs) else TOKEN


def label(run: Run, runs: list[Run]) -> str:
    """Return a run's name, marked if its unit isn't that of the axis."""
    return run.name if run.unit == unit(runs) else f"{run.name} (per token)"


def limits(runs: list[Run]) -> tuple[float, float]:
    """Return the range of losses to show. A run's highest twentieth, most often its beginning, may lie above it."""
    tops = [np.percentile(run.training[1], 95) for run in runs]
    tops += [loss for run in runs for step, loss in run.validation.T if 20 * step > run.training[0, -1]]
    bottom = min(curve[1].min() for run in runs for curve in (run.training, run.validation) if curve.size)
    margin = 0.05 * (max(tops) - bottom) or 0.5
    return bottom - margin, max(tops) + margin


def picture(runs: list[Run]) -> Any:
    """Return a matplotlib Figure. ImportError without the library."""
    matplotlib, figures = need("matplotlib", "plot"), need("matplotlib.figure", "plot")
    matplotlib.rcdefaults()  # the same picture whatever the user's style
    matplotlib.rc("text", parse_math=False)  # a $ in a name is a $
    matplotlib.rc("axes.spines", top=False, right=False)
    figure = figures.Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    entries = []
    for run, (color, marker, _) in zip(runs, cycle(LOOKS)):
        points = {"marker": marker, "markeredgecolor": "white", "markersize": 6.5}
        axes.plot(*run.training, color=color, alpha=0.35, linewidth=0.6, zorder=1)
        axes.plot(*run.smoothed, "-", color=color, linewidth=1.8, marker=".", markevery=[-1])
        markevery = 1 + run.validation.shape[1] // 25
        axes.plot(*run.validation, "--", color=color, linewidth=1, zorder=3, markevery=markevery, **points)
        entries += axes.plot([], [], color=color, linewidth=1.8, label=label(run, runs), **points)
    entries += axes.plot([], [], color="dimgray", linewidth=1.8, label="training, smoothed")
    entries += axes.plot([], [], "--.", color="dimgray", linewidth=1, label="validation")
    axes.locator_params("x", integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="step", ylabel=f"loss, {unit(runs)}", xlim=(0, None), ylim=limits(runs))
    axes.grid(color="0.9", linewidth=0.6)
    axes.legend(handles=entries, edgecolor="none")
    return figure


def text(runs: list[Run]) -> str:
    """Return the curves as lines of text that fit the terminal. ImportError without the library."""
    uniplot = need("uniplot", "plot")
    series = []
    for run, letter, (*_, color) in zip(runs, cycle(string.ascii_lowercase), cycle(LOOKS)):
        series.append((f"{label(run, runs)}, training", run.smoothed, letter, color))
        if run.validation.size:
            series.append((f"{label(run, runs)}, validation", run.validation, letter.upper(), color))
    labels, curves, letters, colors = map(list, zip(*series, strict=True))
    columns, lines = shutil.get_terminal_size()  # 80 x 24 in a pipe
    width = max(columns, 20) - 1  # the last number under the picture may stick out
    bottom, top = limits(runs)
    return uniplot.plot_to_string(
        xs=[steps for steps, _ in curves],
        ys=[losses for _, losses in curves],
        x_gridlines=[],
        y_min=bottom,
        y_max=top,
        lines=[letter.islower() for letter in letters],
        color=colors if sys.stdout.isatty() else False,
        character_set="ascii",
        force_ascii_characters=letters,
        legend_labels=labels,
        title=f"loss, {unit(runs)}, at each step",
        width=width,
        line_length_hard_cap=width,
        height=max(lines - 6 - len(runs), 5),
    )


def has_display() -> bool:
    """Return whether a picture can be looked at here: only Linux is used without a screen."""
    return not sys.platform.startswith("linux") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))


def main() -> int:
    """Draw; return the exit status."""
    args = parse()
    try:
        if args.out.suffix.lower() != ".png":
            raise ValueError(f"--out {args.out} must end in .png")
        runs = load_all(args.folders)
        drawn = text(runs) if args.terminal or (args.terminal is None and not has_display()) else None
        figure = picture(runs)
        with durable.replacing(args.out) as file:
            figure.savefig(file, format="png")
    except (ValueError, OSError, ImportError) as error:
        cli.fail(error)
    for run in runs:
        if run.unit != unit(runs):
            print(f"warning: {run.name} is drawn in nats a token: its log has no loss a character", file=sys.stderr)
    if drawn is not None:
        print(drawn)
    print(f"Saved {args.out}")
    return 0


if __name__ == "__main__":
    cli.run(main)
