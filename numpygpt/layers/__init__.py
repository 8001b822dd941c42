"""The layers, one idea a file: what it computes, the derivation of its gradient, and the lines that compute it."""

from numpygpt.layers.activation import GELU, ReLU, Sigmoid, SiLU
from numpygpt.layers.attention import MultiHeadAttention, ScaledDotProductAttention
from numpygpt.layers.block import DecoderBlock
from numpygpt.layers.cross_entropy import CrossEntropy
from numpygpt.layers.dropout import Dropout
from numpygpt.layers.embedding import Embedding
from numpygpt.layers.feedforward import GLU, FeedForward, SwiGLU
from numpygpt.layers.linear import Linear
from numpygpt.layers.lora import LoRALinear
from numpygpt.layers.norm import LayerNorm, RMSNorm
from numpygpt.layers.position import LearnedPositions, RotaryPositionalEmbedding, SinusoidalPositions
from numpygpt.layers.softmax import Softmax

__all__ = [
    "GELU",
    "GLU",
    "CrossEntropy",
    "DecoderBlock",
    "Dropout",
    "Embedding",
    "FeedForward",
    "LayerNorm",
    "LearnedPositions",
    "Linear",
    "LoRALinear",
    "MultiHeadAttention",
    "RMSNorm",
    "ReLU",
    "RotaryPositionalEmbedding",
    "ScaledDotProductAttention",
    "SiLU",
    "Sigmoid",
    "SinusoidalPositions",
    "Softmax",
    "SwiGLU",
]
