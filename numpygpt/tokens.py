"""Token ids in a file that is mapped into memory, so that a corpus may be larger than it.

A file is a header of 256 bytes and then the ids, little-endian. The header is a line of JSON, filled up with spaces, so
`head -c 256` shows it:

    {"numpygpt tokens": 1, "dtype": "<u2", "vocab_size": 512, "count": 9, "crc32": 1, "tokenizer": "561e6e4b3d2ce849"}

The number is the version of the format; `tokenizer` is a fingerprint; `crc32` is that of the ids' bytes.
"""

import json
import mmap
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from numpygpt.corpus import DataError
from numpygpt.durable import replacing
from numpygpt.tokenizer import Ids, Tokenizer

FORMAT = 1
HEADER_BYTES = 256
MAGIC = b'{"numpygpt tokens"'  # json.dumps writes the header's first name first


def write_tokens(path: str | Path, ids: Ids | Iterable[Ids], tokenizer: Tokenizer) -> None:
    """Write `ids`, a row (n,) or one row after another, to `path`; until the file is whole, what was there stays.

    For a corpus larger than memory: `write_tokens(path, map(tokenizer.encode, corpus_pieces("texts")), tokenizer)`.
    Raises DataError if there are no ids, or one that isn't the tokenizer's.
    """
    dtype = tokenizer.dtype.newbyteorder("<")
    count = crc32 = 0
    with replacing(path) as file:
        file.write(bytes(HEADER_BYTES))
        for row in [ids] if isinstance(ids, np.ndarray) else ids:
            content = tokenizer.checked(row).astype(dtype).tobytes()
            file.write(content)
            crc32 = zlib.crc32(content, crc32)
            count += len(row)
        if count == 0:
            raise DataError(f"there are no tokens to write to {path}")
        header = {
            "numpygpt tokens": FORMAT,
            "dtype": dtype.str,
            "vocab_size": tokenizer.vocab_size,
            "count": count,
            "crc32": crc32,
            "tokenizer": tokenizer.fingerprint,
        }
        file.seek(0)
        file.write(json.dumps(header).encode().ljust(HEADER_BYTES - 1) + b"\n")


def open_tokens(path: str | Path, tokenizer: Tokenizer | None = None) -> Integer[np.memmap, "count"]:
    """Return the ids in `path`, mapped and read-only, (count,) in the smallest unsigned dtype for the vocabulary.

    Raises DataError, which names the file, if it can't be read, isn't such a file, is cut short or damaged (all of it
    is read once to see), or holds ids of another tokenizer than the one given.
    """
    header = read_header(path)
    crc32 = 0
    with open(path, "rb") as file:
        file.seek(HEADER_BYTES)
        while chunk := file.read(2**20):
            crc32 = zlib.crc32(chunk, crc32)
    if crc32 != header.get("crc32"):
        raise DataError(f"{path} is damaged: its ids don't have the checksum in its header; write it again")
    if tokenizer is not None and tokenizer.fingerprint != header.get("tokenizer"):
        raise DataError(
            f"{path} was written with the tokenizer {header.get('tokenizer')} of {header.get('vocab_size')} ids, and "
            f"this one is {tokenizer.fingerprint} of {tokenizer.vocab_size}: write it again with this one"
        )
    return np.memmap(path, header["dtype"], "r", offset=HEADER_BYTES, shape=(header["count"],))


def read_header(path: str | Path) -> dict[str, Any]:
    """Return the header of a file of tokens, without a look at the ids; DataError if it isn't one or is cut short."""
    try:
        with open(path, "rb") as file:
            head = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size - HEADER_BYTES
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}): give a file made by write_tokens") from error
    try:
        header = json.loads(head)
        version, dtype, count = header["numpygpt tokens"], header["dtype"], header["count"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no file of tokens: its header can't be read") from error
    if version != FORMAT:
        raise DataError(f"{path} has format {version!r}, and this program reads {FORMAT}")
    if dtype not in ("|u1", "<u2", "<u4") or not isinstance(count, int) or count < 1:
        raise DataError(f"{path} is damaged: its header names {count!r} ids of dtype {dtype!r}")
    if size != count * np.dtype(dtype).itemsize:
        raise DataError(
            f"{path} is cut short or damaged: {size:,} bytes aren't the {count:,} ids of {dtype} its header names"
        )
    return header


def is_tokens(path: str | Path) -> bool:
    """Whether `path` is a file that begins as write_tokens begins one."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def let_go(tokens: Ids) -> None:
    """Take the pages of a memory map that were read off this process's memory; the system may still cache them.

    Without this a process that draws batches at random grows until it holds the whole file.
    """
    mapping = getattr(tokens, "_mmap", None)  # np.memmap and its slices keep their mmap.mmap here
    if isinstance(mapping, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)
