"""The table, in Markdown."""

import dataclasses
from collections.abc import Sequence

from benchmarks.report import table

HEAD = ["", "outputs or losses", "gradients of inputs", "of parameters", "ms a step", "verdict"]


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    differences: tuple[str, ...] = ("", "", "")  # of outputs or losses, of gradients of inputs and of parameters
    ms: str = ""
    fault: str = ""  # what is wrong
    remark: str = "ok"  # if nothing is

    @property
    def verdict(self) -> str:
        """The last cell."""
        return f"WRONG: {self.fault}" if self.fault else self.remark


def report(rows: Sequence[Row]) -> str:
    """Return the table."""
    return table(HEAD, [[row.name, *row.differences, row.ms, row.verdict.replace("|", "/")] for row in rows])
