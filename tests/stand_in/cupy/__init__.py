"""A stand-in for CuPy, found by `import cupy` if this folder and tests/ are in PYTHONPATH: its arrays are strict ones.

It has what is called by CuPy's own name; all else goes through NumPy's protocols. STAND_IN_GPUS=0 is a machine without
a GPU: there CuPy 14 is imported as ever, and whatever it is asked for first fails in this way.
"""

import os
import sys
import types
from types import SimpleNamespace

from strict_array import StrictArray as ndarray
from strict_array import to_device


class CUDARuntimeError(RuntimeError):
    """What CUDA refuses."""


class Device:
    """One of the GPUs of a machine; whoever takes one says so."""

    def __init__(self, number):
        self.number = number

    def use(self):
        print(f"GPU {self.number} is taken", file=sys.__stdout__, flush=True)


__version__ = "14.2.0"
runtime = SimpleNamespace(
    CUDARuntimeError=CUDARuntimeError,
    getDevice=lambda: 0,
    getDeviceCount=lambda: int(os.environ.get("STAND_IN_GPUS", "1")),
    getDeviceProperties=lambda device: {"name": b"a stand-in"},
    driverGetVersion=lambda: 13000,
    runtimeGetVersion=lambda: 12090,
)
cuda = SimpleNamespace(runtime=runtime, Device=Device)
nccl = types.ModuleType("cupy.cuda.nccl")
nccl.available = os.environ.get("STAND_IN_NCCL") != "0"
sys.modules["cupy.cuda.nccl"] = nccl


def asarray(x):
    """Copy an array to the device, unless it is there."""
    if os.environ.get("STAND_IN_GPUS") == "0":
        raise CUDARuntimeError(
            "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"
        )
    return x if isinstance(x, ndarray) else to_device(x)
