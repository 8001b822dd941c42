r"""Data parallel: processes, on one machine or many, that train one model together, each on its share of every batch.

The loss of a batch is a mean over its $N$ tokens. Rank $r$ of $R$ has $N_r$ of them, of the mean loss $L_r$, so

$$L = \sum_r \frac{N_r}{N}\, L_r, \qquad \bar p = \sum_r \frac{N_r}{N}\, \frac{\partial L_r}{\partial p} \tag{1}$$

Every rank has the whole model. It computes its own term of both sums; one all-reduce, a sum that all ranks get, of the
flat vector of gradients makes them the gradient of the whole batch. All have the same sum, to the last bit, so the
optimiser makes the same step on each, and weights need never be sent again.

**What keeps ranks together.** A collective call waits for all ranks. One that has failed alone would leave the others
waiting for ever, so what can be expected to fail on one is called by `together`, which tells all ranks of it. No
collective call may lie inside: one that has failed would miss it, and meet the others in another. What fails elsewhere
ends the others, too (`ending_together`), and the launcher ends all if a process dies.

Ranks are started by MPI's launcher, `mpiexec -n 4 python scripts/train_shakespeare.py`, and talk through mpi4py. Arrays
on GPUs are summed by NVIDIA's NCCL, through CuPy; each rank needs a GPU of its own.
"""

import contextlib
import importlib
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from numpygpt.array import Array
from numpygpt.device import cupy_with_gpu
from numpygpt.extras import need
from numpygpt.forks import portable
from numpygpt.threads import affinity, usable_cores

LAUNCHED = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")  # by MPICH and its kin, Open MPI, Slurm
PATIENCE = 3.0  # seconds that a failing rank waits for the others to fail by themselves


class RanksDiffer(ValueError):
    """What must be the same on all ranks isn't."""


class Ranks:
    """A process alone: rank 0 of 1. What several do together, it does for itself."""

    rank, size = 0, 1

    def gather(self, item: Any) -> list[Any]:
        """Return what each rank gives, in their order, on all of them. It must be possible to pickle."""
        return [item]

    def share(self, item: Any) -> Any:
        """Return what rank 0 gives. It must be possible to pickle."""
        return item

    def add(self, vectors: Sequence[Array]) -> None:
        """Make each vector the sum of all ranks' vectors, in place, to the same bits on all."""

    def cores(self) -> int:
        """Return how many cores this rank may use: its part of its machine's."""
        return usable_cores()

    def take_gpu(self) -> None:
        """Make a GPU of this machine this rank's own."""

    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """Let rank 0 alone print, and end all ranks if something fails on this one."""
        yield

    def rows(self, count: int) -> slice:
        """Return this rank's share of so many rows: shares differ by one row at most."""
        least, more = divmod(count, self.size)
        start = self.rank * least + min(self.rank, more)
        return slice(start, start + least + (self.rank < more))

    def together(self, function: Callable[[], Any]) -> list[Any]:
        """Return what the function returns on each rank, in their order. What it raises on one is raised on all.

        It must not wait for other ranks itself.
        """
        result, error = attempt(function)
        answers = self.gather((result, error and portable(error)))
        for failed in (error, *(error for _, error in answers)):
            if failed is not None:
                raise failed
        return [result for result, _ in answers]

    def from_first(self, function: Callable[[], Any]) -> Any:
        """Have rank 0 alone call the function; return what it returned there on all ranks, or raise what it raised."""
        result, error = attempt(function) if self.rank == 0 else (None, None)
        shared, failed = self.share((result, error and portable(error)))
        if failed is not None:
            raise error or failed
        return result if self.rank == 0 else shared

    def check_alike(self, what: dict[str, Any]) -> None:
        """Raise RanksDiffer, on all ranks, unless all give the same values."""
        everywhere = self.gather(what)
        for rank, other in enumerate(everywhere):
            for name in sorted(everywhere[0].keys() | other.keys()):
                first, here = everywhere[0].get(name), other.get(name)
                if repr(first) != repr(here):  # NaN isn't equal to itself
                    raise RanksDiffer(f"{name} is {first!r} on rank 0, but {here!r} on rank {rank}")


