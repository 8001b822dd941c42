"""The table, in Markdown."""

import statistics
from collections.abc import Sequence

from benchmarks.bound import flops
from benchmarks.runner import Timing
from benchmarks.sizes import Size
from benchmarks.timing import BOUND, EAGER

HEAD = [
    "size",
    "contender",
    "time / eager PyTorch's",
    "step, ms",
    "tokens/s",
    "GF/s",
    "peak MB",
    "(imports)",
    "compile s",
]
COMPILED = ("compile", "jax")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table, its columns aligned: so many to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ["-" * width if i < left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]

    def line(cells: Sequence[str]) -> str:
        sides = [str.ljust] * left + [str.rjust] * (len(widths) - left)
        return f"| {' | '.join(side(cell, w) for side, cell, w in zip(sides, cells, widths, strict=True))} |"

    return "\n".join(map(line, [head, rule, *rows]))


def ratios(timings: Sequence[Timing], contender: str, reference: str = EAGER) -> list[float]:
    """Return the step time of a contender over the reference's, for each round that has both."""
    times = {(t.contender, t.round): t.step_s for t in timings}
    rounds = sorted({t.round for t in timings})
    pairs = [(times.get((contender, i)), times.get((reference, i))) for i in rounds]
    return [ours / theirs for ours, theirs in pairs if ours is not None and theirs is not None]


def spread(values: Sequence[float]) -> str:
    """Return the median and, of more than one, the least and the greatest; a dash for none."""
    if not values:
        return "-"
    middle = f"{statistics.median(values):.2f}"
    return f"{middle} ({min(values):.2f}..{max(values):.2f})" if len(values) > 1 else middle


def rows_of(size: Size, timings: Sequence[Timing]) -> list[list[str]]:
    """Return a size's rows, one a contender."""
    rows = []
    for contender in dict.fromkeys(t.contender for t in timings):
        own = [t for t in timings if t.contender == contender]
        step_s = statistics.median(t.step_s for t in own)
        memory = [f"{max(mb):,.0f}" for mb in ([t.peak_mb for t in own], [t.imports_mb for t in own])]
        compiling = f"{max(t.first_s - t.step_s for t in own):.1f}" if contender in COMPILED else ""
        rows.append(
            [
                size.name,
                contender,
                spread(ratios(timings, contender)),
                f"{1000 * step_s:,.1f}",
                f"{size.tokens / step_s:,.0f}",
                f"{flops(size) / step_s / 1e9:,.0f}",
                *(memory if contender != BOUND else ["", ""]),  # all its arrays are there at once
                compiling,
            ]
        )
    return rows


NOTES = """
time / eager PyTorch's: median (least..greatest) over the rounds of the median step times' ratio in a round.
GF/s: the step's matrix products (attention's in full) over its time. bound: these products alone, by NumPy's BLAS.
peak MB: the most memory of the whole process, the interpreter and its libraries (imports), weights, gradients, moments
and activations; compile s: what the first step took longer than a later one, the longest."""


def training_table(sizes: Sequence[Size], timings: Sequence[Timing]) -> str:
    """Return the whole table, and what its columns and sizes are."""
    rows = [row for size in sizes for row in rows_of(size, [t for t in timings if t.size == size.name])]
    return "\n".join([table(HEAD, rows, left=2), NOTES.lstrip("\n"), *map(describe, sizes)])


def describe(size: Size) -> str:
    """Return a line about a size."""
    c = size.config
    return (
        f"{size.name}: {c.num_layers} layers, {c.num_heads} heads, width {c.d_model}, context {c.context_length}, "
        f"batch {size.batch_size}, vocabulary {c.vocab_size:,}: {size.tokens:,} tokens and "
        f"{flops(size) / 1e9:.1f} GFLOP of matrix products a step"
    )
