"""The README's picture, also on the page on the whole backward: the default model, formula beside formula."""

import re

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from book.figures import BACKWARD, FORWARD, MUTED
from book.source import by_name

# What a row is called, its files, and its equations forward and backward. Of a chain a = b = c the first two sides are
# shown, or the first and the last.
NORM = ("RMSNorm", "norm.py", ["RMSNorm 2", "RMSNorm 3"], ["RMSNorm 8"])
RESIDUAL = ("+ residual", "block.py", ["DecoderBlock 1"], ["DecoderBlock 3"])
ATTENTION = ["ScaledDotProductAttention 1", "ScaledDotProductAttention 4"]
ATTENTION_BACK = ["ScaledDotProductAttention 8", "ScaledDotProductAttention 9"]
ROWS = [
    ("embedding", "embedding.py", ["Embedding 1 last"], ["Embedding 2 last"]),
    NORM,
    ("attention, RoPE", "attention.py, position.py", ATTENTION, ATTENTION_BACK),
    RESIDUAL,
    NORM,
    ("SwiGLU", "feedforward.py", ["GLU 2", "GLU 3"], ["GLU 5", "GLU 6", "GLU 7"]),
    RESIDUAL,
    ("RMSNorm, linear", "norm.py, linear.py", ["Linear 1"], ["Linear 3", "Linear 5"]),
    ("cross-entropy", "cross_entropy.py", ["CrossEntropy 2", "CrossEntropy 3"], ["CrossEntropy 5"]),
]
BLOCK = range(1, 7)  # the rows that are repeated
WIDTH, TOP, STEP = 1000, 110, 62  # in points, as are all places here
NAMES, LEFT, RIGHT = 34, 226, 578  # x of the names, and of the two paths


def sides_of(latex: str) -> list[str]:
    """Return what stands between the equals signs of a formula, but for those inside brackets."""
    sides, depth = [""], 0
    for piece in re.split(r"([{(\[]|[})\]]|=)", latex):
        depth += (piece in tuple("{([")) - (piece in tuple("})]"))
        if piece == "=" and depth == 0:
            sides.append("")
        else:
            sides[-1] += piece
    return [side.strip() for side in sides if side]


def formula(named: str) -> str:
    """Return an equation of a docstring as matplotlib writes it."""
    name, number, *which = named.split()
    latex = by_name()[name].equations[number].latex.partition(r"\qquad")[0].rstrip(", ")
    latex = re.sub(r"^\\text\{[^}]*\}\\quad ", "", latex)  # "pre:"
    sides = sides_of(latex)
    latex = f"{sides[0]} = {sides[-1 if which else 1]}"
    latex = re.sub(r"\\[Bb]ig(?=\()", r"\\left", re.sub(r"\\[Bb]ig(?=\))", r"\\right", latex))
    latex = re.sub(r"\\t?frac(\d) ?(\w)", r"\\frac{\1}{\2}", latex).replace(r"\mathbb 1", r"\mathbb{1}")
    latex = re.sub(r"(\\sum_(?:\w|\{[^}]*\}))", r"\1\\,", latex)
    return rf"${latex}\;\;({number})$"


def model() -> Figure:
    """Draw the default model as two paths: values down on the left, gradients up on the right."""
    height = TOP + STEP * len(ROWS) + 36
    figure = Figure(figsize=(WIDTH / 72, height / 72))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    first, last = (TOP + STEP * row for row in (BLOCK[0], BLOCK[-1]))
    band = FancyBboxPatch((18, first - 30), WIDTH - 36, last - first + 60, "round,pad=0,rounding_size=8")
    band.set(facecolor=MUTED, alpha=0.13, edgecolor="none")
    axes.add_patch(band)
    axes.text(WIDTH - 34, last + 20, "block, × L", color=MUTED, size=12, ha="right", va="center")
    told_back = r"$\bar z$ means $\partial L/\partial z$; (8): its number in the file on the left"
    end = TOP + STEP * (len(ROWS) - 1) + 34
    for x, way, title, told in (
        (LEFT, FORWARD, "forward: values ↓", "one block of the default model, and what is around it"),
        (RIGHT, BACKWARD, "backward: gradients ↑", told_back),
    ):
        axes.text(x + 24, 34, title, color=way, size=17, weight="bold", va="center")
        axes.text(x + 24, 60, told, color=MUTED, size=12, va="center")
        start, stop = ((x, TOP - 24), (x, end)) if way == FORWARD else ((x, end), (x, TOP - 24))
        arrow = {"arrowstyle": "-|>,head_length=0.7,head_width=0.3", "color": way, "lw": 3, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", stop, start, arrowprops=arrow)
    for row, (name, files, forth, back) in enumerate(ROWS):
        y = TOP + STEP * row
        axes.text(NAMES, y, name, size=15, weight="bold", va="center")
        axes.text(NAMES, y + 20, files, size=11.5, color=MUTED, va="center", family="monospace")
        for x, way, formulas in ((LEFT, FORWARD, forth), (RIGHT, BACKWARD, back)):
            axes.plot(x, y, "o", color=way, markersize=9)
            text = r"$\;\quad$".join(map(formula, formulas))
            axes.text(x + 24, y, text, size=15.5, va="center")
    axes.text(LEFT, end + 18, "$L$", color=FORWARD, size=17, ha="center", va="center")
    axes.text(RIGHT, end + 18, r"$\bar L = 1$", color=BACKWARD, size=17, ha="center", va="center")
    return figure
