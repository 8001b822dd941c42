"""From a row of token ids to batches.

A language model learns to name the next token, so a batch is two arrays of the same shape: `inputs`, windows
of a long row of ids, and `targets`, the same windows one id later. The row may be a memory map: a batch is copied out
of it and its pages are let go. Tokenizers and files of tokens are in tokenizer.py and tokens.py, and named here too.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Integer

from numpygpt.array import check_positive
from numpygpt.corpus import DataError
from numpygpt.tokenizer import BPETokenizer, CharTokenizer, Ids, Tokenizer, load_tokenizer, per_character
from numpygpt.tokens import let_go, open_tokens, write_tokens

__all__ = [
    "BPETokenizer",
    "Batch",
    "CharTokenizer",
    "DataError",
    "Ids",
    "Tokenizer",
    "load_tokenizer",
    "open_tokens",
    "per_character",
    "random_batch",
    "sequential_batches",
    "split",
    "write_tokens",
]

WHOLE = slice(None)
Batch = tuple[Integer[np.ndarray, "batch length"], Integer[np.ndarray, "batch length"]]


def split(tokens: Ids, context_length: int, held_out: float = 0.1) -> tuple[Ids, Ids]:
    """Training and validation ids: the last `held_out` of the row is kept for validation. Views, no copies.

    Raises DataError unless each part has a window of `context_length` ids and its targets.
    """
    if not 0 < held_out < 1:
        raise DataError(f"the part held out must lie between 0 and 1, and it is {held_out}")
    boundary = int(len(tokens) * (1 - held_out))
    parts = tokens[:boundary], tokens[boundary:]
    for name, part in zip(("training", "validation"), parts, strict=True):
        _check_length(part, context_length, f"{name} part of {len(tokens)} tokens")
    return parts


def random_batch(
    tokens: Ids, batch_size: int, context_length: int, rng: np.random.Generator, rows: slice = WHOLE
) -> Batch:
    """`batch_size` windows, each place in `tokens` as likely as the next: inputs and targets, (B, T) int64.

    Only some `rows` of the batch are read and returned, if those are given; the generator moves on as for all.
    N tokens hold N - T windows: the first starts on the first id, the last window's last target is the last
    id. Raises DataError if there is none.
    """
    check_positive(batch_size=batch_size, context_length=context_length)
    _check_length(tokens, context_length, "row of tokens")
    starts = rng.integers(len(tokens) - context_length, size=batch_size)
    windows = np.array(tokens[starts[rows, None] + np.arange(context_length + 1)], np.int64)
    let_go(tokens)
    return windows[:, :-1], windows[:, 1:]


def sequential_batches(tokens: Ids, batch_size: int, context_length: int) -> Iterator[Batch]:
    """Inputs and targets, int64, in which every id but the first is a target exactly once, in order.

    Batches are (B, T); the last full windows may make a smaller batch, and what is left one short window
    (1, t). Raises DataError if there are fewer than two tokens.
    """
    check_positive(batch_size=batch_size, context_length=context_length)
    _check_length(tokens, 1, "row of tokens")
    num_targets = len(tokens) - 1
    full = num_targets - num_targets % context_length  # targets in full windows
    step = batch_size * context_length
    bounds = [(start, min(start + step, full), context_length) for start in range(0, full, step)]
    if full < num_targets:
        bounds.append((full, num_targets, num_targets - full))
    for start, stop, length in bounds:
        window = np.array(tokens[start : stop + 1], np.int64)
        let_go(tokens)
        yield window[:-1].reshape(-1, length), window[1:].reshape(-1, length)


def _check_length(tokens: Ids, context_length: int, name: str) -> None:
    if len(tokens) <= context_length:
        raise DataError(
            f"the {name} has {len(tokens)} tokens and a context of {context_length} needs "
            f"{context_length + 1} (one more, for the last target): use a longer text or a shorter context"
        )
