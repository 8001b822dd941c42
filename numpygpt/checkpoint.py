"""What a model learned, in a folder: `model.safetensors`, written whole or not at all.

The file holds the parameters by name, and in its header, under the key "numpygpt", a JSON object of format version,
TransformerConfig and a small `state`. No pickle anywhere: reading a file runs none of it.
"""

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import safetensors
import safetensors.numpy

from numpygpt.array import mover
from numpygpt.config import TransformerConfig
from numpygpt.model import TransformerLM

FORMAT = 1
FILE = "model.safetensors"


class CheckpointError(ValueError):
    """A folder that can't be read as a model; the message is one line and names the file."""


def save(folder: str | Path, model: TransformerLM, state: dict[str, Any] | None = None) -> None:
    """Write `model` and `state` (anything JSON holds) into `folder`, which is made if need be.

    Until the new file is whole and on the disk, the old one stays; then it is replaced in one move.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    to_host = mover("cpu")
    tensors = {name: to_host(value) for name, value in model.state_dict().items()}
    header = {"format": FORMAT, "config": dataclasses.asdict(model.config), "state": state or {}}
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=FILE, suffix=".tmp")
    try:
        with open(handle, "wb") as file:
            file.write(safetensors.numpy.save(tensors, {"numpygpt": json.dumps(header)}))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner reads
        os.replace(temporary, folder / FILE)
    except BaseException:
        os.unlink(temporary)
        raise


def check_writable(folder: str | Path) -> None:
    """Raise OSError unless `save` will be able to write into `folder`, which is made if need be."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / FILE).is_dir():
        raise IsADirectoryError(f"{folder / FILE} is a folder, where the model would be saved")
    with tempfile.TemporaryFile(dir=folder):
        pass


def load(folder: str | Path) -> tuple[TransformerLM, dict[str, Any]]:
    """Return the model saved in `folder`, in evaluation mode and the dtype it was saved in, and its state.

    Raises CheckpointError if the folder has no such file, or the file is damaged or of another kind.
    """
    path = Path(folder, FILE)
    if not path.is_file():
        raise CheckpointError(f"{path} doesn't exist: give the folder of a trained model")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    except (safetensors.SafetensorError, OSError, TypeError, AttributeError, MemoryError) as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file: {error}") from error
    if "numpygpt" not in metadata:
        raise CheckpointError(f"{path} wasn't written by this program: its header has no entry 'numpygpt'")
    try:
        header = json.loads(metadata["numpygpt"])
        if header["format"] != FORMAT:
            raise ValueError(f"it has format {header['format']!r}, and this program reads {FORMAT}")
        config, state = TransformerConfig.from_dict(header["config"]), header["state"]
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) != 1:
            raise ValueError(f"its tensors have dtypes {sorted(map(str, dtypes))}, not one")
        if not isinstance(state, dict):
            raise ValueError(f"its state is {state!r}, not a dict")
        model = TransformerLM(config, dtype=dtypes.pop(), rng=0)
        model.load_state_dict(tensors)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path} holds no model of ours: {error}") from error
    return model.eval(), state
