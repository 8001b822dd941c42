"""Ranks that are threads of one process: what a trainer asks of its ranks, without MPI."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from numpygpt.ranks import Ranks

PATIENCE = 20  # seconds until ranks that wait for one that doesn't come give up


class ThreadRanks(Ranks):
    """One of several threads that run the same code."""

    def __init__(self, rank, barrier, slots):
        self.rank, self.size, self._barrier, self._slots = rank, len(slots), barrier, slots

    def gather(self, item):
        self._slots[self.rank] = item
        self._barrier.wait(PATIENCE)
        items = list(self._slots)
        self._barrier.wait(PATIENCE)  # nobody writes before all have read
        return items

    def share(self, item):
        return self.gather(item)[0]

    def add(self, vectors):
        sums = [functools.reduce(np.add, of_ranks) for of_ranks in zip(*self.gather(vectors), strict=True)]
        self._barrier.wait(PATIENCE)
        for vector, total in zip(vectors, sums, strict=True):
            vector[...] = total

    def cores(self):
        return 1


def on_ranks(size, function):
    """Return what function(ranks) returns on each of so many ranks; an error of the first that has one is raised."""
    barrier, slots = threading.Barrier(size), [None] * size
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(function, ThreadRanks(rank, barrier, slots)) for rank in range(size)]
        return [future.result() for future in futures]