class MPIRanks(Ranks):
    """The processes of an MPI communicator."""

    def __init__(self, comm: Any):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self._mpi = importlib.import_module("mpi4py.MPI")
        self._farewell = comm.Dup()  # its calls meet no other ones
        self._nccl: Any = None

    def gather(self, item: Any) -> list[Any]:
        """Return what each rank gives, in their order, on all of them. It must be possible to pickle."""
        return self.comm.allgather(item)

    def share(self, item: Any) -> Any:
        """Return what rank 0 gives. It must be possible to pickle."""
        return self.comm.bcast(item)

    def add(self, vectors: Sequence[Array]) -> None:
        """Make each vector the sum of all ranks' vectors, in place, to the same bits on all."""
        for vector in vectors:
            if isinstance(vector, np.ndarray):
                self.comm.Allreduce(self._mpi.IN_PLACE, vector)  # (1), of gradients
            else:
                self._nccl.all_reduce(vector, vector)

    def cores(self) -> int:
        """Return how many cores this rank may use: its part of its machine's."""
        machine = self._machine()
        return max(1, usable_cores(set().union(*machine.allgather(affinity()))) // machine.size)

    def take_gpu(self) -> None:
        """Make a GPU of this machine this rank's own. ValueError, on all ranks, if one can't have it or lacks NCCL."""
        machine = self._machine()

        def take() -> None:
            cuda = cupy_with_gpu().cuda
            if machine.size > (count := cuda.runtime.getDeviceCount()):  # NCCL wants a GPU for each
                raise ValueError(f"{machine.size} ranks on a machine with {count} GPUs: start one for each GPU")
            if not importlib.import_module("cupy.cuda.nccl").available:
                raise ValueError("several GPUs need NCCL: pip install nvidia-nccl-cu12, or -cu13")
            cuda.Device(machine.rank).use()

        self.together(take)
        distributed = importlib.import_module("cupyx.distributed")
        self._nccl = distributed.init_process_group(self.size, self.rank, use_mpi=True)

    def _machine(self) -> Any:
        return self.comm.Split_type(self._mpi.COMM_TYPE_SHARED)

    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """Let rank 0 alone print, and end all ranks if something fails on this one.

        An exit status other than 0 is expected of all ranks at once. Otherwise MPI ends the others, and what this one
        had to say is shown.
        """
        with contextlib.ExitStack() as stack:
            said = io.StringIO()
            if self.rank:
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
                stack.enter_context(contextlib.redirect_stderr(said))
            try:
                yield
            except SystemExit as error:
                if error.code and not self._all_end():
                    self._end_all(said.getvalue(), error.code)
                raise
            except KeyboardInterrupt:
                self._end_all("interrupted\n", 130)
            except BaseException:
                self._end_all(traceback.format_exc(), 1)

    def _all_end(self) -> bool:
        """Whether all other ranks come here as well, in a moment."""
        request, deadline = self._farewell.Ibarrier(), time.monotonic() + PATIENCE
        while not request.Test():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _end_all(self, message: str, status: Any) -> None:
        if message:  # rank 0 has said it already
            print(f"rank {self.rank}: {message}", end="", file=sys.__stderr__, flush=True)
        self.comm.Abort(status if isinstance(status, int) else 1)


def attempt(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return what the function returns, or what it raises."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def join() -> Ranks:
    """Return the ranks that this process was started with, by MPI's launcher or alone.

    ImportError if mpi4py is missing; ValueError if it is there, but doesn't see the ranks that the launcher started.
    """
    launched = next((int(os.environ[name]) for name in LAUNCHED if os.environ.get(name, "").isdigit()), 1)
    if launched == 1:
        return Ranks()
    comm = need("mpi4py.MPI", "mpi").COMM_WORLD
    if comm.size != launched:
        raise ValueError(
            f"the launcher started {launched} processes, but mpi4py sees {comm.size}: it found the library of another "
            "MPI than the launcher's (pip install mpich brings a launcher with its library)"
        )
    return MPIRanks(comm)
