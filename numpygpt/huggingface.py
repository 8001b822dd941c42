"""Folders as Hugging Face has them: real models, opened and handed back.

    SmolLM2-135M/
        config.json              the model's parts and sizes (`hf_config.py`)
        model.safetensors        its weights (`hf_weights.py`), or several files of them, named by
        model.safetensors.index.json

Of these, `load` makes a model of ours: Llama's family and GPT-2. What `save` writes is one of our checkpoints, for
their weights are such a file already (`checkpoint.py`): transformers opens it, and so does `load`.
"""

import json
from pathlib import Path

import numpy as np

from numpygpt import checkpoint, hf_config, hf_weights
from numpygpt.model import TransformerLM
from numpygpt.tensorfile import CheckpointError, Mapped

INDEX = f"{checkpoint.MODEL}.index.json"


def load(folder: str | Path, *, dtype: np.typing.DTypeLike = np.float32) -> TransformerLM:
    """Return the model in a Hugging Face folder, in evaluation mode and of the given dtype.

    The files are mapped into memory and converted tensor by tensor, from float64, float32, float16 or bfloat16 (extra
    "hf"): no more is needed than the model and its largest tensor. Rotary pairs are brought to the layout
    "interleaved", which is exact. Raises CheckpointError, of one line that names the file and the key or tensor, if
    something is missing, damaged, unknown, or asks for what this engine lacks; nothing is ignored that could change a
    logit.
    """
    folder = Path(folder)
    config = hf_config.read(folder / checkpoint.CONFIG)
    tensors = open_tensors(folder)
    model = TransformerLM.blank(config, dtype=dtype)
    try:
        hf_weights.fill(model, tensors)
    except ValueError as error:
        raise CheckpointError(f"{folder} doesn't hold the weights of its {checkpoint.CONFIG}: {error}") from error
    return model.eval()


def open_tensors(folder: Path) -> Mapped:
    """Return the tensors in a folder, of one file or of those that its index names."""
    path, index = folder / checkpoint.MODEL, folder / INDEX
    if path.is_file():
        return Mapped([path])
    if not index.is_file():
        raise CheckpointError(
            f"{path} doesn't exist, nor does {INDEX}; other formats can run code when they are read, so have the model "
            "saved as safetensors"
        )
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        files = sorted(set(weight_map.values()))
        if strange := [name for name in files if Path(name).name != name]:
            raise ValueError(f"it names the file {strange[0]!r}, which isn't in this folder")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} is no index of tensors: {error}") from error
    tensors = Mapped(folder / name for name in files)
    if wrong := sorted(tensors.keys() ^ weight_map.keys()):
        raise CheckpointError(f"{index} and its files differ in the tensor {wrong[0]}: one has it, the other hasn't")
    return tensors


def save(folder: str | Path, model: TransformerLM) -> None:
    """Make `folder`, which `transformers.AutoModelForCausalLM.from_pretrained` opens.

    ValueError names what Hugging Face lacks, if it has no such models; FileExistsError if the folder holds something
    already. Its config has one dropout for GPT-2, and none for Llama: theirs acts elsewhere.
    """
    if hf_config.family(model.config) is None:
        fields = min(hf_config.misfits(model.config).values(), key=len)
        said = ", ".join(f"{name} = {getattr(model.config, name)!r}" for name in fields)
        raise ValueError(f"Hugging Face's Llama and GPT-2 have no {said}; save the model by checkpoint.save")
    checkpoint.save(folder, model)
