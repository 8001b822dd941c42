r"""Text to token ids and back: by characters, or by byte pairs.

**Byte-pair encoding** (Gage, 1994; for words, Sennrich et al., 2016, arXiv:1508.07909; on bytes, Radford et al., 2019)
starts from the 256 bytes of UTF-8 and merges, again and again, the pair of neighbouring tokens that is most frequent
in the training text into a new token. *Ties* go to the pair of smaller ids: first by its left token, then by its right.
Pairs are counted inside words only (GPT-2's pattern: a word takes one space before it along), so only how often each
word comes counts, not the order of the text. To encode is to make the same merges in the same order. Bytes can say
everything, so nothing is unknown, and nothing is lost.
"""

import codecs
import functools
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
from jaxtyping import Integer
from numpy.typing import ArrayLike

from numpygpt.corpus import DataError, at_words
from numpygpt.durable import replacing
from numpygpt.extras import need

FILE = "tokenizer.json"
UNREADABLE = (KeyError, TypeError, AttributeError, ValueError, RecursionError)  # what JSON of another form raises
# A merge takes time that grows with the word: text without white space is counted in parts of so many characters.
LONG_WORD_PART = re.compile(r"\S{512}(?=\S)")
Ids = Integer[np.ndarray, "_"]  # a row of ids of any length


