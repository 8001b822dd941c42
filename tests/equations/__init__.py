"""The equations of the docstrings, written once more in Python: the docstring of a function is its LaTeX.

Each file here holds those of the source file of the same name. Names are those of the code: dx is x with a bar, and
v_ and t_ are arrays of indices. A class holds the equations `of` a layer. `given` is what they take for granted, as
symbols; `cases` are given too, in turns; `held` is what a proof has in place of it: a shift held fixed, or an
activation of which nothing is known. `output` is what gradients are taken of, unless one says otherwise. `code` asks
the layer the same. symbolic.py explains the rest.
"""

from equations.activation import GELU, Activation, GELUByTanh, ReLU, Sigmoid, SiLU
from equations.attention import Attention, MultiHeadAttention
from equations.block import DecoderBlock
from equations.cross_entropy import CrossEntropy
from equations.dropout import Dropout
from equations.embedding import Embedding
from equations.feedforward import GLU, FeedForward, SwiGLU
from equations.linear import Linear
from equations.lora import LoRALinear
from equations.norm import LayerNorm, RMSNorm
from equations.optim import Adam, AdamW
from equations.position import LearnedPositions, RoPE, SinusoidalPositions
from equations.softmax import Softmax

__all__ = [
    "GELU",
    "GLU",
    "Activation",
    "Adam",
    "AdamW",
    "Attention",
    "CrossEntropy",
    "DecoderBlock",
    "Dropout",
    "Embedding",
    "FeedForward",
    "GELUByTanh",
    "LayerNorm",
    "LearnedPositions",
    "Linear",
    "LoRALinear",
    "MultiHeadAttention",
    "RMSNorm",
    "ReLU",
    "RoPE",
    "SiLU",
    "Sigmoid",
    "SinusoidalPositions",
    "Softmax",
    "SwiGLU",
]
