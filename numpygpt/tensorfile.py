"""A safetensors file whose every byte is vouched for: tensors, and a JSON object beside them, under checksums.

And one that nobody vouches for, another program's, whose tensors are mapped into memory.

The object stands in the file's own header under the key "numpygpt". Its "tensors" are the SHA-256 of every tensor, and
its "seal" that of the rest of the object: the seal vouches for the whole file and is the file's identity. No pickle
anywhere: reading a file runs none of it. Any program that reads safetensors can open it; transformers asks for the
entry "format" beside it.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from numpygpt.extras import need

UNREADABLE = (safetensors.SafetensorError, OSError, TypeError, AttributeError, MemoryError)
FORMAT = {"format": "pt"}
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


class CheckpointError(ValueError):
    """A file or folder that can't be read as ours; the message is one line and names the file and the tensor."""


def write(path: Path, tensors: dict[str, np.ndarray], header: dict[str, Any]) -> str:
    """Write arrays by name, and `header` (anything JSON holds); return the seal."""
    header = {**header, "tensors": {name: checksum(tensor) for name, tensor in tensors.items()}}
    seal = seal_of(header)
    content = safetensors.numpy.save(tensors, {"numpygpt": json.dumps({**header, "seal": seal})})
    # Given two entries, safetensors writes them in any order, and equal models would be files that differ. So the
    # second is put in here; spaces keep the header's length a multiple of 8.
    before, after = b'{"__metadata__":{', b'"format":"pt",'
    old = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + old].replace(before, before + after, 1) + b" " * (-(old + len(after)) % 8)
    path.write_bytes(b"".join((len(text).to_bytes(8, "little"), text, memoryview(content)[8 + old :])))
    return seal


def seal_of(header: dict[str, Any]) -> str:
    """Return the SHA-256 of the text of a header."""
    return hashlib.sha256(json.dumps(header).encode()).hexdigest()


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any], str]:
    """Return the tensors, the header and the seal ("" for a file of format 1, which has no checksums).

    Raises CheckpointError that names the file, and where it can the tensor, if the file is missing, cut off,
    changed in any byte that matters, or of another kind.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} doesn't exist")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    except UNREADABLE as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file: {cut_off(path) or error}") from error
    if "numpygpt" not in metadata:
        raise CheckpointError(f"{path} wasn't written by this program: its header has no entry 'numpygpt'")
    if {name: text for name, text in metadata.items() if name != "numpygpt"} not in ({}, FORMAT):
        raise CheckpointError(f"{path} is damaged: its header has an entry that this program doesn't write")
    try:
        header = json.loads(metadata["numpygpt"])
        if header["format"] == 1 and "seal" not in header:
            return tensors, header, ""
        seal, sealed = header.pop("seal"), seal_of(header)
        expected = dict(header.pop("tensors"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its header can't be read ({error!r})") from error
    if seal != sealed:
        raise CheckpointError(f"{path} is damaged: its header doesn't have the checksum it was written with")
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in tensors:
            raise CheckpointError(f"{path} is damaged: the tensor {name} is missing")
        if name not in expected:
            raise CheckpointError(f"{path} is damaged: the tensor {name} wasn't written by this program")
        if checksum(tensors[name]) != expected[name]:
            raise CheckpointError(f"{path} is damaged: the tensor {name} doesn't have the checksum it was written with")
    return tensors, header, seal


class Mapped(Mapping[str, np.ndarray]):
    """The tensors of safetensors files, by name. Each is a view of its file, in memory only as far and long as used."""

    def __init__(self, paths: Iterable[Path]):
        """Read the headers; CheckpointError if a file can't be read, or two hold a tensor of the same name."""
        self.places: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path in paths:
            try:
                with safetensors.safe_open(path, framework="numpy"):  # it compares the header with the file's length
                    header, start = header_of(path)
            except UNREADABLE as error:
                said = cut_off(path) if path.is_file() else "it doesn't exist"
                raise CheckpointError(f"{path} can't be read: {said or error}") from error
            for name, entry in header.items():
                if name in self.places:
                    raise CheckpointError(f"{path} holds the tensor {name}, and so does {self.places[name][0]}")
                self.places[name] = path, start, entry

    def __getitem__(self, name: str) -> np.ndarray:
        path, start, entry = self.places[name]
        if entry["dtype"] != "BF16" and entry["dtype"] not in DTYPES:
            readable = ", ".join((*DTYPES, "BF16"))
            raise CheckpointError(f"{path}: the tensor {name} is of dtype {entry['dtype']}; these are read: {readable}")
        dtype = need("ml_dtypes", "hf").bfloat16 if entry["dtype"] == "BF16" else DTYPES[entry["dtype"]]
        return np.memmap(path, dtype, "r", start + entry["data_offsets"][0], tuple(entry["shape"]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """Return the dtype, shape and offsets of each tensor of a file, and where the first of them begins.

    The format: 8 bytes hold the length of the JSON header, the header, then the tensors' bytes at its offsets.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def checksum(tensor: np.ndarray) -> str:
    """Return the SHA-256 of a tensor's dtype, shape and elements."""
    digest = hashlib.sha256(f"{tensor.dtype.str} {tensor.shape} ".encode())
    digest.update(np.ascontiguousarray(tensor).data.cast("B") if tensor.size else b"")
    return digest.hexdigest()


def cut_off(path: Path) -> str:
    """Say which tensor is the first that isn't wholly in the file; "" if that isn't what is wrong, or unknown."""
    try:
        header, start = header_of(path)
        there = path.stat().st_size - start
        ends = sorted((entry["data_offsets"][1], name) for name, entry in header.items())
        missing = [name for end, name in ends if end > there]
        return f"it was cut off within or before the tensor {missing[0]}" if missing else ""
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, MemoryError, RecursionError):
        return ""
