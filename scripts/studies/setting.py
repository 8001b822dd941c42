"""On what text and at what size the studies train."""

import dataclasses
from typing import Any, TypeVar

import numpy as np

from numpygpt.array import check_positive
from numpygpt.config import TransformerConfig
from numpygpt.corpus import load_corpus
from numpygpt.data import CharTokenizer, Ids, split
from numpygpt.device import mover
from numpygpt.train import TrainConfig

T = TypeVar("T")
SEEDS = 5
LEAST_SEEDS = 3
FULL = {"d_model": 64, "num_layers": 2, "num_heads": 4, "context_length": 64}
QUICK = {"d_model": 16, "num_layers": 2, "num_heads": 2, "context_length": 8}
STEPS, QUICK_STEPS = 500, 4
BATCH, QUICK_BATCH = 16, 4
HELD_OUT, QUICK_HELD_OUT = 16_384, 128  # tokens of the held-out tenth on which a loss is taken


@dataclasses.dataclass(frozen=True)
class Setting:
    """The text, as ids, and how much is done with it. `quick` is a trial of the programs, which says nothing."""

    training: Ids
    validation: Ids
    vocab_size: int
    seeds: int = SEEDS
    given_steps: int | None = None
    quick: bool = False
    jobs: int = 1  # runs at a time
    device: str = "cpu"

    @classmethod
    def of(cls, corpus: str, seeds: int, steps: int | None, quick: bool, jobs: int, device: str = "cpu") -> "Setting":
        """Read a corpus, character by character.

        ValueError, DataError or ImportError, in one line, for what can't be used.
        """
        mover(device)
        check_positive(seeds=seeds, jobs=jobs, steps=STEPS if steps is None else steps)
        if seeds < LEAST_SEEDS:
            raise ValueError(f"seeds must be at least {LEAST_SEEDS}, or a spread means little, not {seeds}")
        text = load_corpus(corpus)
        tokenizer = CharTokenizer.train(text)
        tokens = tokenizer.encode(text).astype(np.uint16)
        context = (QUICK if quick else FULL)["context_length"]
        training, validation = split(tokens, 2 * context)
        validation = validation[: (QUICK_HELD_OUT if quick else HELD_OUT) + 1]
        return cls(training, validation, tokenizer.vocab_size, seeds, steps, quick, jobs, device)

    def pick(self, full: T, quick: T) -> T:
        """Return the one that is meant for this scale."""
        return quick if self.quick else full

    def steps(self, full: int = STEPS) -> int:
        """Return how many steps are made where `full` are meant."""
        return self.given_steps or self.pick(full, QUICK_STEPS)

    def model(self, **fields: Any) -> TransformerConfig:
        """Return the model all studies share, the default one but small, with other `fields`."""
        return TransformerConfig(**{"vocab_size": self.vocab_size, **self.pick(FULL, QUICK), **fields})

    def train(self, seed: int, **fields: Any) -> TrainConfig:
        """Return how it is trained, with other `fields`."""
        common = {"steps": self.steps(), "batch_size": self.pick(BATCH, QUICK_BATCH), "seed": seed}
        return TrainConfig(**{**common, **fields})
