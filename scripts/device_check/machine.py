"""The machine: whether there is a GPU, how arrays get there, and what all is called."""

import importlib.metadata
import os
from collections.abc import Callable

import numpy as np

from benchmarks.runner import installed
from numpygpt.array import Array
from numpygpt.device import mover
from numpygpt.threads import usable_cores


def find_gpu() -> Callable[[Array], Array]:
    """Return the function that copies an array to the GPU. ImportError without CuPy, ValueError without a GPU.

    From then on no library takes TF32 for float32, in this process and in those that it starts.
    """
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # read when CUDA's libraries are loaded
    return mover("cuda")


def describe() -> str:
    """Return a line with the GPU, and the versions of all that takes part."""
    import cupy

    runtime = cupy.cuda.runtime
    torch = importlib.metadata.version("torch") if installed("torch") else "none"
    parts = [
        runtime.getDeviceProperties(runtime.getDevice())["name"].decode(),
        f"driver for CUDA {version(runtime.driverGetVersion())}",
        f"CuPy {cupy.__version__} with CUDA {version(runtime.runtimeGetVersion())}",
        f"NumPy {np.__version__}",
        f"PyTorch {torch}",
        f"{usable_cores()} cores",
    ]
    return "; ".join(parts)


def version(number: int) -> str:
    """Return 12.8 for 12080."""
    return f"{number // 1000}.{number % 1000 // 10}"
