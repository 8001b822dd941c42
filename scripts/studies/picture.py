"""How pictures look: small SVG files on white, which are read on light pages and on dark ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from book.figures import BACKWARD, FORWARD, FOURTH, MUTED, THIRD
from numpygpt import durable
from numpygpt.extras import need
from studies.study import Study
from studies.verdict import Numbers

BLUE, RED, GREEN, VIOLET, GREY = FORWARD, BACKWARD, THIRD, FOURTH, MUTED
WIDTH = 7.5  # inches
STYLE = {
    "svg.fonttype": "none",  # letters stay letters: a few kB in place of hundreds
    "svg.hashsalt": "numpygpt",  # the same file from the same numbers
    "text.parse_math": False,
    "font.sans-serif": ["DejaVu Sans", "Arial"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.grid": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
}


def save_picture(study: Study, numbers: Numbers, path: Path) -> None:
    """Draw what a study measured. ImportError without matplotlib."""
    matplotlib, figures = need("matplotlib", "plot"), need("matplotlib.figure", "plot")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the same picture whatever the user's style
        matplotlib.rcParams.update(STYLE)
        figure = figures.Figure(figsize=(WIDTH, study.height), layout="constrained")
        study.draw(figure, numbers)
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                if axis.get_scale() == "log":
                    plain_numbers(axis)
        with durable.replacing(path) as file:
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})


def plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis with numbers as they are typed; between powers of ten if it spans few."""
    low, high = axis.get_view_interval()
    few = high < 50 * low
    axis.axes.locator_params(axis=axis.axis_name, numticks=6)
    axis.set_major_formatter("{x:g}")
    if few:
        axis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "25" else "")
    else:
        axis.set_ticks([], minor=True)


def dots(axes: Any, labels: Sequence[str], samples: Sequence[Sequence[float]], colors: Sequence[str]) -> None:
    """Draw a row of dots for each label, the first at the top, and a bar at their mean."""
    for row, (values, color) in enumerate(zip(samples, colors, strict=True)):
        axes.plot(values, [row] * len(values), "o", color=color, alpha=0.5, markeredgewidth=0)
        axes.plot([np.mean(values)], [row], "|", color=color, markersize=14, markeredgewidth=2)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)


def curves(axes: Any, numbers: Numbers, labels: dict[str, str], looks: Sequence[tuple[str, str]]) -> None:
    """Draw the training losses of all kinds, the mean over the seeds, each in a colour and a line style."""
    for (name, label), (color, line) in zip(labels.items(), looks, strict=True):
        axes.plot(*numbers["curves"][name], line, color=color, label=label)
    axes.set(xlabel="step", ylabel="training loss, nats a character")
    axes.legend()
