r"""Mixed precision: matrix products in float16, with all else in float32.

Source: Micikevicius et al. (2018), arXiv:1710.03740: weights kept in float32 (section 3.1), the loss scaled (3.2),
products added up in float32 (3.3).

GPUs multiply halves several times as fast as float32. But a half has 11 significant bits: of a weight just above 1, any
step shorter than $2^{-11}$ would be lost in rounding, and of a long sum the later terms. So weights, gradients and
moments are float32, and so are norms, softmax, loss, residual stream and optimiser: whatever lies between two products.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import numpy as np

from numpygpt.array import Array

DTYPES = "float32", "float16"  # of matrix products
START = 2.0**16  # of the loss scale
PATIENCE = 2000  # good steps in a row before it is doubled

_dtype = ContextVar("dtype of matrix products", default="float32")  # of each thread its own


def check_dtype(dtype: str) -> None:
    """Raise ValueError unless matrix products can be made in `dtype`."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be {' or '.join(DTYPES)}, not {dtype!r}")


@contextlib.contextmanager
def products_in(dtype: str) -> Iterator[None]:
    """Let `matmul` multiply in `dtype` while the block runs, in this thread alone. ValueError if that can't be."""
    check_dtype(dtype)
    token = _dtype.set(dtype)
    try:
        yield
    finally:
        _dtype.reset(token)


def matmul(a: Array, b: Array) -> Array:
    r"""Return the matrix product `np.matmul(a, b)`; within `products_in("float16")`, that of float32 arrays in halves.

    With $h(x)$ for the half nearest to $x$, and the sum in float32,

    $$y_{ij} = h\Big(\sum_k h(a_{ik})\, h(b_{kj})\Big) \tag{1}$$

    The result is a float32 array again. The product of two halves has at most 22 bits, which float32 holds: but for
    $h$, only the additions round. What is beyond 65504 is infinite. Arrays of another dtype than float32 are multiplied
    as they are.

    NumPy has no BLAS for halves, so there they are widened again: (1) by the float32 product, at more than its cost.
    CuPy has them multiplied as they are: one matrix by another with `CUBLAS_COMPUTE_32F`, which adds in float32, and
    batches widened as here (14.2, `_core/_routines_linalg.pyx`, `tensordot_core_v11` and `matmul`). But where cuBLAS
    cuts a long sum in parts, it may round each part to a half before it adds them, unless its handle is set to
    `CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION`, which CuPy leaves alone.
    """
    if _dtype.get() == "float32" or not a.dtype == b.dtype == np.float32:
        return np.matmul(a, b)
    a, b = a.astype(np.float16), b.astype(np.float16)
    if isinstance(a, np.ndarray):
        a, b = a.astype(np.float32), b.astype(np.float32)
    return np.matmul(a, b).astype(np.float16, copy=False).astype(np.float32)  # (1)


class LossScale:
    r"""The factor $S$ of the loss that brings gradients into the range of float16; 1 where products are in float32.

    Source: Micikevicius et al. (2018), arXiv:1710.03740, section 3.2, which skips a step that overflows. When to halve
    $S$ and when to double it is as in PyTorch's `GradScaler`. $\bar z$ means $\partial L/\partial z$.

    A half has its 11 bits between $2^{-14} = 6.1 \cdot 10^{-5}$ and 65504, fewer and fewer down to
    $2^{-24} = 6.0 \cdot 10^{-8}$, and what is no more than half of that becomes 0. Gradients are small. The loss is a
    mean over $N$ tokens, so the logits' are below $1/N$ (CrossEntropy, eq. 5), and with $V$ kinds of tokens most of
    them near $1/NV$: that is $2 \cdot 10^{-5}$ for 768 characters of 65 kinds, and $6 \cdot 10^{-10}$ for 32,768 of
    GPT-2's tokens. So backward starts from another loss:

    $$L' = S\, L \tag{1}$$

    Each step of backward multiplies cotangents by derivatives and adds, and none of these knows the loss. So whatever
    $z$ is, by the chain rule through (1),

    $$\frac{\partial L'}{\partial z} = \frac{\partial L'}{\partial L}\, \frac{\partial L}{\partial z}
      = S\, \bar z \tag{2}$$

    Of parameters $p$, the factor is taken out in float32, before clipping:

    $$\bar p = \frac1S\, \frac{\partial L'}{\partial p} \tag{3}$$

    $S$ is a power of two, which changes exponents only: neither (1) nor (3) rounds.

    **Which $S$?** If it is too large, a product is beyond 65504, and a parameter's gradient infinite or, by
    $\infty - \infty$ or $0 \cdot \infty$, NaN. Then the step is skipped, and

    $$S \leftarrow S/2 \tag{4}$$

    After 2,000 steps in a row that were not, there may be room again:

    $$S \leftarrow 2S \tag{5}$$

    **Reading.** $S$ slides the window of float16 along the gradients. It is held as high as the largest of them allow,
    so that the smallest have as much room below as can be had, and this costs one step in 2,000 or so.
    """

    def __init__(self, dtype: str):
        check_dtype(dtype)
        self.used = dtype == "float16"
        self.value = START if self.used else 1.0  # S of (1)
        self.good_steps = 0  # in a row, at this scale
        self.skipped_steps = 0  # in all

    def inverse(self) -> float:
        """Return what gradients are multiplied by."""
        return 1 / self.value  # (3), from (2)

    def step_made(self) -> None:
        """Take note of a step without overflow."""
        self.good_steps += 1
        if self.used and self.good_steps >= PATIENCE:
            self.value, self.good_steps = 2 * self.value, 0  # (5)

    def step_skipped(self) -> None:
        """Take note of a step that was skipped, since it did overflow."""
        self.value, self.good_steps = self.value / 2, 0  # (4)
        self.skipped_steps += 1

    def state_dict(self) -> dict[str, float]:
        """Return what the next step depends on, as JSON holds it."""
        return {name: vars(self)[name] for name in ("value", "good_steps", "skipped_steps")}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from `state`."""
        vars(self).update(state)
