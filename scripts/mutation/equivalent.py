"""The list of mutants that make no difference, each with the reason why."""

import tomllib
from collections.abc import Collection
from pathlib import Path

from mutation.mutants import Key, Mutant, header, parse
from mutation.scope import ROOT

EQUIVALENT = ROOT / "tests" / "equivalent_mutants.toml"


def normal(line: str) -> str:
    """Return a line as a mutant shows it, whatever its quotes and spaces."""
    return header(parse(f"{line} pass" if line.endswith(":") else line))


def read_reasons(path: Path) -> dict[Key, str]:
    """Return the reasons in a list, by mutant; ValueError for an entry without one, and for one that stands twice."""
    reasons: dict[Key, str] = {}
    for entry in tomllib.loads(path.read_text("utf-8")).get("mutant", []):
        if missing := {"module", "function", "old", "new", "reason"} - entry.keys():
            raise ValueError(f"an entry has no {min(missing)!r}: {entry}")
        key = Key(entry["module"], entry["function"], normal(entry["old"]), normal(entry["new"]))
        if key in reasons:
            raise ValueError(f"an entry stands twice: {key}")
        if not entry["reason"].strip():
            raise ValueError(f"an entry has no reason: {key}")
        reasons[key] = entry["reason"]
    return reasons


def stale(reasons: Collection[Key], mutants: dict[str, list[Mutant]], scope: dict[str, set[str]]) -> list[Key]:
    """Return the entries for these modules and this scope that are no mutant any more."""
    made = {mutant.key for of_module in mutants.values() for mutant in of_module}
    return [
        key
        for key in reasons
        if key.module in mutants and key.function.split(".")[-1] in scope[key.module] and key not in made
    ]
