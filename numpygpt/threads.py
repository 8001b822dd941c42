"""All cores for one step: Python threads that each work on a part of it.

NumPy lets go of the interpreter's lock while it computes, so that threads compute at the same time. Split is the batch,
not the single operation, which is too short to be shared: every thread runs the whole model on its sequences, and BLAS,
which would split each product among threads of its own, is held to one.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import threadpoolctl

CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return how many cores this process may use: by its affinity and its cgroup's quota, not the machine's number."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *_quotas()]))


def _quotas() -> Iterator[int]:
    """Yield the cores that Linux's control groups grant, if they set a limit: version 2, then version 1."""
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((CGROUP / name).read_text() for name in names).split()
            if int(quota) > 0:  # "max" and -1 mean no limit
                yield -(-int(quota) // int(period))


class BrokenOff(RuntimeError):
    """A thread had to give up waiting, since another of its team has failed."""


class Team:
    """Threads that run a function on several things at once: the caller's, and `size` - 1 more."""

    def __init__(self, size: int):
        self.size = size
        self._pool = ThreadPoolExecutor(size - 1, "numpygpt") if size > 1 else None

    def map(self, function: Callable[..., Any], *arguments: Iterable[Any]) -> list[Any]:
        """Return [function(a, b, ...) for a, b, ... in zip(*arguments)], at most `size` of them, each in a thread.

        When all have ended, an error is raised here: of several, the first that isn't a BrokenOff.
        """
        calls = [functools.partial(function, *args) for args in zip(*arguments, strict=True)]
        with one_blas_thread():
            futures = [self._pool.submit(call) for call in calls[1:]] if self._pool else []
            here: Future[Any] = Future()
            try:
                here.set_result(calls[0]())
            except BaseException as error:
                here.set_exception(error)
            wait(futures)
        errors = [future.exception() for future in [here, *futures]]
        for first in sorted(filter(None, errors), key=lambda error: isinstance(error, BrokenOff)):
            raise first
        return [future.result() for future in [here, *futures]]

    def share(self, function: Callable[[Any], Any], items: list[Any]) -> list[Any]:
        """Return [function(item) for item in items], the items dealt out to the threads."""

        def deal(first: int) -> list[Any]:
            return [function(item) for item in items[first :: self.size]]

        hands = self.map(deal, range(self.size))
        return [hands[i % self.size][i // self.size] for i in range(len(items))]


_lock = threading.Lock()
_users = 0  # blocks of one_blas_thread that are being run, in all threads
_limit: Any = None


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Hold BLAS to one thread for each call, in the whole process, until the last of such blocks ends."""
    global _users, _limit
    with _lock:
        if _users == 0:
            _take_control()
            _limit = _controller().limit(limits=1, user_api="blas")
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _take_control()
                _limit.restore_original_limits()


def _take_control() -> None:
    """Let this thread change BLAS's limit: threadpoolctl (from 3.8) lets only the one that did so first."""
    for library in _controller().lib_controllers:
        if hasattr(library, "clear_controlling_thread"):
            library.clear_controlling_thread(force=True)


@functools.cache
def _controller() -> threadpoolctl.ThreadpoolController:
    return threadpoolctl.ThreadpoolController()
