"""What all scripts share: a user's mistake is one line on the error stream and an exit status, never a traceback."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from numpygpt.device import DEVICES


def fail(message: object, status: int = 2) -> NoReturn:
    """End the program with a line on the error stream."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)


class Parser(argparse.ArgumentParser):
    """A parser of flags, none of them abbreviated, that says in one line what it can't read."""

    source = ""  # what else than the command line it reads, named in messages

    def __init__(self, **options: Any):
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """End the program."""
        fail(f"{self.source}{message} (--help shows all flags)")


def add_limits(parser: Parser, temperature: float) -> None:
    """Add the flags for what is drawn among, which are arguments of sample.next_token_distribution, and the seed."""
    add = parser.add_argument
    add(
        "--temperature",
        type=float,
        default=temperature,
        help=f"0 always takes the most probable token (default: {temperature})",
    )
    add("--top-k", type=int, help="draw among so many most probable tokens only")
    add("--top-p", type=float, help="draw among the most probable tokens that reach this probability together")
    add("--min-p", type=float, help="draw among tokens at least so probable, relative to the most probable one")
    add("--seed", type=int, help="the same seed gives the same text")


def add_device(parser: Any) -> None:
    """Add the flag for where a model runs, to a parser or to a group of its flags."""
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default=DEVICES[0],
        help='where the model runs; "cuda" is an NVIDIA GPU, by CuPy (default: %(default)s)',
    )


def run(main: Callable[[], int]) -> NoReturn:
    """Run a script and exit with the status it returns.

    Ctrl-C ends it with 130. A reader that has gone (`| head`) ends it quietly with 141, as it ends other programs.
    A character that the output can't show is shown as "?".
    """
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to flush goes nowhere
        sys.exit(141)
    sys.exit(status)
