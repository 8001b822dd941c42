"""A moment of a run, in a folder: what the model has learned, and all that is needed to go on from there.

    runs/shakespeare/                the run: config.json, metrics.jsonl, tokenizer.json, and
        step-00000500/               a checkpoint
            model.safetensors        weights, and in its header format version, TransformerConfig and `state`
            config.json              Hugging Face's, if it has such models (a Llama or a GPT-2)
            training.safetensors     the optimiser's moments, and the adapters of a model that has them
            tokenizer.json
        step-00001000/

Where Hugging Face has such models, the weights are named and laid out as there (`hf_weights.py`), so that transformers
opens a checkpoint as it is; there is no second format to convert to. The moments keep our names.

Why a folder each: the files of one moment must never meet those of another, and no file system replaces several files
in one move. A folder it does rename in one. So each checkpoint is written and fsynced under a temporary name, then
renamed to one that didn't exist; nothing is ever written over, and older ones are deleted after that only. Whatever
carries a checkpoint's name is therefore whole, unless the disk damaged it, and this the checksums find.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from numpygpt import durable, hf_config, hf_weights, tensorfile
from numpygpt.adapters import adapter_state, add_lora, describe_lora, fingerprint, load_adapter_state, merged_state
from numpygpt.array import Array
from numpygpt.config import TransformerConfig
from numpygpt.device import mover
from numpygpt.model import TransformerLM
from numpygpt.optim import Adam
from numpygpt.tensorfile import CheckpointError
from numpygpt.tokenizer import Tokenizer

FORMAT = 3  # 2 had our names for all weights, 1 neither checksums nor training.safetensors; they are still read
MODEL, TRAINING, TOKENIZER, CONFIG = "model.safetensors", "training.safetensors", "tokenizer.json", "config.json"
ADAPTER = "adapter."  # before the name of an adapter, in the file of moments


def save(
    folder: str | Path,
    model: TransformerLM,
    optimizer: Adam | None = None,
    state: dict[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Make the checkpoint `folder`: the model, and what else is given, in one move.

    The weights of a model with adapters are those of the merged one; the adapters themselves lie beside the moments.
    `state` is anything JSON holds; the tokenizer's fingerprint is added to it as "tokenizer". Raises FileExistsError
    if `folder` holds something already, and OSError if the disk refuses; then nothing is left behind.
    """
    to_host = mover("cpu")
    weights = {name: to_host(value) for name, value in merged_state(model).items()}
    state, family = dict(state or {}), hf_config.family(model.config)
    header = {"format": FORMAT, "config": dataclasses.asdict(model.config), "state": state, "family": family}
    with durable.new_folder(Path(folder)) as new:
        if family is not None:
            d_ff = weights["layers.0.ffn.w1.weight"].shape[0]
            config = hf_config.to_theirs(model.config, d_ff, str(model.flat.value.dtype))
            weights = hf_weights.to_theirs(model.config, weights)
            (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            header[checksum_of(CONFIG)] = sha256(new / CONFIG)
        if tokenizer is not None:
            tokenizer.save(new)
            state["tokenizer"] = tokenizer.fingerprint
            header[checksum_of(TOKENIZER)] = sha256(new / TOKENIZER)
        seal = tensorfile.write(new / MODEL, weights, header)
        if optimizer is not None:
            adapters = {ADAPTER + name: value for name, value in adapter_state(model).items()}
            training = {name: to_host(value) for name, value in (optimizer.state_dict() | adapters).items()}
            header = {"format": FORMAT, "model": seal, "lora": describe_lora(model)}
            tensorfile.write(new / TRAINING, training, header)


def load(folder: str | Path) -> tuple[TransformerLM, dict[str, Any]]:
    """Return the model saved in `folder`, in evaluation mode and the dtype it was saved in, and its state.

    `folder` is a checkpoint, or a run, whose newest checkpoint is taken. Raises CheckpointError if there is none, or
    if it is damaged or of another kind.
    """
    model, header, _ = read_model(find(folder) / MODEL)
    return model.eval(), header["state"]


def load_optimizer(folder: str | Path, optimizer: Adam) -> None:
    """Give `optimizer`, made for the loaded model, the moments saved beside it.

    Raises CheckpointError, and changes nothing, if they are missing, damaged or another model's.
    """
    folder = find(folder)
    _, _, seal = tensorfile.read(folder / MODEL)
    moments, _, _ = read_training(folder / TRAINING, seal)
    give_moments(folder / TRAINING, moments, optimizer)


def load_adapters(folder: str | Path, model: TransformerLM) -> None:
    """Give `model`, the one that training began with, the adapters saved in `folder`, to go on with them.

    Raises CheckpointError if they are missing, damaged or another model's.
    """
    folder = find(folder)
    _, _, seal = tensorfile.read(folder / MODEL)
    _, adapters, lora = read_training(folder / TRAINING, seal)
    if lora is None:
        raise CheckpointError(f"{folder} holds no adapters")
    if lora["base"] != fingerprint(model):
        raise CheckpointError(f"the adapters in {folder} were trained beside another model than the one given")
    give_adapters(folder / TRAINING, adapters, lora, model)


def check(folder: Path) -> None:
    """Raise CheckpointError unless training can go on from this checkpoint: every file whole, and of one moment."""
    model, header, seal = read_model(folder / MODEL)
    for name in (CONFIG, TOKENIZER):
        path, expected = folder / name, header.get(checksum_of(name))
        if expected and not path.is_file():
            raise CheckpointError(f"{path} doesn't exist")
        if expected and sha256(path) != expected:
            raise CheckpointError(f"{path} is damaged: it doesn't have the checksum it was written with")
    moments, adapters, lora = read_training(folder / TRAINING, seal)
    if lora is not None:
        give_adapters(folder / TRAINING, adapters, lora, model)
    give_moments(folder / TRAINING, moments, Adam(model.parameters()))


def read_model(path: Path) -> tuple[TransformerLM, dict[str, Any], str]:
    """Return the model in a file, the file's header and its seal; CheckpointError if it can't be."""
    tensors, header, seal = tensorfile.read(path)
    try:
        if header["format"] not in (1, 2, FORMAT):
            raise ValueError(f"it has format {header['format']!r}, and this program reads 1 to {FORMAT}")
        config, state = TransformerConfig.from_dict(header["config"]), header["state"]
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) != 1:
            raise ValueError(f"its tensors have dtypes {sorted(map(str, dtypes))}, not one")
        if not isinstance(state, dict):
            raise ValueError(f"its state is {state!r}, not a dict")
        model = TransformerLM.blank(config, dtype=dtypes.pop())
        if header.get("family") is None:
            model.load_state_dict(tensors)
        else:
            hf_weights.fill(model, tensors)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path} holds no model of ours: {error}") from error
    return model, header, seal


