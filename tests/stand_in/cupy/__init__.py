"""A stand-in for CuPy, found by `import cupy` if this folder and tests/ are in PYTHONPATH: its arrays are strict ones.

It has what is called by CuPy's own name; all else goes through NumPy's protocols. STAND_IN_GPUS=0 is a machine without
a GPU: there CuPy 14 is imported as ever, and whatever it is asked for first fails in this way.
"""

import os
from types import SimpleNamespace

from strict_array import StrictArray as ndarray
from strict_array import to_device


class CUDARuntimeError(RuntimeError):
    """What CUDA refuses."""


cuda = SimpleNamespace(runtime=SimpleNamespace(CUDARuntimeError=CUDARuntimeError))


def asarray(x):
    """Copy an array to the device, unless it is there."""
    if os.environ.get("STAND_IN_GPUS") == "0":
        raise CUDARuntimeError(
            "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"
        )
    return x if isinstance(x, ndarray) else to_device(x)
