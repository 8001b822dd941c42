"""What is timed: models, their starting weights and their batches, the same for all contenders."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np

from numpygpt.array import Array
from numpygpt.config import TransformerConfig
from numpygpt.layers.block import make_ffn
from numpygpt.model import TransformerLM

Weights = dict[str, Array]
SEED = 0
LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.99), 1e-8, 0.1, 1.0  # of AdamW, decay on matrices alone; clipping

DRESSES: dict[str, dict[str, Any]] = {
    "default": {},
    "gpt2": {
        "norm": "layernorm",
        "ffn": "gelu_tanh",
        "positions": "learned",
        "bias": True,
        "tie_embeddings": True,
        "init": "gpt2",
    },
}


@dataclasses.dataclass(frozen=True)
class Size:
    """A model, and the number of sequences in a batch."""

    name: str
    config: TransformerConfig
    batch_size: int

    @property
    def tokens(self) -> int:
        """The number of targets in a step."""
        return self.batch_size * self.config.context_length

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Make a size of what dataclasses.asdict made of one."""
        return cls(**fields | {"config": TransformerConfig.from_dict(fields["config"])})


def make_size(
    name: str, layers: int, heads: int, width: int, context: int, batch: int, vocabulary: int, dress: str = "default"
) -> Size:
    """Return a size, its d_ff written out."""
    config = TransformerConfig(vocabulary, context, width, layers, heads, **DRESSES[dress])
    d_ff = dict(make_ffn(config, np.float32, SEED).named_parameters())["w1.weight"].shape[0]
    return Size(name, dataclasses.replace(config, d_ff=d_ff), batch)


SHAPES = {  # layers, heads, width, context, batch, vocabulary
    "S": (4, 4, 128, 64, 12, 65),
    "M": (6, 6, 384, 256, 8, 65),
    "L": (4, 16, 512, 256, 4, 10_000),
    "G": (12, 12, 768, 64, 4, 50_257),
}


def save_weights(size: Size, path: Path) -> None:
    """Write the starting weights to a file."""
    np.savez(path, **TransformerLM(size.config, rng=SEED).state_dict())


def load_weights(path: str) -> Weights:
    """Return what save_weights wrote."""
    with np.load(path) as file:
        return dict(file)


def batches(size: Size) -> Iterator[tuple[Array, Array]]:
    """Return an endless row of inputs and targets: eight batches of random ids, drawn beforehand, over and over."""
    shape = (8, size.batch_size, size.config.context_length + 1)
    ids = np.random.default_rng(SEED).integers(size.config.vocab_size, size=shape)
    return itertools.cycle([(x[:, :-1].copy(), x[:, 1:].copy()) for x in ids])
