"""How a run went: `metrics.jsonl`, a JSON object a line, one line a step."""

import json
import os
from pathlib import Path
from typing import Any

from numpygpt import durable


class MetricsLog:
    """The log of a run that stands at `step`. Lines of later steps, and half a line, were left by a crash: they go.

    A line is written at each step, and is on the disk for certain after `sync`. Called before each checkpoint, it
    makes the log hold every step up to any checkpoint, once.
    """

    def __init__(self, path: Path, step: int):
        kept = [metrics for metrics in read(path) if metrics["step"] <= step]
        durable.write_file(path, "".join(map(_line, kept)))
        self.file = path.open("a", encoding="utf-8", newline="\n")

    def append(self, metrics: dict[str, Any]) -> None:
        """Write one step's line: `step`, and other numbers by name."""
        self.file.write(_line(metrics))
        self.file.flush()

    def sync(self) -> None:
        """Return once every line is on the disk."""
        os.fsync(self.file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    """Return the steps of a log: all its lines that are whole JSON objects with a step. No file holds none.

    The run may still be writing: half a line at the end is passed over.
    """
    if not path.is_file():
        return []
    steps = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            metrics = json.loads(line)
            if isinstance(metrics["step"], int) and line.endswith("\n"):
                steps.append(metrics)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return steps


def _line(metrics: dict[str, Any]) -> str:
    return json.dumps(metrics, allow_nan=False) + "\n"
