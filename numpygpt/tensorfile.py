"""A safetensors file whose every byte is vouched for: tensors, and a JSON object beside them, under checksums.

The object stands in the file's own header under the key "numpygpt". Its "tensors" are the SHA-256 of every tensor, and
its "seal" that of the rest of the object: the seal vouches for the whole file and is the file's identity. No pickle
anywhere: reading a file runs none of it. Any program that reads safetensors can open it.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy


class CheckpointError(ValueError):
    """A file or folder that can't be read as ours; the message is one line and names the file and the tensor."""


def write(path: Path, tensors: dict[str, np.ndarray], header: dict[str, Any]) -> str:
    """Write arrays by name, and `header` (anything JSON holds); return the seal."""
    header = {**header, "tensors": {name: checksum(tensor) for name, tensor in tensors.items()}}
    seal = seal_of(header)
    path.write_bytes(safetensors.numpy.save(tensors, {"numpygpt": json.dumps({**header, "seal": seal})}))
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
    except (safetensors.SafetensorError, OSError, TypeError, AttributeError, MemoryError) as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file: {cut_off(path) or error}") from error
    if "numpygpt" not in metadata:
        raise CheckpointError(f"{path} wasn't written by this program: its header has no entry 'numpygpt'")
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


def checksum(tensor: np.ndarray) -> str:
    """Return the SHA-256 of a tensor's dtype, shape and elements."""
    digest = hashlib.sha256(f"{tensor.dtype.str} {tensor.shape} ".encode())
    digest.update(np.ascontiguousarray(tensor).data.cast("B") if tensor.size else b"")
    return digest.hexdigest()


def cut_off(path: Path) -> str:
    """Say which tensor is the first that isn't wholly in the file; "" if that isn't what is wrong, or unknown.

    The format: 8 bytes hold the length of the JSON header, the header, then the tensors' bytes at its offsets.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        there = path.stat().st_size - 8 - length
        ends = sorted((entry["data_offsets"][1], name) for name, entry in header.items() if name != "__metadata__")
        missing = [name for end, name in ends if end > there]
        return f"it was cut off within or before the tensor {missing[0]}" if missing else ""
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, MemoryError, RecursionError):
        return ""
