"""Memory and communication of data parallel training: the equations of docs/scaling.md, by their numbers there."""

import dataclasses

from numpygpt.config import TransformerConfig
from numpygpt.model import TransformerLM

VALUE = 4  # bytes of a float32
BLOCK = 64  # queries that causal attention takes at once


@dataclasses.dataclass(frozen=True)
class Network:
    """What a message costs: seconds, whatever its size, and bytes a second."""

    latency: float
    bandwidth: float

    def all_reduce(self, parameters: int, ranks: int) -> float:
        """Return the seconds of one all-reduce of the gradients."""
        return 2 * (ranks - 1) * self.latency + ring_bytes(parameters, ranks) / self.bandwidth  # (4)


def parameters(config: TransformerConfig) -> int:
    """Return the number of weights."""
    return TransformerLM.blank(config).flat.value.size


def state_bytes(parameters: int) -> int:
    """Return the bytes of weights, gradients and two moments."""
    return 4 * VALUE * parameters  # (1), its first term


def activation_values(config: TransformerConfig) -> float:
    """Return how many numbers a default model keeps for backward, for each token of full-length sequences."""
    width, heads, ffn, context = config.d_model, config.num_heads, config.d_ff, config.context_length
    assert ffn is not None
    attended = min(context, (context + BLOCK) / 2)  # keys that a query's block meets, on average
    layer = 9 * width + 4 * ffn + heads * (attended + 1) + 2
    return config.num_layers * layer + 2 * width + 1 + config.vocab_size  # (2)


def ring_bytes(parameters: int, ranks: int) -> float:
    """Return the bytes that a rank sends, and receives, in an all-reduce by a ring."""
    return 2 * (ranks - 1) / ranks * VALUE * parameters  # (3)


def efficiency(alone: float, all_reduce: float) -> float:
    """Return the part of a step in which a rank computes, given the seconds of either."""
    return alone / (alone + all_reduce)  # (5)
