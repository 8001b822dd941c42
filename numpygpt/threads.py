"""All cores for one step: threads, each with a worker of its own.

NumPy lets go of the interpreter's lock while it computes, so that threads compute at the same time. Split is the batch,
not the single operation, which is too short to be shared: every worker runs the whole model on its sequences, and BLAS,
which would split each product among threads of its own, is held to one.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import threadpoolctl

CGROUP = Path("/sys/fs/cgroup")


def affinity() -> set[int]:
    """Return the cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def usable_cores(cores: set[int] | None = None) -> int:
    """Return how many cores this process may use: by its affinity and its cgroup's quota, not the machine's number.

    Or how many of the given `cores`, in place of its affinity.
    """
    return max(1, min([len(affinity() if cores is None else cores), *_quotas()]))


def _quotas() -> Iterator[int]:
    """Yield the cores that Linux's control groups grant, if they set a limit: version 2, then version 1."""
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((CGROUP / name).read_text() for name in names).split()
            if int(quota) > 0:  # "max" and -1 mean no limit
                yield -(-int(quota) // int(period))


class BrokenOff(RuntimeError):
    """A worker had to give up waiting, since another of its team has failed."""


def first_error(errors: Sequence[BaseException | None]) -> BaseException | None:
    """Return the first that isn't a BrokenOff; one of these if there is no other."""
    return next(iter(sorted(filter(None, errors), key=lambda error: isinstance(error, BrokenOff))), None)


class Threads:
    """A team of workers, each with a thread: the first has the caller's."""

    semaphore = staticmethod(threading.Semaphore)

    def start(self, workers: Sequence[Any]) -> None:
        """Take on the workers."""
        self.workers = workers
        self._pool = ThreadPoolExecutor(len(workers) - 1, "numpygpt") if len(workers) > 1 else None

    def lost(self) -> bool:
        """Whether a thread is gone that others may wait for: a thread ends when its call does."""
        return False

    def call(self, method: str, parts: Sequence[tuple]) -> list[Any]:
        """Return [worker.method(*part)] for the first workers, as many as there are parts, all at once.

        When all have ended, an error is raised here: of several, the first that isn't a BrokenOff.
        """
        calls = [functools.partial(getattr(w, method), *part) for w, part in zip(self.workers, parts, strict=False)]
        with one_blas_thread():
            futures = [self._pool.submit(call) for call in calls[1:]] if self._pool else []
            here: Future[Any] = Future()
            try:
                here.set_result(calls[0]())
            except BaseException as error:
                here.set_exception(error)
            wait(futures)
        if failed := first_error([future.exception() for future in [here, *futures]]):
            raise failed
        return [future.result() for future in [here, *futures]]


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
