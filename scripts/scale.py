"""What many ranks would cost: the constants of docs/scaling.md measured on a few, and its tables computed.

    mpiexec -n 2 python scripts/scale.py                measure on two ranks, then compute
    python scripts/scale.py                             only compute

A rank is a process with one thread. The first table compares a step of one rank with that of all, at the same batch.
"""

import argparse

import numpy as np

from benchmarks.report import table
from benchmarks.sizes import SHAPES, make_size
from numpygpt.array import check_positive
from numpygpt.cli import Parser, fail, run
from numpygpt.ranks import Ranks, join
from scaling import measure, model
from scaling.model import Network

RANKS = (8, 64, 512)
BANDWIDTHS = {"10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9, "400 Gbit/s": 50e9}
LATENCY = 1e-5  # seconds of a message on a network, an order of magnitude, as are these speeds
CASES = {"a core of a CPU": (1e11, 256), "a GPU, products in float16": (4e14, 16_384)}  # FLOP/s, tokens in a step
FLOPS_PER_WEIGHT = 6  # for each token: a product and a sum, forward once and backward twice


def parse() -> argparse.Namespace:
    """Read the flags."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="SIZE", help="some of S, M, L, G")
    add("--repeats", type=int, default=5, help="steps to time (default: 5)")
    return parser.parse_args()


def measured(ranks: Ranks, sizes: list[str], repeats: int) -> str:
    """Return what was measured on these ranks."""
    found = measure.network(ranks)
    head = [
        "size",
        "one rank, ms",
        "a share alone",
        "all-reduce",
        "their sum",
        "all ranks",
        "one / all",
        "losses differ",
    ]
    rows = []
    for name in sizes:
        steps = measure.steps(ranks, make_size(name, *SHAPES[name]), repeats)
        times = [steps.whole, steps.share, steps.all_reduce, steps.share + steps.all_reduce, steps.together]
        speedup = f"{steps.whole / steps.together:.2f}"
        rows.append([name, *(f"{1e3 * t:,.1f}" for t in times), speedup, f"{steps.difference:.0e}"])
    constants = f"latency {1e6 * found.latency:.1f} µs, bandwidth {found.bandwidth / 1e9:.2f} GB/s"
    return f"{ranks.size} ranks, NumPy {np.__version__}: {constants} in an all-reduce\n\n{table(head, rows)}\n"


def memory(sizes: list[str]) -> str:
    """Return the memory of a rank, by equations (1) and (2)."""
    head = ["size", "parameters", "state, MB", "a token, kB", "tokens", "a rank, MB"]
    rows = []
    for size in (make_size(name, *SHAPES[name]) for name in sizes):
        count, values = model.parameters(size.config), model.activation_values(size.config)
        state, token = model.state_bytes(count), model.VALUE * values
        total = state + size.tokens * token
        rows.append(
            [
                size.name,
                f"{count:,}",
                f"{state / 1e6:,.0f}",
                f"{token / 1e3:,.0f}",
                str(size.tokens),
                f"{total / 1e6:,.0f}",
            ]
        )
    return table(head, rows)


def efficiencies(name: str, flops: float, tokens: int) -> str:
    """Return the efficiency of many ranks, each with a machine of this speed, by equations (4) and (5)."""
    size = make_size("G", *SHAPES["G"])
    count = model.parameters(size.config)
    alone = FLOPS_PER_WEIGHT * count * tokens / flops
    rows = []
    for network, bandwidth in BANDWIDTHS.items():
        times = [Network(LATENCY, bandwidth).all_reduce(count, ranks) for ranks in RANKS]
        rows.append(
            [network, *(f"{1e3 * t:,.0f}" for t in times), *(f"{model.efficiency(alone, t):.3f}" for t in times)]
        )
    head = ["network", *(f"all-reduce at {r}, ms" for r in RANKS), *(f"efficiency at {r}" for r in RANKS)]
    said = f"{name}, {flops:.0e} FLOP/s, {tokens:,} tokens a rank: alone, a step of G takes {1e3 * alone:,.0f} ms"
    return f"{said}\n\n{table(head, rows)}\n"


def main() -> int:
    """Measure if there are ranks, and compute; return the exit status."""
    args = parse()
    try:
        check_positive(repeats=args.repeats)
        ranks = join()
    except (ValueError, ImportError) as error:
        fail(error)
    with ranks.ending_together():
        if ranks.size > 1:
            print(measured(ranks, args.sizes, args.repeats))
        print(memory(args.sizes), end="\n\n")
        print("\n".join(efficiencies(name, *case) for name, case in CASES.items()), end="")
    return 0


if __name__ == "__main__":
    run(main)
