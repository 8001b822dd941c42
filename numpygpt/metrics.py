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
        kept = [line for line in whole_lines(path) if json.loads(line)["step"] <= step]
        durable.write_file(path, "".join(kept))
        self.file = path.open("a", encoding="utf-8", newline="\n")

    def append(self, metrics: dict[str, Any]) -> None:
        """Write one step's line: `step`, and other numbers by name."""
        self.file.write(json.dumps(metrics, allow_nan=False) + "\n")
        self.file.flush()

    def sync(self) -> None:
        """Return once every line is on the disk."""
        os.fsync(self.file.fileno())


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a log that are JSON objects with a step."""
    if not path.is_file():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            if isinstance(json.loads(line)["step"], int) and line.endswith("\n"):
                lines.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    return lines
