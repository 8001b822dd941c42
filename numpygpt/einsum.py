r"""Contractions in the notation of `np.einsum`, computed by BLAS.

$$y_{\text{out}} = \sum_{\text{letters not in out}} a_{\dots}\, b_{\dots}$$

Each letter of a product of two arrays plays one of four parts:

| part | in a | in b | in the output |
|---|---|---|---|
| batch | yes | yes | yes |
| row | yes | no | yes |
| column | no | yes | yes |
| summed | yes | yes | no |

With axes in the order (batch, row, summed) for $a$ and (batch, summed, column) for $b$, the contraction *is* a
batched matrix product: transpose both (views), merge the letters of a part into one axis (a view where memory
allows), multiply with `np.matmul` (in halves, if `numpygpt/precision.py` is told so), split the merged axes again, and
transpose to the order of the output.
NumPy's own `np.einsum` runs a loop in C unless asked to optimise, and then plans anew at every call; here the
plan is made once for each notation and shapes.

What is no matrix product (no summed letter, or neither rows nor columns) goes to `np.einsum` as it is.

**One freedom beyond `np.einsum`.** The ellipsis stands for the leading axes, the same ones in every operand that
has it, and may be left out of the output: then those axes are summed. `"...o,...i->oi"` is the weight gradient
of a linear layer whatever the number of batch axes.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from numpygpt.array import Array
from numpygpt.precision import matmul

ELLIPSIS_LETTERS = "ABCDEFGHIJKLMNOP"  # stand for the axes of '...'; the notations themselves are in lower case


class Product(NamedTuple):
    """How to lower one notation to one matrix product."""

    a_axes: tuple[int, ...]  # transposes a to (batch, row, summed)
    b_axes: tuple[int, ...]  # transposes b to (batch, summed, column)
    y_axes: tuple[int, ...]  # transposes (batch, row, column) to the output
    batch: int  # number of batch letters
    rows: int  # number of row letters


@functools.cache
def spell_out(notation: str, ndims: tuple[int, ...]) -> str:
    """Replace the ellipsis by letters, given the number of axes of each operand."""
    inputs, arrow, _ = notation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != len(ndims):
        raise ValueError(f"{notation!r} must have an output and {len(ndims)} operands")
    leading = None
    for term, ndim in zip(terms, ndims, strict=True):
        n = ndim - len(term.removeprefix("..."))
        if n < 0 or (n > 0 and not term.startswith("...")):
            raise ValueError(f"operand {term!r} of {notation!r} does not fit an array of {ndim} axes")
        if term.startswith("..."):
            if leading not in (None, n):
                raise ValueError(f"'...' stands for {leading} and for {n} axes in {notation!r}")
            leading = n
    return notation.replace(" ", "").replace("...", ELLIPSIS_LETTERS[: leading or 0])


@functools.cache
def lower(spelled: str) -> Product | None:
    """Return the matrix product that computes a notation without ellipsis, or None if it is none."""
    inputs, output = spelled.split("->")
    a, _, b = inputs.partition(",")
    batch = [x for x in output if x in a and x in b]
    row = [x for x in output if x not in b]
    column = [x for x in output if x not in a]
    summed = [x for x in dict.fromkeys(a) if x not in output]
    # A letter that stands twice in one operand, is summed in one alone, or is in neither, fits no part.
    every_letter_fits = sorted(a) == sorted(batch + row + summed) and sorted(b) == sorted(batch + summed + column)
    if not summed or not (row or column) or not every_letter_fits:
        return None
    return Product(
        tuple(map(a.index, batch + row + summed)),
        tuple(map(b.index, batch + summed + column)),
        tuple(map((batch + row + column).index, output)),
        len(batch),
        len(row),
    )


class Plan(NamedTuple):
    """A product of arrays of known shapes: what to make of a, of b and of their product."""

    a_axes: tuple[int, ...]
    a_shape: tuple[int, ...]  # (batch, rows, summed), the last two each one axis
    b_axes: tuple[int, ...]
    b_shape: tuple[int, ...]  # (batch, summed, columns)
    y_shape: tuple[int, ...]
    y_axes: tuple[int, ...]


@functools.lru_cache(4096)
def plan(notation: str, *shapes: tuple[int, ...]) -> Plan | str:
    """Return the plan of a matrix product, or the notation without ellipsis if it is none."""
    spelled = spell_out(notation, tuple(map(len, shapes)))
    product = lower(spelled)
    if product is None:
        return spelled
    a, b = (tuple(s[i] for i in axes) for s, axes in zip(shapes, (product.a_axes, product.b_axes), strict=True))
    n, m = product.batch, product.batch + product.rows
    k = n + len(a) - m  # a's axes from m on are summed, as are b's from n to k - 1
    batch, row, column = a[:n], a[n:m], b[k:]
    if a[m:] != b[n:k] or batch != b[:n]:
        raise ValueError(f"{notation!r} does not fit arrays of shapes {' and '.join(map(str, shapes))}")
    summed = math.prod(a[m:])
    a_shape, b_shape = (*batch, math.prod(row), summed), (*batch, summed, math.prod(column))
    return Plan(product.a_axes, a_shape, product.b_axes, b_shape, batch + row + column, product.y_axes)


def einsum(notation: str, *operands: Array) -> Array:
    """Return what `np.einsum(notation, *operands)` would; see above for the use of the ellipsis.

    The result may be a view with transposed axes. Raises ValueError if the notation does not fit the operands.
    """
    how = plan(notation, *(x.shape for x in operands))
    if isinstance(how, str):
        return np.einsum(how, *operands)
    a, b = operands
    a, b = a.transpose(how.a_axes).reshape(how.a_shape), b.transpose(how.b_axes).reshape(how.b_shape)
    return matmul(a, b).reshape(how.y_shape).transpose(how.y_axes)
