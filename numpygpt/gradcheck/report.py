"""What a check found, as rows and as a table."""

import dataclasses
import math


class GradientError(AssertionError):
    """A gradient is wrong, or a layer breaks the rules of forward and backward. The message holds the report."""


KINK = "has a kink within the step: take other inputs"


@dataclasses.dataclass(frozen=True)
class Row:
    """One gradient against one oracle: the error that is largest for its bound, where it is, and the values there."""

    name: str  # "input 0", or the name of a parameter
    oracle: str  # "differences", "complex step", or "shape" if that is wrong already
    moved: str  # "all 6 elements", or "3 directions"
    error: float
    bound: float
    where: str  # an index into the array, maybe followed by one into the output; or which direction
    expected: float
    actual: float
    fault: str = ""  # the kind of mistake, if it is one of those that can be told
    tells: bool = True  # whether a gradient of 0 would have been wrong

    @property
    def ok(self) -> bool:
        """Whether the error is within the bound (NaN is not, and a bound that overflows says nothing)."""
        return self.error <= self.bound < math.inf

    def cells(self) -> tuple[str, ...]:
        """Return the row as it stands in the table."""
        numbers = f"{self.error:.1e}", f"{self.bound:.1e}", self.where, f"{self.expected:.6e}", f"{self.actual:.6e}"
        verdict = "ok" if self.tells else "ok (0 would be too)"
        return self.name, self.oracle, self.moved, *numbers, verdict if self.ok else f"WRONG {self.fault}".rstrip()


HEAD = ("gradient of", "against", "moved", "error", "bound", "at", "expected", "actual", "")


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a check; as a string, a table with what else is wrong below it."""

    rows: list[Row]
    faults: list[str]  # rules that are broken
    skipped: str  # why there is no complex step, or ""

    @property
    def ok(self) -> bool:
        """Whether every gradient is right and no rule is broken."""
        return all(row.ok for row in self.rows) and not self.faults

    @property
    def only_kinks(self) -> bool:
        """Whether all that is wrong are kinks, which other inputs may not have."""
        return not self.ok and not self.faults and all(row.ok or row.fault == KINK for row in self.rows)

    def __str__(self) -> str:
        cells = [HEAD, *(row.cells() for row in self.rows)] if self.rows else []
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        lines += [f"WRONG: {fault}" for fault in self.faults]
        if self.skipped:
            lines.append(f"complex step skipped: {self.skipped}")
        return "\n".join(lines) or "nothing was checked: all arrays are empty"
