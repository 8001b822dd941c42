"""A study: what is said, how it is tried, and how it is shown."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import table
from numpygpt import durable
from studies.setting import Setting
from studies.verdict import Claim, Numbers

DIGITS = 6  # of a number that is kept


@dataclasses.dataclass(frozen=True)
class Study:
    """An experiment. `about` and `reading` hold whatever comes out: what depends on numbers is computed from them."""

    title: str
    about: str  # what is done, and how sizes are made equal
    claims: tuple[Claim, ...]
    measure: Callable[[Setting], Numbers]
    table: Callable[[Numbers], str]
    draw: Callable[[Any, Numbers], None]  # on a matplotlib Figure
    caption: str
    reading: str
    height: float = 3.0  # of the picture, in inches


def rounded(value: Any) -> Any:
    """Return what was measured as it is kept: numbers of few digits, in lists and dicts."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float | np.floating) else value


def save(path: Path, numbers: Numbers) -> None:
    """Write numbers down, a line a key."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in numbers.items())
    with durable.replacing(path) as file:
        file.write(f"{{\n{lines}\n}}\n".encode())


def load(path: Path) -> Numbers:
    """Read them. ValueError names a file that holds none."""
    try:
        numbers = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(numbers, dict):
            raise ValueError("it is no object")
        return numbers
    except ValueError as error:
        raise ValueError(f"{path} isn't what a study wrote ({error}): measure again") from error


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return the mean, the least and the greatest."""
    return f"{np.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def loss_table(numbers: Numbers, labels: dict[str, str]) -> str:
    """Return the sizes and losses of all kinds, and how much higher each is than the first with the same seed."""
    first, *_ = labels
    rows = []
    for name, label in labels.items():
        losses = numbers["losses"][name]
        higher = [a - b for a, b in zip(losses, numbers["losses"][first], strict=True)]
        rows.append(
            [label, f"{numbers['parameters'][name]:,}", spread(losses), spread(higher) if name != first else ""]
        )
    return table(["kind", "parameters", "held-out loss", f"less that of {labels[first]}"], rows)
