"""All cores for one step, once more: processes, each with a worker of its own, that share the large arrays.

A forked process begins as a copy of this one. Arrays in shared memory stay one and the same in all; what else a process
changes is its own. Threads share more than they need, and lose time by it: the interpreter's lock, which one at a time
holds between two operations, and the table of memory pages, which every large array that comes or goes changes for all.
"""

import contextlib
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import warnings
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from numpygpt.array import Array
from numpygpt.threads import first_error, one_blas_thread


def pay() -> bool:
    """Whether processes are to be had, and better than threads: on Linux, with an interpreter that has a lock.

    (Elsewhere systems have no fork, or libraries that don't survive one.)
    """
    return sys.platform == "linux" and getattr(sys, "_is_gil_enabled", lambda: True)()


def shared(array: Array) -> Array:
    """Return a copy in memory that a fork shares with the processes forked from here on."""
    copy = np.frombuffer(mmap.mmap(-1, max(array.nbytes, 1)), array.dtype, array.size).reshape(array.shape)
    copy[...] = array
    return copy


class WorkerLost(RuntimeError):
    """A process ended that should not have, or the team was left in the middle of a call."""


class Forks:
    """A team of workers, each with a process: the first has the caller's.

    A worker in another process is the copy that the fork made: it gets and gives what can be pickled, and what
    happens to it isn't seen here, but for what lies in shared memory.
    """

    semaphore = staticmethod(multiprocessing.get_context("fork").Semaphore)

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        self._end = weakref.finalize(self, _end, self._owner, self._connections, self._pids)

    def start(self, workers: Sequence[Any]) -> None:
        """Fork a process for each worker but the first."""
        self.first = workers[0]
        for worker in workers[1:]:
            here, there = multiprocessing.Pipe()
            with warnings.catch_warnings():
                # Python warns of forks beside threads, whose locks stay locked in the new process. It takes none of
                # theirs: it reads a pipe and computes, with NumPy, whose BLAS ends its own threads before a fork.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                _serve(worker, there)
            there.close()
            self._connections.append(here)
            self._pids.append(pid)

    def lost(self) -> bool:
        """Whether a process is gone that others may wait for: in the first, one of the others, and in these the first.

        If another of the others is gone, the first finds it out, and ends them all.
        """
        if os.getpid() != self._owner:
            return os.getppid() != self._owner
        return any(map(_ended, self._pids))

    def call(self, method: str, parts: Sequence[tuple]) -> list[Any]:
        """Return [worker.method(*part)] for the first workers, as many as there are parts, all at once.

        When all have ended, an error is raised here: of several, the first that isn't a BrokenOff. WorkerLost if a
        process is gone, or if an earlier call was given up (by a second Ctrl-C, say) before all had ended.
        """
        others, results, errors = self._connections[: len(parts) - 1], [], []
        if len(others) < len(parts) - 1:
            raise WorkerLost("the other processes are gone; make a new trainer")
        try:
            for connection, part in zip(others, parts[1:], strict=True):
                connection.send((method, part))
            with one_blas_thread():
                result, error = _try(self.first, method, parts[0])
            results.append(result)
            errors.append(error)
            for connection in others:
                result, error = connection.recv()
                results.append(result)
                errors.append(error)
        except BaseException as error:  # an answer is still to come: it would be taken for the next call's
            self._end()
            self._connections.clear()
            if isinstance(error, EOFError | ConnectionError):
                raise WorkerLost(
                    "a process that worked on the batch was ended from outside (no memory left?)"
                ) from error
            raise
        if failed := first_error(errors):
            raise failed
        return results


def _try(worker: Any, method: str, part: tuple) -> tuple[Any, BaseException | None]:
    """Return what the call returns, or what it raises."""
    try:
        return getattr(worker, method)(*part), None
    except BaseException as error:
        return None, error


def _serve(worker: Any, connection: Connection) -> None:
    """Do what comes through the connection until it ends; then end the process."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # the first process decides, and the connection ends with it
            signal.signal(number, signal.SIG_IGN)
        # Whatever else this process has open, it holds without need: files, their locks, the others' connections.
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        with one_blas_thread(), contextlib.suppress(EOFError, ConnectionError):
            while True:
                method, part = connection.recv()
                result, error = _try(worker, method, part)
                connection.send((result, error and portable(error)))
    finally:
        os._exit(0)  # nothing that the first process has set up for its own end


def portable(error: BaseException) -> BaseException:
    """Return an error that another process can be sent, with a note on where it comes from."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        portable: BaseException = RuntimeError(f"{type(error).__name__}: {error}")
    else:
        portable = error
    portable.add_note("".join(traceback.format_exception(error)))
    return portable


def _ended(pid: int) -> bool:
    """Whether a process that this one has started has ended."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # somebody has asked before
        return True


def _end(owner: int, connections: list[Connection], pids: list[int]) -> None:
    """End the processes, if this is the one that started them."""
    if os.getpid() != owner:
        return
    for connection in connections:
        connection.close()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
