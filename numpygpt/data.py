"""Text to token ids and back, and token ids to batches.

A language model learns to name the next token, so a batch is two arrays of the same shape: `inputs`, windows
of a long row of ids, and `targets`, the same windows one id later.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
from jaxtyping import Integer
from numpy.typing import ArrayLike

from numpygpt.array import check_positive
from numpygpt.corpus import DataError

Ids = Integer[np.ndarray, "_"]  # a row of ids of any length
Batch = tuple[Integer[np.ndarray, "batch length"], Integer[np.ndarray, "batch length"]]


class CharTokenizer:
    """One id for each character; ids follow the order of the code points.

    Lossless for every character it was trained on, line ends of any kind included. Two tokenizers are equal
    when their fingerprints are.
    """

    kind = "char"

    def __init__(self, vocabulary: str):
        """`vocabulary`: every character once, in the order of the code points."""
        self.vocabulary = vocabulary
        self.vocab_size = len(vocabulary)
        description = json.dumps([self.kind, vocabulary])
        self.fingerprint = hashlib.sha256(description.encode()).hexdigest()[:16]
        self._code_points = _code_points(vocabulary)
        self._dtype = np.min_scalar_type(self.vocab_size - 1)

    @classmethod
    def train(cls, text: str) -> Self:
        """The tokenizer of the characters in `text`. Raises DataError if there are none, or half of one."""
        if not text:
            raise DataError("a tokenizer cannot be trained on an empty text: give at least one character")
        vocabulary = "".join(sorted(set(text)))
        for character in vocabulary:
            if "\ud800" <= character <= "\udfff":
                raise DataError(
                    f"the text holds the lone surrogate {_named(character)}, half of a UTF-16 pair and no "
                    "character: decode the text as what it is"
                )
        return cls(vocabulary)

    def encode(self, text: str) -> Ids:
        """The ids of `text`, in the smallest unsigned dtype that holds the vocabulary (uint8 up to 256).

        Raises DataError that names the first character outside the vocabulary and its position, from 0.
        """
        points = _code_points(text)
        ids = np.searchsorted(self._code_points, points)
        known = self._code_points[np.minimum(ids, self.vocab_size - 1)] == points
        if not known.all():
            position = int(np.argmin(known))
            raise DataError(
                f"the character {_named(text[position])} at position {position} is not among the "
                f"{self.vocab_size} of the vocabulary {_shortened(self.vocabulary)}: "
                "leave it out, or train on text that has it"
            )
        return ids.astype(self._dtype)

    def decode(self, ids: ArrayLike) -> str:
        """The text of `ids`, integers. Raises DataError that names the first id out of range."""
        ids = np.asarray(ids)
        if ids.size == 0:
            return ""
        if ids.dtype.kind not in "iu":
            raise DataError(f"ids must be integers, and these are {ids.dtype}")
        legal = (ids >= 0) & (ids < self.vocab_size)
        if not legal.all():
            position = int(np.argmin(legal))
            raise DataError(
                f"the id {ids.flat[position]} at position {position} is not one of "
                f"0 to {self.vocab_size - 1}: these ids are another tokenizer's"
            )
        return self._code_points[ids].tobytes().decode("utf-32-le")

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` into `folder`, which is made if need be."""
        content = {"kind": self.kind, "fingerprint": self.fingerprint, "vocabulary": self.vocabulary}
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "tokenizer.json").write_text(
            json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
        )

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The tokenizer saved in `folder`. Raises DataError if it is missing, damaged or of another kind."""
        path = Path(folder, "tokenizer.json")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            kind, vocabulary, fingerprint = (content[key] for key in ("kind", "vocabulary", "fingerprint"))
            if kind != cls.kind:
                raise DataError(f"{path} holds a tokenizer of kind {kind!r}, not {cls.kind!r}")
            tokenizer = cls(vocabulary)
        except OSError as error:
            raise DataError(f"cannot read {path} ({error.strerror}): give the folder of a model") from error
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise DataError(f"{path} is not a tokenizer: {error!r}") from error
        if tokenizer.fingerprint != fingerprint:
            raise DataError(f"{path} is damaged: its vocabulary does not have the fingerprint {fingerprint}")
        return tokenizer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CharTokenizer) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)


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


def random_batch(tokens: Ids, batch_size: int, context_length: int, rng: np.random.Generator) -> Batch:
    """`batch_size` windows, each place in `tokens` as likely as the next: inputs and targets, (B, T) int64.

    N tokens hold N - T windows: the first starts on the first id, the last window's last target is the last
    id. Raises DataError if there is none.
    """
    check_positive(batch_size=batch_size, context_length=context_length)
    _check_length(tokens, context_length, "row of tokens")
    starts = rng.integers(len(tokens) - context_length, size=batch_size)
    windows = tokens[starts[:, None] + np.arange(context_length + 1)].astype(np.int64)
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
        window = tokens[start : stop + 1].astype(np.int64)
        yield window[:-1].reshape(-1, length), window[1:].reshape(-1, length)


def _check_length(tokens: Ids, context_length: int, name: str) -> None:
    if len(tokens) <= context_length:
        raise DataError(
            f"the {name} has {len(tokens)} tokens and a context of {context_length} needs "
            f"{context_length + 1} (one more, for the last target): use a longer text or a shorter context"
        )


def _code_points(text: str) -> Integer[np.ndarray, "length"]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _named(character: str) -> str:
    return f"{character!r} (U+{ord(character):04X})"


def _shortened(text: str, limit: int = 100) -> str:
    return repr(text) if len(text) <= limit else repr(text[:limit]) + "..."
