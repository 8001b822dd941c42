"""NCCL's part, played by MPI: sums of strict arrays."""

import numpy as np
from strict_array import StrictArray


class Backend:
    """What init_process_group returns."""

    def __init__(self, comm):
        self.comm = comm

    def all_reduce(self, in_array, out_array, op="sum"):
        """Put the sum of all ranks' arrays into the second one."""
        assert type(in_array) is type(out_array) is StrictArray and op == "sum"
        total = np.empty_like(in_array._a)
        self.comm.Allreduce(in_array._a, total)
        out_array._a[...] = total


def init_process_group(n_devices, rank, *, backend="nccl", host=None, port=None, use_mpi=False):
    """Return a communicator, as cupyx/distributed/_init.py does."""
    from mpi4py import MPI

    assert use_mpi and (n_devices, rank) == (MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank)
    return Backend(MPI.COMM_WORLD)
