"""The bound: the matrix products of a step alone, by NumPy's BLAS. Whoever uses it takes at least as long.

A product $y = x w$ has two more in backward: $\\bar x = \\bar y\\, w^\\top$ and $\\bar w = x^\\top \\bar y$, of as many
operations each, so a step has three times those of its forward. With $N$ weights in matrices (without the embeddings,
which are looked up), $n$ tokens, $L$ layers, $T$ positions and width $D$ that makes $6 N n$ for the linear maps, and
$12 L\\, n\\, T D$ for attention's scores and sums, of which a causal one could leave out half.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.sizes import Size, Weights


class Product(NamedTuple):
    """A product (rows, inner) by (inner, columns) for each of `batch` pairs of matrices."""

    batch: tuple[int, ...]
    rows: int
    inner: int
    columns: int


def forward_products(size: Size) -> Iterator[Product]:
    """Yield the matrix products of a forward."""
    config, tokens = size.config, size.tokens
    width, context, d_ff = config.d_model, config.context_length, config.d_ff or 4 * config.d_model
    heads, d_k = (size.batch_size, config.num_heads), width // config.num_heads
    for _ in range(config.num_layers):
        for _ in ("q", "k", "v", "output"):
            yield Product((), tokens, width, width)
        yield Product(heads, context, d_k, context)
        yield Product(heads, context, context, d_k)
        for _ in ("w1", "w3") if config.ffn == "swiglu" else ("w1",):
            yield Product((), tokens, width, d_ff)
        yield Product((), tokens, d_ff, width)
    yield Product((), tokens, width, config.vocab_size)


def flops(size: Size) -> int:
    """Return the multiplications and additions in a step's matrix products."""
    return sum(3 * 2 * int(np.prod(p.batch)) * p.rows * p.inner * p.columns for p in forward_products(size))


def make_products(p: Product) -> Callable[[], None]:
    """Return a function that does a forward's product and the two of its backward, the weights held as (out, in)."""
    x, w, y = (
        np.ones((*p.batch, *s), np.float32) for s in ((p.rows, p.inner), (p.columns, p.inner), (p.rows, p.columns))
    )
    dx, dw = np.empty_like(x), np.empty_like(w)

    def multiply() -> None:
        np.matmul(x, w.mT, out=y)
        np.matmul(y, w, out=dx)  # y in the place of its gradient
        np.matmul(y.mT, x, out=dw)

    return multiply


def make_step(size: Size, weights: Weights, threads: int) -> Callable[[], None]:
    """Return a function that does all products of a step, each on arrays of its own."""
    products = [make_products(p) for p in forward_products(size)]

    def step() -> None:
        for multiply in products:
            multiply()

    return step
