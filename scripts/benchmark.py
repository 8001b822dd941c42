"""Time a training step of numpygpt beside PyTorch's and JAX's: one model, the same weights and batches.

Each contender runs alone in a process of its own, with all usable cores, in rounds. The run is void, and the exit
status 1, unless the first three losses of all agree. The bound is the time of the step's matrix products alone.

    python scripts/benchmark.py                     four sizes, one table
    python scripts/benchmark.py --dress gpt2        the same in GPT-2's dress, two sizes
    python scripts/benchmark.py --grow context      a step's time against the context: a table and a plot
    python scripts/benchmark.py --profile M         where the time of our step goes
    python scripts/benchmark.py --decode            writing text, beside transformers
    python scripts/benchmark.py --race tiny         the time to a result, beside nanoGPT's recipe on the same text
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from benchmarks import decoding, growth, profiling, race, report
from benchmarks.load import warnings_of_load
from benchmarks.runner import (
    ChildFailed,
    Plan,
    Timing,
    Void,
    available,
    check_losses,
    installed,
    run_child,
    run_rounds,
    versions,
    weights_of,
)
from benchmarks.sizes import DRESSES, SHAPES, make_size
from benchmarks.timing import BOUND, CONTENDERS, EAGER, OURS
from numpygpt.array import check_positive
from numpygpt.cli import fail, run
from numpygpt.corpus import DataError
from numpygpt.threads import usable_cores

TRAINING = "timing.measure_training"


class Parser(argparse.ArgumentParser):
    """A parser whose every complaint is one line."""

    def error(self, message: str) -> NoReturn:
        """End the program."""
        fail(message)


def read_flags() -> argparse.Namespace:
    """Return the flags, checked."""
    parser = Parser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--sizes", nargs="+", choices=SHAPES, metavar="SIZE", help=f"some of {', '.join(SHAPES)}")
    modes.add_argument("--grow", choices=growth.GROWN, help="grow the context or the width, all else the same")
    modes.add_argument("--profile", choices=SHAPES, metavar="SIZE", help="our step alone, by layer and by kind of work")
    modes.add_argument("--decode", action="store_true", help="write text, token by token")
    modes.add_argument("--race", metavar="CORPUS", help="train to the end on tiny Shakespeare (tiny) or another corpus")
    add = parser.add_argument
    add("--contenders", nargs="+", choices=CONTENDERS, metavar="NAME", help=f"some of {', '.join(CONTENDERS)}")
    add("--dress", choices=DRESSES, default="default", help="what the model wears (default: %(default)s)")
    add("--rounds", type=int, default=5, help="rounds in which each contender runs once (default: %(default)s)")
    add("--seconds", type=float, default=5.0, help="for each contender in each round (default: %(default)s)")
    add("--threads", type=int, default=usable_cores(), help="cores to use (default: all usable, %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every time of every step to this file")
    add("--plot", type=Path, metavar="FILE", help="where --grow draws (default: runs/benchmark_context.png or _width)")
    args = parser.parse_args()
    try:
        check_positive(rounds=args.rounds, threads=args.threads)
    except ValueError as error:
        fail(error)
    if not (args.seconds >= 0 and math.isfinite(args.seconds)):
        fail(f"--seconds must be at least 0, not {args.seconds}")
    if args.threads > usable_cores():
        fail(f"--threads {args.threads} is more than the {usable_cores()} usable cores")
    for flag, useless in (
        ("--contenders", args.contenders and (args.decode or args.profile or args.race)),
        ("--dress", args.dress != "default" and (args.decode or args.race)),
        ("--plot", args.plot and not args.grow),
        ("--json", args.json and (args.profile or args.race)),
    ):
        if useless:
            fail(f"{flag} has no meaning here: leave it out")
    for path in filter(None, (args.json, args.plot)):
        if path.is_dir() or not path.absolute().parent.is_dir():
            fail(f"{path} can't be written: it must be a file in a folder that exists")
    return args


def plan_of(args: argparse.Namespace) -> Plan:
    """Return what the flags say about rounds, cores and seconds."""
    return Plan(args.rounds, args.threads, args.seconds)


def collect(timings: Iterable[Timing], args: argparse.Namespace) -> list[Timing]:
    """Run all rounds; after each contender write down what every step took, if that is asked for."""
    done = []
    for timing in timings:
        done.append(timing)
        if args.json:
            args.json.write_text(json.dumps([dataclasses.asdict(t) for t in done], indent=1), encoding="utf-8")
    return done


def compare(args: argparse.Namespace, contenders: list[str]) -> None:
    """Print the table of training steps."""
    names = args.sizes or (["S", "M"] if args.dress == "gpt2" else list(SHAPES))
    sizes = [make_size(name, *SHAPES[name], dress=args.dress) for name in dict.fromkeys(names)]
    timings = collect(run_rounds(TRAINING, sizes, contenders, plan_of(args), check_losses), args)
    print(report.training_table(sizes, timings))


def grow(args: argparse.Namespace, contenders: list[str]) -> None:
    """Print and draw how a step's time grows."""
    sizes = growth.grown_sizes(args.grow, args.dress)
    timings = collect(run_rounds(TRAINING, sizes, contenders, plan_of(args), check_losses), args)
    print(growth.growth_table(args.grow, timings))
    if not installed("matplotlib"):
        print('no plot is drawn: it needs matplotlib; pip install -e ".[bench]"')
        return
    path = args.plot or Path(f"runs/benchmark_{args.grow}.png")
    growth.plot(args.grow, timings, path)
    print(f"drawn in {path}")


