"""Costs that grow: a step's time against the context, or against the width, all else the same."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import ratios, spread, table
from benchmarks.runner import Timing
from benchmarks.sizes import Size, make_size
from benchmarks.timing import EAGER

TOKENS = 2048  # in a step, whatever the context
GROWN = {"context": [64, 128, 256, 512, 1024, 2048], "width": [128, 256, 512, 1024]}


def grown_sizes(what: str, dress: str) -> list[Size]:
    """Return the sizes along one axis: 4 layers, 4 heads, vocabulary 65, and width 256 or context 256."""
    sizes = []
    for value in GROWN[what]:
        width, context = (value, 256) if what == "width" else (256, value)
        sizes.append(make_size(str(value), 4, 4, width, context, TOKENS // context, 65, dress))
    return sizes


def medians(timings: Sequence[Timing]) -> dict[tuple[str, str], float]:
    """Return the step time in ms of each size and contender: the median over the rounds."""
    keys = dict.fromkeys((t.size, t.contender) for t in timings)
    return {k: 1000 * statistics.median(t.step_s for t in timings if (t.size, t.contender) == k) for k in keys}


def growth_table(what: str, timings: Sequence[Timing]) -> str:
    """Return the step times and, if there is eager PyTorch, our time over its."""
    times = medians(timings)
    contenders = list(dict.fromkeys(t.contender for t in timings))
    compared = [c for c in contenders if EAGER in contenders and c != EAGER]
    rows = []
    for value in dict.fromkeys(t.size for t in timings):
        here = [t for t in timings if t.size == value]
        cells = [f"{times[value, c]:,.1f}" for c in contenders]
        rows.append([value, *cells, *(spread(ratios(here, c)) for c in compared)])
    return table([what, *(f"{c}, ms" for c in contenders), *(f"{c} / {EAGER}" for c in compared)], rows)


def plot(what: str, timings: Sequence[Timing], path: Path) -> None:
    """Draw the step times, both axes logarithmic."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    times = medians(timings)
    for contender in dict.fromkeys(t.contender for t in timings):
        values = [(int(size), ms) for (size, c), ms in times.items() if c == contender]
        axes.loglog(*zip(*values, strict=True), "o-", label=contender)
    axes.set_xticks(GROWN[what], map(str, GROWN[what]))
    axes.xaxis.minorticks_off()
    axes.set_yscale("log", subs=[2, 5])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_formatter("{x:,.0f}")
    axes.set_xlabel(what)
    axes.set_ylabel(f"a step of {TOKENS:,} tokens, ms")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
