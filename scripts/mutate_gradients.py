"""Change every backward, one small mistake at a time, and see that the tests notice each.

Each mistake, such as a dropped term, a flipped sign, two letters of an einsum swapped or a line skipped, is made on its
own (see the package mutation beside this file), and the tests of its module are run. One that they don't notice is
reported: `file:line kind: old line -> new line`. A change that makes no difference is no mistake; each one stands in
tests/equivalent_mutants.toml with the reason, and isn't run.

    python scripts/mutate_gradients.py                  every backward, the optimiser and what threads share
    python scripts/mutate_gradients.py --forward        every forward
    python scripts/mutate_gradients.py --only norm      of one module
"""

import collections
import itertools
import os
from collections.abc import Collection

from mutation.equivalent import EQUIVALENT, read_reasons, stale
from mutation.mutants import Key, Mutant, make_mutants
from mutation.runner import fates_of
from mutation.scope import BACKWARD, FORWARD, MODULES
from numpygpt.cli import Parser, fail, run


def main() -> int:
    """Read the flags, make the mutants and test them; return 1 if one survives."""
    parser = Parser(
        description="Change every backward by one small mistake at a time, and see that the tests notice each."
    )
    add = parser.add_argument
    add("--forward", action="store_true", help="change every forward instead")
    add("--only", nargs="+", default=list(MODULES), metavar="MODULE", help=f"some of: {', '.join(MODULES)}")
    add("--list", action="store_true", help="print the mutants and test none")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="mutants tested at a time (default: %(default)s)")
    args = parser.parse_args()
    if unknown := [name for name in args.only if name not in MODULES]:
        fail(f"there is no module {unknown[0]!r} to change; choose from {', '.join(MODULES)}")
    if args.jobs < 1:
        fail(f"--jobs must be at least 1, not {args.jobs}")
    try:
        reasons = read_reasons(EQUIVALENT)
    except (ValueError, SyntaxError) as error:
        fail(f"{EQUIVALENT.name}: {error}")
    scope = FORWARD if args.forward else BACKWARD
    mutants = make_mutants(dict.fromkeys(args.only), scope)
    if not mutants:
        fail(f"no function to change in {', '.join(args.only)}")
    if old := stale(reasons, mutants, scope):
        fail(f"{EQUIVALENT.name}: an entry is no mutant any more: {old[0]}")
    every = list(itertools.chain(*mutants.values()))
    if args.list:
        for mutant in every:
            print(f"{mutant}  (equivalent: {reasons[mutant.key]})" if mutant.key in reasons else mutant)
        return 0
    if not hasattr(os, "fork"):
        fail("this platform can't fork a process; run it on Linux or macOS, or use --list")
    try:
        fates = fates_of([m for m in every if m.key not in reasons], args.jobs)
    except ValueError as error:
        fail(error)
    report(mutants, reasons, fates)
    return 1 if any(fate == "survived" for _, fate in fates) else 0


def report(mutants: dict[str, list[Mutant]], reasons: Collection[Key], fates: list[tuple[Mutant, str]]) -> None:
    """Print how many mutants of each module, and of all, had which fate, and then the survivors."""
    counts = {name: collections.Counter("equivalent" for m in ms if m.key in reasons) for name, ms in mutants.items()}
    for mutant, fate in fates:
        counts[mutant.module][fate] += 1
    total = sum(counts.values(), collections.Counter[str]())
    print(f"{'':14} {'made':>6} {'killed':>7} {'survived':>9} {'equivalent':>11}")
    for name, n in (*counts.items(), ("all", total)):
        print(f"{name:14} {n.total():6} {n['killed'] + n['hung']:7} {n['survived']:9} {n['equivalent']:11}")
    if total["hung"]:
        print(f"of those killed, {total['hung']} by the time limit")
    for mutant in sorted((m for m, fate in fates if fate == "survived"), key=lambda m: (m.module, m.line)):
        print(mutant)


if __name__ == "__main__":
    run(main)