def profile(args: argparse.Namespace) -> None:
    """Print where the time of our step goes."""
    size = make_size(args.profile, *SHAPES[args.profile], dress=args.dress)
    with weights_of(size) as weights:
        arguments = {"size": dataclasses.asdict(size), "weights": str(weights), "seconds": args.seconds}
        print(profiling.tables(run_child("profiling.measure_parts", weights.parent, args.threads, **arguments)))


def decode(args: argparse.Namespace) -> None:
    """Print the table of decoding."""
    contenders = [OURS, decoding.THEIRS, BOUND]
    if not (installed("torch") and installed("transformers")):
        contenders.remove(decoding.THEIRS)
        print('transformers is skipped: it or torch is missing; pip install -e ".[bench]"')
    sizes = decoding.decoding_sizes()
    timings = collect(
        run_rounds("decoding.measure_decoding", sizes, contenders, plan_of(args), decoding.check_texts), args
    )
    print(decoding.decoding_table(sizes, timings))


def compete(args: argparse.Namespace) -> None:
    """Print the table of times to a result."""
    if not installed("torch"):
        fail('--race is against PyTorch, and there is no torch: pip install -e ".[bench]"')
    try:
        finishes = list(race.run_race(args.race, args.threads))
    except DataError as error:
        fail(error)
    print(race.race_table(finishes))


def main() -> int:
    """Read the flags, measure and print."""
    args = read_flags()
    print(f"{args.threads} of {usable_cores()} usable cores", *versions(), *warnings_of_load(), sep="; ", flush=True)
    try:
        if args.profile:
            profile(args)
        elif args.decode:
            decode(args)
        elif args.race:
            compete(args)
        else:
            default = [OURS, EAGER, BOUND] if args.grow else list(CONTENDERS)
            contenders = available(dict.fromkeys(args.contenders or default), print)
            if EAGER not in contenders:
                print("without eager PyTorch there are no ratios, times only")
            (grow if args.grow else compare)(args, contenders)
    except (Void, ChildFailed) as error:
        fail(error, 1)
    except OSError as error:  # a file that can't be written
        fail(error)
    return 0


if __name__ == "__main__":
    run(main)
