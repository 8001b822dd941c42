"""The constants of the model, measured on the ranks that run this."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from benchmarks.ours import make_trainer
from benchmarks.sizes import SEED, Size, batches
from numpygpt.model import TransformerLM
from numpygpt.ranks import Ranks
from numpygpt.threads import one_blas_thread
from scaling.model import Network, parameters, ring_bytes

SMALL, LARGE = 16, 16_000_000  # values of the messages that latency and bandwidth are measured with


def median_seconds(ranks: Ranks, function: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call that all ranks begin at once, of which the first isn't counted."""
    times = []
    for _ in range(repeats + 1):
        ranks.gather(None)
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return max(ranks.gather(statistics.median(times[1:])))


def network(ranks: Ranks) -> Network:
    """Return latency and bandwidth of all-reduces of a small and of a large vector, by equation (4)."""
    small, large = (np.ones(size, np.float32) for size in (SMALL, LARGE))
    latency = median_seconds(ranks, lambda: ranks.add([small]), 100) / (2 * (ranks.size - 1))
    seconds = median_seconds(ranks, lambda: ranks.add([large]), 9)
    return Network(latency, ring_bytes(LARGE, ranks.size) / (seconds - 2 * (ranks.size - 1) * latency))


class Steps(NamedTuple):
    """Seconds of a step: of the whole batch on one rank, of a share of it on one, of all ranks; and of an all-reduce.

    `difference` is the largest one of a loss between one rank and all, relative to the loss.
    """

    whole: float
    share: float
    together: float
    all_reduce: float
    difference: float


def steps(ranks: Ranks, size: Size, repeats: int) -> Steps:
    """Time so many steps of one size, made in each of the three ways."""
    own = ranks.rows(size.batch_size)
    whole, losses = ranks.from_first(lambda: timed(Ranks(), Ranks(), size, slice(None), repeats))
    share, _ = timed(ranks, Ranks(), size, own, repeats)  # all at once: they share the machine's memory
    together, same = timed(ranks, ranks, size, own, repeats)
    gradient = np.ones(parameters(size.config), np.float32)
    all_reduce = median_seconds(ranks, lambda: ranks.add([gradient]), repeats)
    difference = max(abs(a - b) / abs(a) for a, b in zip(losses, same, strict=True))
    return Steps(whole, share, together, all_reduce, difference)


def timed(beginning: Ranks, its_ranks: Ranks, size: Size, rows: slice, repeats: int) -> tuple[float, list[float]]:
    """Return the seconds of a step with these rows of each batch, and the losses of all steps.

    All `beginning` ranks make theirs at once, and those that a trainer has as its ranks share each.
    """
    trainer = make_trainer(size, TransformerLM(size.config, rng=SEED).state_dict(), 1, ranks=its_ranks)
    data, losses = batches(size), []

    def step() -> None:
        inputs, targets = next(data)
        losses.append(trainer.update(inputs[rows], targets[rows])["loss"])

    with one_blas_thread():
        return median_seconds(beginning, step, repeats), losses