def read_training(path: Path, seal: str) -> tuple[dict[str, Array], dict[str, Array], dict[str, Any] | None]:
    """Return the moments, the adapters and what those are, of a file written with the model of this seal.

    CheckpointError if it was written with another one.
    """
    tensors, header, _ = tensorfile.read(path)
    if header.get("model") != seal:
        raise CheckpointError(f"{path} belongs to another {MODEL} than the one beside it")
    adapters = {name.removeprefix(ADAPTER): tensors.pop(name) for name in list(tensors) if name.startswith(ADAPTER)}
    return tensors, adapters, header.get("lora")


def give_adapters(path: Path, adapters: dict[str, Array], lora: dict[str, Any], model: TransformerLM) -> None:
    """Add adapters to `model`, with the values read from `path`; CheckpointError if they don't fit."""
    try:
        add_lora(model, lora["rank"], lora["alpha"], rng=0)
        load_adapter_state(model, adapters)
    except ValueError as error:
        raise CheckpointError(f"{path} doesn't fit this model: {error}") from error


def give_moments(path: Path, moments: dict[str, Array], optimizer: Adam) -> None:
    """Give `optimizer` the moments read from `path`; CheckpointError if they don't fit."""
    try:
        optimizer.load_state_dict(moments)
    except ValueError as error:
        raise CheckpointError(f"{path} doesn't fit this optimiser: {error}") from error


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def checksum_of(name: str) -> str:
    """Return the key of the header under which the checksum of the file of this name stands."""
    return f"{name.removesuffix('.json')}_sha256"


def of_step(run: Path, step: int) -> Path:
    """Return the folder of a run's checkpoint after `step` updates."""
    return run / f"step-{step:08d}"


def checkpoints(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, newest first, without a look inside."""
    return sorted((path for path in run.glob("step-*") if path.name[5:].isdigit()), key=lambda p: -int(p.name[5:]))


def find(folder: str | Path) -> Path:
    """Return `folder` if it is a checkpoint, and the newest checkpoint if it is a run; else CheckpointError."""
    folder = Path(folder)
    if (folder / MODEL).exists():
        return folder
    if found := checkpoints(folder):
        return found[0]
    raise CheckpointError(f"{folder / MODEL} doesn't exist: give the folder of a trained model")


def newest_whole(run: Path) -> tuple[Path | None, dict[Path, CheckpointError]]:
    """Return a run's newest checkpoint that training can go on from, and what is wrong with those after it."""
    damaged = {}
    for folder in checkpoints(run):
        try:
            check(folder)
        except CheckpointError as error:
            damaged[folder] = error
        else:
            return folder, damaged
    return None, damaged


def prune(run: Path, keep: int, best: Path) -> None:
    """Delete all but the newest `keep` checkpoints and the `best`, and what crashes have left."""
    durable.remove_leftovers(run)
    for folder in checkpoints(run)[keep:]:
        if folder != best:
            durable.remove_folder(folder)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that its name is free for a whole one; return its new place."""
    aside = folder.with_name(f"damaged-{folder.name}")
    if aside.exists():
        durable.remove_folder(aside)
    return folder.rename(aside)
