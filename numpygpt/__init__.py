"""A Transformer language model in pure NumPy, with every gradient derived by hand."""

from numpygpt.config import TransformerConfig
from numpygpt.layers import *  # noqa: F403
from numpygpt.layers import __all__ as layers_all
from numpygpt.model import TransformerLM
from numpygpt.module import Module, Parameter
from numpygpt.optim import Adam, AdamW, clip_grad_norm, cosine_schedule

__all__ = [
    "Adam",
    "AdamW",
    "Module",
    "Parameter",
    "TransformerConfig",
    "TransformerLM",
    "clip_grad_norm",
    "cosine_schedule",
    *layers_all,
]
