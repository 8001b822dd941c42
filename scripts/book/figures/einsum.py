"""Figure of the page on einsum."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from book.figures import BACKWARD, FORWARD, MUTED

NOTATION = {"Q": "bhtd", "K": "bhsd", "S": "bhts"}  # the scores of attention: S is Q and K, summed over d
DIRECTIONS = {"Q": np.array([-0.866, 0.5]), "K": np.array([0.866, 0.5]), "S": np.array([0.0, -1.0])}
OFFSET, RADIUS = 0.62, 0.97  # of the circles


def index_sets() -> Figure:
    """Draw the letters of attention's scores, and which of them each of the three contractions sums."""
    figure = Figure(figsize=(7, 2.9))
    for panel, output in enumerate("SQK"):
        axes = figure.add_axes((panel / 3, 0, 1 / 3, 1))
        axes.set_xlim(-1.75, 1.75)
        axes.set_ylim(-1.95, 1.9)
        axes.set_aspect("equal")
        axes.axis("off")
        draw_sets(axes, output)
    return figure


def draw_sets(axes: Any, output: str) -> None:
    """Draw the three sets of letters, the one of the output filled, and mark what is not in it."""
    inputs = [name for name in ("S", "Q", "K") if name != output]
    colour = FORWARD if output == "S" else BACKWARD
    for name, direction in DIRECTIONS.items():
        centre, is_output = tuple(OFFSET * direction), name == output
        if is_output:
            axes.add_patch(Circle(centre, RADIUS, facecolor=colour, alpha=0.2, linewidth=0))
        edge = colour if is_output else MUTED
        axes.add_patch(Circle(centre, RADIUS, facecolor="none", edgecolor=edge, linewidth=1.8 if is_output else 1))
        bar = output != "S" and name in ("S", output)
        label = rf"$\bar {name}$" if bar else f"${name}$"
        ink = edge if is_output else "black"
        axes.text(*(1.12 * direction), label, ha="center", va="center", fontsize=12, color=ink)
    for letter in sorted(set("".join(NOTATION.values()))):
        owners = [name for name, letters in NOTATION.items() if letter in letters]
        x, y = 0.58 * np.sum([DIRECTIONS[name] for name in owners], axis=0)
        if len(owners) == len(NOTATION):
            x += 0.12 if letter == "h" else -0.12
        summed = letter not in NOTATION[output]
        text = rf"$\Sigma_{letter}$" if summed else f"${letter}$"
        axes.text(x, y, text, ha="center", va="center", fontsize=14 if summed else 12)
    notation = f"{','.join(NOTATION[name] for name in inputs)}->{NOTATION[output]}"
    title = "forward" if output == "S" else f"gradient of ${output}$"
    axes.text(0, 1.72, title, ha="center", va="center", fontsize=10)
    axes.text(0, -1.8, notation, ha="center", va="center", fontsize=9, family="monospace")
