"""Where a model runs: "cpu", on NumPy's arrays, or "cuda", an NVIDIA GPU, on CuPy's.

`model.to("cuda")` moves a model. No layer knows of it: CuPy's arrays answer the calls that NumPy's do, and what is made
from them lies where they do. A transfer is written down where it happens, by `mover` or `np.asarray(x, like=y)`; CuPy
refuses to mix arrays of the two sides.

**How the two sides work together.** A call on CuPy's arrays only puts work into the GPU's queue, and Python goes on.
It waits where it looks at a number: an id to be checked, a loss, a norm. Then the queue runs dry, so each look is one
too many if it can be put off or done on the host. A training step has four of them: ids, loss, norms, and the sums
of the embedding's gradient, which need to know which tokens there were.

**What may differ from run to run.** On the CPU a seed settles every bit. A GPU's threads may add in another order in
every run: the embedding's gradient is summed by `np.bincount`, which is atomic adds there (in float64, so that the
difference seldom survives the rounding to float32), and CuPy promises no order for its other sums. So a run on a GPU,
and one that is resumed there, are the same to rounding only.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from numpygpt.array import Array

DEVICES = ("cpu", "cuda")


def mover(device: str) -> Callable[[Array], Array]:
    """Return the function that copies an array to a device.

    ImportError for "cuda" without CuPy, and ValueError if it finds no GPU that it can use.
    """
    if device == "cpu":
        return lambda x: x.get() if hasattr(x, "get") else x  # .get() is CuPy's explicit copy to the host
    if device == "cuda":
        return cupy_with_gpu().asarray
    raise ValueError(f"device must be {' or '.join(DEVICES)}, not {device!r}")


@functools.cache
def cupy_with_gpu() -> Any:
    """Return CuPy, once it has computed something: it is imported as well where there is no GPU, or not all of CUDA."""
    try:
        import cupy

        ones = cupy.asarray(np.ones((2, 2), np.float32))
        (ones @ ones + ones).get()  # the library of products, and the compiler of kernels
    except ModuleNotFoundError as error:
        raise ImportError('device "cuda" needs CuPy: pip install -e ".[cuda12]" or ".[cuda13]"') from error
    except (RuntimeError, OSError, ImportError) as error:  # also CuPy's own errors
        reason = str(error).partition("\n")[0]
        raise ValueError(f'device "cuda" can\'t be used here: {reason} (nvidia-smi shows GPU and driver)') from error
    return cupy
