"""What a run of a trained model starts from: its weights and its tokenizer, which settle what flags would."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from numpygpt import checkpoint, pretrained
from numpygpt.adapters import add_lora
from numpygpt.config import CHOICES, TransformerConfig
from numpygpt.corpus import DataError
from numpygpt.model import TransformerLM
from numpygpt.tokenizer import Tokenizer, load_tokenizer
from training.flags import LORA, TRAINED


def is_trained(init: str) -> bool:
    """Whether --init names a trained model, and not how to draw weights."""
    return init not in CHOICES["init"]


def fill_in(args: argparse.Namespace, values: dict[str, Any]) -> None:
    """Set those flags that aren't given."""
    for name, value in values.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def check_lora(args: argparse.Namespace, given: set[str]) -> None:
    """Raise ValueError if adapters are asked for beside weights that are drawn, or only their factor is given."""
    if args.lora is None and "lora_alpha" in given:
        raise ValueError("--lora-alpha goes with --lora RANK: give both, or neither")
    if args.lora is not None and not is_trained(args.init):
        raise ValueError(f"--lora adapts a trained model, and --init {args.init} is none: name one by --init")


def start_from(
    args: argparse.Namespace, found: Path | None, given: set[str], rng: np.random.Generator
) -> tuple[TransformerLM, Tokenizer]:
    """Return the model of --init, with adapters if they are asked for, and its tokenizer; fill in the flags it settles.

    If the run goes on from the checkpoint `found`, they are as they were there. Raises ValueError for a flag that
    contradicts the model, and ValueError, OSError or ImportError if the model can't be had.
    """
    shape = {field.name for field in dataclasses.fields(TransformerConfig)} & vars(args).keys()
    shape -= {"init", "context_length"}
    settled = sorted((shape | {"tokenizer", "vocab_size"}) & given)
    if settled and found is None:
        flag = "--" + settled[0].replace("_", "-")
        raise ValueError(f"{flag} is settled by the model of --init {args.init}: leave it out")
    if found is None or args.lora is not None:
        model, tokenizer = pretrained.load(args.init)[:2]
    else:
        model, tokenizer = checkpoint.load(found)[0], load_tokenizer(found)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise DataError(
            f"--init {args.init} has {model.config.vocab_size} tokens, its tokenizer {tokenizer.vocab_size}"
        )
    for name in shape:
        setattr(args, name, getattr(model.config, name))
    longest = model.config.context_length
    defaults = TRAINED | {"context_length": min(TRAINED["context_length"], longest)}
    fill_in(args, defaults if args.lora is None else defaults | LORA)
    if args.context_length > longest:
        raise ValueError(f"--context-length {args.context_length} is more than the {longest} of --init {args.init}")
    if args.lora is not None:
        if found is None:
            add_lora(model, args.lora, args.lora_alpha, rng=rng)
        else:
            checkpoint.load_adapters(found, model)
    return model, tokenizer
