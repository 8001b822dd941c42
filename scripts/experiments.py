"""Try what is said of the parts of a Transformer: train small models at equal size, and judge by the numbers.

Each study states its claims and what would refute them, trains every kind with several seeds, and writes a table, a
picture and, beside the folder of --out, a page with the verdicts. All of them took forty minutes on two cores.

    python scripts/experiments.py --list                        the studies and their claims
    python scripts/experiments.py activation --corpus tiny      one of them
    python scripts/experiments.py all --quick                   a trial of the programs, which says nothing
    python scripts/experiments.py --redraw --out docs/experiments   page and pictures from the numbers kept there
"""

import argparse
import os
import textwrap
import time
from concurrent.futures import BrokenExecutor
from pathlib import Path

from numpygpt.cli import Parser, add_device, fail, run
from numpygpt.threads import usable_cores
from studies import STUDIES
from studies.page import check_can_draw, claim_in_words, command_of, numbers_in, page_of, write
from studies.setting import SEEDS, Setting
from studies.study import Study, rounded, save

ALL = "all"


def read_flags() -> argparse.Namespace:
    """Return the flags; what they can't mean together ends the program."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"all, or some of {', '.join(STUDIES)}")
    add("--list", action="store_true", help="list the studies with their claims, and what would refute them")
    add("--corpus", default="plays", help='"plays", "tiny", a text file or a folder of *.txt (default: %(default)s)')
    add("--out", type=Path, default=Path("build/experiments"), help="folder of the pictures (default: %(default)s)")
    add("--seeds", type=int, default=SEEDS, help="runs of each kind (default: %(default)s)")
    add("--steps", type=int, help="steps of each run (unless given: what the study has)")
    add("--quick", action="store_true", help="the smallest models and a few steps, to try the programs")
    add("--jobs", type=int, default=usable_cores(), help="runs at a time (default: one for each core, %(default)s)")
    add_device(parser)
    add("--redraw", action="store_true", help="measure nothing: draw and write again from the numbers in --out")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in (ALL, *STUDIES)]:
        fail(f"there is no study {unknown[0]!r}: name some of {', '.join((ALL, *STUDIES))}")
    if args.names and (args.list or args.redraw):
        fail("--list and --redraw take no names: leave them out")
    if not (args.names or args.list or args.redraw):
        fail(f"no study is named: {ALL}, or some of {', '.join(STUDIES)} (--list shows their claims)")
    if args.out.exists() and not args.out.is_dir():
        fail(f"--out {args.out} is no folder: name another")
    return args


def list_studies() -> None:
    """Print every study with its claims and what would refute them."""
    for name, study in STUDIES.items():
        print(f"{name}: {study.title}")
        for claim in study.claims:
            print(wrapped(claim.text, "  - "))
            for criterion in claim.criteria:
                print(wrapped(f"refuted if {criterion.refuted_if}", "      "))


def wrapped(text: str, indent: str) -> str:
    """Return a text in lines of a terminal."""
    return textwrap.fill(text, 110, initial_indent=indent, subsequent_indent=" " * len(indent))


def command(name: str, args: argparse.Namespace) -> str:
    """Return the command that makes a study as these flags do."""
    words = [name, "--corpus", args.corpus, "--seeds", str(args.seeds)]
    words += ["--steps", str(args.steps)] if args.steps else []
    words += ["--quick"] if args.quick else []
    words += ["--device", args.device] if args.device != "cpu" else []
    return command_of(words)


def make(name: str, study: Study, setting: Setting, args: argparse.Namespace) -> None:
    """Measure, keep the numbers, and print what came out."""
    print(f"\n{study.title} ({name})", flush=True)
    start = time.monotonic()
    numbers = rounded({"command": command(name, args), **study.measure(setting)})
    print(f"{numbers['setting']}; {time.monotonic() - start:,.0f} s\n\n{study.table(numbers)}\n")
    for claim in study.claims:
        print(claim_in_words(claim, numbers))
    save(args.out / f"{name}.json", numbers)


def main() -> int:
    """List, redraw or measure; return the exit status."""
    args = read_flags()
    if args.list:
        list_studies()
        return 0
    try:
        check_can_draw()
        if args.redraw:
            kept = numbers_in(args.out)
            if not kept:
                fail(f"--redraw: {args.out} holds no numbers: measure first, or name another folder with --out")
            write(args.out, kept)
            print(f"Saved {page_of(args.out)}")
            return 0
        setting = Setting.of(args.corpus, args.seeds, args.steps, args.quick, args.jobs, args.device)
        os.makedirs(args.out, exist_ok=True)
        numbers_in(args.out)  # that can't be read would be found too late
        for name in STUDIES if ALL in args.names else dict.fromkeys(args.names):
            make(name, STUDIES[name], setting, args)
            write(args.out, [name])
    except (ValueError, OSError, ImportError) as error:
        fail(error)
    except FloatingPointError as error:
        fail(f"{name} diverged: {error}; nothing of it was kept", 1)
    except BrokenExecutor:
        fail(f"a process that trained for {name} was ended from outside (no memory left?): fewer --jobs take less", 1)
    print(f"Saved {page_of(args.out)}")
    return 0


if __name__ == "__main__":
    run(main)