class Tokenizer(ABC):
    """What all kinds share. Two tokenizers are equal when their fingerprints are; those hash kind and vocabulary."""

    kind: str
    start: tuple[int, ...] = ()  # ids that every text begins with, where a model came with a tokenizer that says so

    def __init__(self, vocab_size: int, description: list):
        self.vocab_size = vocab_size
        self.fingerprint = hashlib.sha256(json.dumps([self.kind, *description]).encode()).hexdigest()[:16]
        self.dtype = np.min_scalar_type(vocab_size - 1)  # the smallest unsigned one: uint8 up to 256 ids

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """Return the ids of `text`."""

    @abstractmethod
    def decode(self, ids: ArrayLike) -> str:
        """Return the text of `ids`."""

    @abstractmethod
    def count_characters(self, ids: Ids) -> int:
        """Return how many characters the text of `ids` has."""

    @abstractmethod
    def stream(self, ids: Iterable[int | np.integer]) -> Iterator[str]:
        """Yield the text of `ids` in whole characters, each as soon as it is known; together they are `decode(ids)`."""

    @abstractmethod
    def _to_json(self) -> str: ...

    @classmethod
    @abstractmethod
    def _from_json(cls, content: Any) -> Self: ...

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` into `folder`, which is made if need be."""
        with replacing(Path(folder, FILE)) as file:
            file.write(self._to_json().encode())

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Return the tokenizer saved in `folder`. DataError if it is missing, damaged or of another kind."""
        path = Path(folder, FILE)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if kind_of(content) != cls.kind:
                raise DataError(f"a tokenizer of kind {kind_of(content)!r}, not {cls.kind!r}")
            return cls._from_json(content)
        except OSError as error:
            raise DataError(f"cannot read {path} ({error.strerror}): give the folder of a model") from error
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        except UNREADABLE as error:
            raise DataError(f"{path} is not a tokenizer: {error!r}") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def checked(self, ids: ArrayLike) -> Ids:
        """Return `ids` as a row of integers; DataError that names the first one out of range."""
        ids = np.asarray(ids)
        if ids.size == 0:
            return np.zeros(0, self.dtype)
        if ids.dtype.kind not in "iu":
            raise DataError(f"ids must be integers, and these are {ids.dtype}")
        legal = (ids >= 0) & (ids < self.vocab_size)
        if not legal.all():
            position = int(np.argmin(legal))
            raise DataError(
                f"the id {ids.flat[position]} at position {position} is not one of "
                f"0 to {self.vocab_size - 1}: these ids are another tokenizer's"
            )
        return ids.reshape(-1)


class CharTokenizer(Tokenizer):
    """One id for each character; ids follow the order of the code points.

    Lossless for every character it was trained on, line ends of any kind included.
    """

    kind = "char"

    def __init__(self, vocabulary: str):
        """`vocabulary`: every character once, in the order of the code points."""
        super().__init__(len(vocabulary), [vocabulary])
        self.vocabulary = vocabulary
        self._code_points = _code_points(vocabulary)

    @classmethod
    def train(cls, text: str | Iterable[str]) -> Self:
        """Return the tokenizer of the characters in a text, or in its pieces as corpus_pieces gives them.

        DataError if there are none, or half of one.
        """
        vocabulary = "".join(sorted(set().union(*([text] if isinstance(text, str) else text))))
        if not vocabulary:
            raise DataError("a tokenizer cannot be trained on an empty text: give at least one character")
        _refuse_surrogates(vocabulary)
        return cls(vocabulary)

    def encode(self, text: str) -> Ids:
        """Return the ids of `text` (length of the text,), in the smallest unsigned dtype that holds the vocabulary.

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
        return ids.astype(self.dtype)

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of `ids`, integers. Raises DataError that names the first id out of range."""
        return self._code_points[self.checked(ids)].tobytes().decode("utf-32-le")

    def count_characters(self, ids: Ids) -> int:
        """Return how many characters the text of `ids` has: as many as there are ids."""
        return len(ids)

    def stream(self, ids: Iterable[int | np.integer]) -> Iterator[str]:
        """Yield the character of each id as it comes."""
        return (self.decode(np.array([index])) for index in ids)

    def _to_json(self) -> str:
        content = {"kind": self.kind, "fingerprint": self.fingerprint, "vocabulary": self.vocabulary}
        return json.dumps(content, ensure_ascii=False, indent=1) + "\n"

    @classmethod
    def _from_json(cls, content: dict) -> Self:
        tokenizer = cls(content["vocabulary"])
        if tokenizer.fingerprint != content["fingerprint"]:
            raise DataError(f"damaged: its vocabulary does not have the fingerprint {content['fingerprint']}")
        return tokenizer


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding, lossless for any text; the work is done by Hugging Face's `tokenizers`.

    It is saved in the format of that library, which holds all there is to know: the fingerprint is made of it.
    Besides those that `train` makes it may be one that came with a model, if that is lossless too. Such a one may look
    for words in a way of its own, and have special tokens: where their text stands, they are taken.
    """

    kind = "bpe"

    def __init__(self, library_tokenizer: Any):
        """`library_tokenizer`: a tokenizers.Tokenizer; DataError if it may not give back the text it was given."""
        content = json.loads(library_tokenizer.to_str())
        vocabulary, merges = content["model"].pop("vocab"), content["model"].pop("merges")
        ours = json.loads(_untrained().to_str())
        del ours["model"]["vocab"], ours["model"]["merges"]
        self._plain = content == ours
        if not self._plain and (reason := _what_may_lose_text(content, ours)):
            raise DataError(
                f"not a plain byte-level BPE tokenizer: it may not give back the text it is given ({reason})"
            )
        byte_of = _byte_of_symbol()
        added = {token["content"]: token["id"] for token in content["added_tokens"]}
        index_of = vocabulary | added
        tokens = sorted(index_of, key=index_of.get)
        if sorted(index_of.values()) != list(range(len(tokens))):
            raise DataError(f"damaged: its {len(tokens)} ids have gaps")
        self._lacking = bytes(byte for symbol, byte in byte_of.items() if symbol not in vocabulary)
        if self._lacking and self._plain:
            raise DataError("damaged: not every byte has an id")
        super().__init__(len(tokens), [tokens, merges] if self._plain else [tokens, merges, content])
        self._library = library_tokenizer
        self.start = _start(library_tokenizer)
        self._bytes = [t.encode() if t in added else bytes(byte_of[symbol] for symbol in t) for t in tokens]
        # 10xxxxxx goes on with a character that an earlier byte began
        self._characters = np.array([sum(byte & 0xC0 != 0x80 for byte in token) for token in self._bytes])

    @classmethod
    def train(cls, text: str | Iterable[str], vocab_size: int) -> Self:
        """Learn `vocab_size` tokens, 256 of them the bytes, from a text, or from pieces as corpus_pieces gives them.

        A text too small for so many gives fewer: when each word is one token there is nothing left to merge.
        `.vocab_size` says how many there are, so build the model from it. Raises DataError for an empty text, a lone
        surrogate, and a `vocab_size` outside 256..1,048,576; ImportError without the library.
        """
        if not isinstance(vocab_size, int) or not 256 <= vocab_size <= 2**20:
            raise DataError(f"vocab_size must be an integer from 256 (the bytes) to {2**20:,}, not {vocab_size!r}")
        library, seen = _untrained(), False

        def pieces() -> Iterator[str]:
            nonlocal seen
            for piece in _pieces(text) if isinstance(text, str) else text:
                _refuse_surrogates(piece)
                seen = seen or bool(piece)
                start = 0
                for part in LONG_WORD_PART.finditer(piece):
                    yield piece[start : part.end()]
                    start = part.end()
                yield piece[start:]

        trainer = _tokenizers().trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=sorted(_byte_of_symbol()), special_tokens=[], show_progress=False
        )
        library.train_from_iterator(pieces(), trainer)
        if not seen:
            raise DataError("a tokenizer cannot be trained on an empty text: give at least one character")
        return cls(library)

    def encode(self, text: str) -> Ids:
        """Return the ids of `text` (at most one for each byte,), in the smallest unsigned dtype for the vocabulary.

        The pieces of a text have, one after another, the ids of the whole if it is cut as corpus.at_words does.
        Raises DataError that names a lone surrogate, or a character that a tokenizer which came with a model lacks.
        """
        _refuse_surrogates(text)
        if self._lacking:
            self._refuse_unknown(text)
        # of a tokenizer with other words or with special tokens it isn't known where a text may be cut
        pieces = _pieces(text) if self._plain else [text]
        ids = [np.array(self._library.encode(piece, add_special_tokens=False).ids, self.dtype) for piece in pieces]
        return np.concatenate([np.zeros(0, self.dtype), *ids])

    def _refuse_unknown(self, text: str) -> None:
        encoded = text.encode()
        if len(encoded.translate(None, self._lacking)) < len(encoded):
            position = next(i for i, c in enumerate(text) if not set(self._lacking).isdisjoint(c.encode()))
            raise DataError(
                f"the character {_named(text[position])} at position {position} is one that this tokenizer can't "
                "encode: leave it out"
            )

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of `ids`, integers. Raises DataError that names the first id out of range.

        Ids cut inside a character, or put together at random, may be no UTF-8: then there are U+FFFDs in the text.
        """
        return b"".join([self._bytes[index] for index in self.checked(ids).tolist()]).decode("utf-8", "replace")

    def count_characters(self, ids: Ids) -> int:
        """Return how many characters begin in `ids`."""
        parts = (ids[start : start + 2**20] for start in range(0, len(ids), 2**20))  # counting makes them int64
        return sum(int(np.bincount(part, minlength=self.vocab_size) @ self._characters) for part in parts)

    def stream(self, ids: Iterable[int | np.integer]) -> Iterator[str]:
        """Yield the text of `ids` in whole characters: the bytes of an unfinished one wait for the next id."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for index in ids:
            if text := decoder.decode(self._bytes[self.checked(np.array([index]))[0]]):
                yield text
        if text := decoder.decode(b"", final=True):
            yield text

    def _to_json(self) -> str:
        return self._library.to_str(pretty=True) + "\n"

    @classmethod
    def _from_json(cls, content: dict) -> Self:
        from_str = _tokenizers().Tokenizer.from_str
        try:
            library = from_str(json.dumps(content))
        except Exception as error:  # the library raises no subclass
            raise DataError(f"damaged: {error}") from error
        return cls(library)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Return the tokenizer saved in `folder`, whichever kind it is. DataError if it is missing or damaged."""
    try:
        is_bpe = kind_of(json.loads(Path(folder, FILE).read_bytes())) == BPETokenizer.kind
    except (OSError, *UNREADABLE):
        is_bpe = False  # let load say what is wrong
    return BPETokenizer.load(folder) if is_bpe else CharTokenizer.load(folder)


def kind_of(content: Any) -> object:
    """Return the kind of tokenizer that a tokenizer.json holds: the library's own format has no room for the word."""
    if isinstance(model := content.get("model"), dict):
        kind = model.get("type", "BPE")  # files of the first versions don't say it
        return BPETokenizer.kind if kind == "BPE" else kind
    return content["kind"]


def per_character(loss: float, targets: Ids, tokenizer: Tokenizer) -> float:
    """Return a mean loss in nats a token over `targets` in nats a character, which compares across tokenizers.

    $L_\\text{char} = L_\\text{token} \\cdot \\text{tokens} / \\text{characters}$; divide by ln 2 for bits.
    """
    return loss * len(targets) / max(tokenizer.count_characters(targets), 1)


def _what_may_lose_text(content: dict, ours: dict) -> str:
    """Name the first part of a library's tokenizer by which a text could get lost, or "" if there is none.

    `ours` is what a plain one has there. Not looked at: the processor, which is asked for nothing but what begins a
    text, and the unknown token, as characters without one are refused.
    """
    unasked = {"added_tokens", "post_processor", "pre_tokenizer", "model", "version"}
    for part in ours.keys() - unasked:
        if content[part] != ours[part]:
            return part
    for option, value in ours["model"].items():
        harmless = option in ("unk_token", "fuse_unk", "ignore_merges")
        if not harmless and (content["model"].get(option) or None) != (value or None):
            return option
    words = content["pre_tokenizer"] or {"type": None}
    *splits, last = words.get("pretokenizers", [words])
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return "pre_tokenizer"
    for split in splits:
        if split["type"] != "Digits" and (split["type"], split.get("behavior")) != ("Split", "Isolated"):
            return f"pre_tokenizer {split['type']}"
    for token in content["added_tokens"]:
        if token["lstrip"] or token["rstrip"]:
            return f"the token {token['content']!r}, which takes the space beside it along"
    return ""


def _start(library_tokenizer: Any) -> tuple[int, ...]:
    """The ids that a library's tokenizer puts before every text, by its processor."""
    encoding = library_tokenizer.encode("0")
    sequences = encoding.sequence_ids  # 0 for what comes of the text, None for what the processor adds
    return tuple(encoding.ids[: sequences.index(0)]) if 0 in sequences else ()


def _tokenizers() -> Any:
    return need("tokenizers", "bpe")


def _untrained() -> Any:
    library = _tokenizers()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


@functools.cache
def _byte_of_symbol() -> dict[str, int]:
    """The byte for which each of the library's 256 printable symbols stands.

    A printable Latin-1 character stands for its code point; those from U+0100 for the bytes that are left, in order.
    """
    alphabet = sorted(_tokenizers().pre_tokenizers.ByteLevel.alphabet())
    printable = {symbol: ord(symbol) for symbol in alphabet if ord(symbol) < 256}
    others = sorted(set(range(256)) - set(printable.values()))
    return printable | dict(zip(alphabet[len(printable) :], others, strict=True))


def _pieces(text: str, size: int = 2**12) -> Iterator[str]:
    """The text in pieces so short that the library is quick with them."""
    return at_words(text[start : start + size] for start in range(0, len(text), size))


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text holds the lone surrogate {_named(text[error.start])} at position {error.start}, half of a "
            "UTF-16 pair and no character: decode the text as what it is"
        ) from error


def _code_points(text: str) -> Integer[np.ndarray, "length"]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _named(character: str) -> str:
    return f"{character!r} (U+{ord(character):04X})"


def _shortened(text: str, limit: int = 100) -> str:
    return repr(text) if len(text) <= limit else repr(text[:limit]) + "..."
