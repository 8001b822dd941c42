"""Check numpygpt on this machine's GPU: every layer beside the CPU, and training beside the CPU and PyTorch.

Prints one table. The exit status is 1 if anything is wrong, and 2 if there is no GPU or no CuPy. It takes some minutes,
most of them for training on the CPU.
"""

import argparse
import itertools

from benchmarks.sizes import SHAPES, make_size
from device_check import compare, training
from device_check.machine import describe, find_gpu
from device_check.report import report
from numpygpt.array import check_not_negative
from numpygpt.cli import Parser, fail, run
from numpygpt.progress import progress_bar


def read_flags() -> argparse.Namespace:
    """Return the flags, checked."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", choices=SHAPES, default="M", help="of the model that is trained (default: %(default)s)")
    add("--steps", type=int, default=200, help="of training; 0 leaves it out (default: %(default)s)")
    add("--without-pytorch", action="store_true", help="train with numpygpt alone")
    args = parser.parse_args()
    try:
        check_not_negative(steps=args.steps)
    except ValueError as error:
        fail(error)
    return args


def main() -> int:
    """Read the flags, check and print; return the exit status."""
    args = read_flags()
    try:
        move = find_gpu()
    except (ImportError, ValueError) as error:
        fail(error)
    print(describe(), flush=True)
    size = make_size(args.size, *SHAPES[args.size])
    names = (
        [name for name in training.TRAININGS if not (args.without_pytorch and "PyTorch" in name)] if args.steps else []
    )
    checks, rows = compare.comparisons(size, move), []
    with progress_bar(len(checks) + len(names), unit="row") as bar:
        for row in itertools.chain((check() for check in checks), training.trainings(size, args.steps, names)):
            rows.append(row)
            bar.update()
    print(report(rows), compare.NOTES, training.NOTES, sep="\n")
    return 1 if any(row.fault for row in rows) else 0


if __name__ == "__main__":
    run(main)
