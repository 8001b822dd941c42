"""What is compared: every layer in all its kinds, models in several dresses, and ids that must be refused."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.sizes import DRESSES
from numpygpt.array import Array
from numpygpt.layers import (
    GELU,
    GLU,
    CrossEntropy,
    DecoderBlock,
    Dropout,
    Embedding,
    FeedForward,
    LayerNorm,
    LearnedPositions,
    Linear,
    LoRALinear,
    MultiHeadAttention,
    ReLU,
    RMSNorm,
    RotaryPositionalEmbedding,
    ScaledDotProductAttention,
    Sigmoid,
    SiLU,
    SinusoidalPositions,
    Softmax,
    SwiGLU,
)
from numpygpt.model import TransformerConfig, TransformerLM

Case = tuple[Any, ...]  # a function that makes a layer or a model, and the inputs of its forward, on the host

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 5, 8)).astype(np.float32)
Q, K = (RNG.standard_normal((2, 3, n, 8)).astype(np.float32) for n in (4, 5))
V = RNG.standard_normal((2, 3, 5, 6)).astype(np.float32)
IDS = RNG.integers(0, 7, (2, 5))
T = np.array([0, 2, 3, 7, 9])
EACH_T = np.array([[0, 0, 1, 2, 3], [4, 5, 6, 7, 8]])
MASK = RNG.random((2, 5, 5)) < 0.5
BLIND = np.array([[True] * 5, [False] * 5, [True, False] * 2 + [False], [False] * 5])
CAUSAL = BLIND[:, :1] | np.tri(4, 5, dtype=bool)
LONG = RNG.standard_normal((2, 150, 8)).astype(np.float32)  # of more queries than a block of causal attention takes


def rope(layout: str = "interleaved", dtype: np.typing.DTypeLike = np.float32) -> RotaryPositionalEmbedding:
    """Return a RoPE for heads of four features."""
    return RotaryPositionalEmbedding(10000.0, 4, 12, layout, dtype=dtype)


def block(**options: Any) -> DecoderBlock:
    """Return a block of eight features."""
    config = TransformerConfig(7, 12, 8, 1, 2, **{"d_ff": 12, "dropout": 0.2} | options)
    return DecoderBlock(config, rng=0)


LAYERS: dict[str, Case] = {
    "embedding": (lambda: Embedding(7, 4, rng=0), IDS),
    "embedding, one id": (lambda: Embedding(7, 4, rng=0), np.array(3)),
    "linear": (lambda: Linear(8, 6, rng=0), X),
    "linear, bias": (lambda: Linear(8, 6, True, rng=0), X),
    "linear, one axis": (lambda: Linear(8, 6, True, rng=0), X[0, 0]),
    "lora": (lambda: LoRALinear(Linear(8, 6, True, rng=0), 3, rng=1), X),
    "layernorm": (lambda: LayerNorm(8), X),
    "layernorm, no bias": (lambda: LayerNorm(8, bias=False), X),
    "layernorm, float16": (lambda: LayerNorm(8, dtype=np.float16), X.astype(np.float16)),
    "rmsnorm": (lambda: RMSNorm(8), X),
    "rmsnorm, float16": (lambda: RMSNorm(8, dtype=np.float16), X.astype(np.float16)),
    "rmsnorm, one axis": (lambda: RMSNorm(8), X[0, 0]),
    "relu": (ReLU, X),
    "sigmoid": (Sigmoid, X),
    "sigmoid, far out": (Sigmoid, 1000 * X),
    "silu": (SiLU, X),
    "silu, far out": (SiLU, 1000 * X),
    "gelu": (GELU, X),
    "gelu, far out": (GELU, 1000 * X),
    "gelu, float64": (GELU, X.astype(np.float64)),
    "gelu, tanh": (lambda: GELU("tanh"), X),
    "gelu, tanh, far out": (lambda: GELU("tanh"), 1000 * X),
    "dropout": (lambda: Dropout(0.3, 0), X),
    "dropout, evaluation": (lambda: Dropout(0.3, 0).eval(), X),
    "feed-forward": (lambda: FeedForward(8, bias=True, rng=0), X),
    "glu": (lambda: GLU(8, 12, bias=True, rng=0), X),
    "bilinear": (lambda: GLU(8, 12, "identity", rng=0), X),
    "swiglu": (lambda: SwiGLU(8, rng=0), X),
    "sinusoidal": (lambda: SinusoidalPositions(12, 8), X, T),
    "sinusoidal, odd": (lambda: SinusoidalPositions(12, 7), X[..., :7], EACH_T),
    "learned": (lambda: LearnedPositions(12, 8, rng=0), X, T),
    "learned, each": (lambda: LearnedPositions(12, 8, rng=0), X, EACH_T),
    "rope": (rope, X[..., :4], T),
    "rope, half": (lambda: rope("half"), X[..., :4], EACH_T),
    "softmax": (Softmax, X),
    "softmax, other axis": (lambda: Softmax(0), X),
    "softmax, hidden": (Softmax, np.where(BLIND, np.float32(1), -np.inf)),
    "attention": (ScaledDotProductAttention, Q, K, V),
    "attention, causal": (ScaledDotProductAttention, Q, K, V, CAUSAL),
    "attention, blind": (ScaledDotProductAttention, Q, K, V, BLIND),
    "heads": (lambda: MultiHeadAttention(8, 2, rng=0), X),
    "heads, no batch": (lambda: MultiHeadAttention(8, 2, rng=0), X[0]),
    "heads, grouped": (lambda: MultiHeadAttention(8, 2, 1, rope("half"), True, rng=0), X, T),
    "heads, masked": (lambda: MultiHeadAttention(8, 2, 1, rope(), rng=0), X, EACH_T, MASK),
    "heads, blocks": (lambda: MultiHeadAttention(8, 2, rng=0), LONG),
    "block": (block, X),
    "block, masked": (lambda: block(norm_position="post", norm="layernorm"), X, EACH_T, MASK),
    "cross-entropy": (CrossEntropy, X, IDS),
    "cross-entropy, one": (CrossEntropy, X[0, 0], np.array(7)),
    "cross-entropy, ignore": (lambda: CrossEntropy(3), X, IDS),
    "cross-entropy, none left": (lambda: CrossEntropy(3), X, np.full_like(IDS, 3)),
    "cross-entropy, float16": (CrossEntropy, X.astype(np.float16), IDS),
}

BASE = {"vocab_size": 13, "context_length": 8, "d_model": 8, "num_layers": 2, "num_heads": 4, "dropout": 0.1}
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "gpt2": DRESSES["gpt2"],
    "glu": {"ffn": "glu", "d_ff": 12, "num_kv_heads": 2, "rope_layout": "half", "norm_position": "post"},
    "geglu": {"ffn": "geglu", "d_ff": 12, "positions": "sinusoidal", "norm": "layernorm"},
    "reglu": {"ffn": "reglu", "d_ff": 12, "positions": "none", "bias": True, "num_layers": 1},
    "bilinear": {"ffn": "bilinear", "d_ff": 12, "num_kv_heads": 1, "tie_embeddings": True},
    "gelu": DRESSES["gpt2"] | {"ffn": "gelu", "norm_position": "post"},
    "relu": {"ffn": "relu", "norm": "layernorm", "bias": True, "positions": "sinusoidal", "norm_position": "post"},
    "silu": {"ffn": "silu", "num_kv_heads": 2, "bias": True, "tie_embeddings": True, "dropout": 0.0},
}


def make_model(dtype: np.typing.DTypeLike = np.float32, **options: Any) -> TransformerLM:
    """Return a small model."""
    return TransformerLM(TransformerConfig(**BASE | options), dtype=dtype, rng=1)


MODEL_IDS = RNG.integers(0, 13, (3, 8))
REFUSED = ("token id", "target", "position")
BAD_IDS = (-1, 13, 2**40)


def refusals(bad: int, move: Callable[[Array], Array]) -> dict[str, list[Callable[[], Any]]]:
    """Return calls with an id outside 0..12 among good ones; what kind each is for must be named in its IndexError."""
    ids = np.zeros((2, 4), np.int64)
    ids[1, 2] = bad
    good, wrong, x = move(np.zeros((2, 4), np.int64)), move(ids), move(np.zeros((2, 4, 8), np.float32))
    return {
        "token id": [
            lambda: make_model().to(move).forward(wrong),
            lambda: Embedding(13, 4).to(move).forward(wrong),
        ],
        "target": [lambda: CrossEntropy().forward(move(np.zeros((2, 4, 13), np.float32)), wrong)],
        "position": [
            lambda: make_model().to(move).forward(good, wrong),
            lambda: SinusoidalPositions(13, 8).to(move).forward(x, wrong),
            lambda: LearnedPositions(13, 8).to(move).forward(x, wrong),
            lambda: RotaryPositionalEmbedding(10000.0, 4, 13).to(move).forward(x[..., :4], wrong),
        ],
    }
