"""What a model is made of."""

import dataclasses
import math
from typing import Any, Self, TypeVar

import numpy as np

from numpygpt.array import check_positive

CHOICES = {
    "rope_layout": ("interleaved", "half"),
    "norm": ("rmsnorm", "layernorm"),
    "norm_position": ("pre", "post"),
    "ffn": ("swiglu", "glu", "geglu", "reglu", "bilinear", "gelu", "gelu_tanh", "relu", "silu"),
    "positions": ("rope", "sinusoidal", "learned", "none"),
    "init": ("glorot", "gpt2"),
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How RoPE's frequencies are lowered for texts longer than a model was first trained on (`layers/position.py`).

    "linear" divides all of them by `factor`; "llama3" only the slow ones, and needs the other fields for that. Checked
    when made: ValueError names the field.
    """

    kind: str
    factor: float
    low_freq_factor: float = 0.0  # turns within the original context, up to which a frequency is slow
    high_freq_factor: float = 0.0  # and from which on it is fast
    original_context: int = 0  # tokens

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"rope_scaling's kind must be one of linear, llama3, not {self.kind!r}")
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_context"):
            number = getattr(self, name)
            if self.kind == "linear" and name != "factor":
                if number != 0:
                    raise ValueError(f"rope_scaling's {name} is of kind llama3 alone, so it can't be {number!r}")
            elif not (is_real(number) and math.isfinite(number) and number > 0):
                raise ValueError(f"rope_scaling's {name} must be a positive number, not {number!r}")
        if self.kind == "llama3":
            check_positive(original_context=self.original_context)
            if not self.low_freq_factor < self.high_freq_factor:
                raise ValueError(
                    f"rope_scaling's low_freq_factor {self.low_freq_factor!r} must be below its high_freq_factor "
                    f"{self.high_freq_factor!r}"
                )


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape and the parts of a TransformerLM. Checked when made: ValueError names the field.

    The defaults are the modern stack (RMSNorm, RoPE, SwiGLU, no biases). GPT-2's dress is norm="layernorm",
    ffn="gelu_tanh", positions="learned", bias=True, tie_embeddings=True, init="gpt2".
    """

    vocab_size: int
    context_length: int  # the longest sequence
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None  # num_heads unless given; must divide it
    d_ff: int | None = None  # 4 d_model, or 8/3 d_model rounded up to 64 for a gated ffn, unless given
    rope_theta: float = 10000.0
    rope_layout: str = "interleaved"
    rope_scaling: RopeScaling | None = None
    norm: str = "rmsnorm"
    norm_position: str = "pre"  # "post" is the original of 2017, without a final norm
    norm_eps: float = 1e-5
    ffn: str = "swiglu"
    positions: str = "rope"
    bias: bool = False  # of all linear maps but the last, and of LayerNorm
    tie_embeddings: bool = False  # the last linear map uses the token embedding's array
    dropout: float = 0.0  # on the embeddings and on what each sublayer adds
    init: str = "glorot"  # "gpt2" is the right one with tied embeddings

    def __post_init__(self) -> None:
        names = ("vocab_size", "context_length", "d_model", "num_layers", "num_heads")
        sizes = {name: getattr(self, name) for name in names}
        for name in ("num_kv_heads", "d_ff"):
            if getattr(self, name) is not None:
                sizes[name] = getattr(self, name)
        check_positive(**sizes)
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        for name in ("bias", "tie_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        for name, number in (("rope_theta", self.rope_theta), ("norm_eps", self.norm_eps)):
            if not (is_real(number) and math.isfinite(number) and number > 0):
                raise ValueError(f"{name} must be a positive number, not {number!r}")
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise ValueError(f"rope_scaling must be a RopeScaling or None, not {self.rope_scaling!r}")
        if not (is_real(self.dropout) and 0 <= self.dropout < 1):
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout!r}")
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads {self.num_heads} doesn't divide d_model {self.d_model}")
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads {self.num_kv_heads} doesn't divide num_heads {self.num_heads}")
        d_k = self.d_model // self.num_heads
        if self.positions == "rope" and d_k % 2:
            raise ValueError(
                f"positions='rope' turns pairs of features, but d_model / num_heads = {d_k} is odd; "
                "change d_model or num_heads, or choose other positions"
            )

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Make a config from a dict of its fields; an unknown or missing one is a ValueError that names it."""
        if isinstance(scaling := fields.get("rope_scaling"), dict):
            fields = fields | {"rope_scaling": made_of(RopeScaling, scaling, "rope_scaling field")}
        return made_of(cls, fields, "config field")


T = TypeVar("T")


def made_of(cls: type[T], fields: dict[str, Any], what: str) -> T:
    """Make an object of a dataclass from a dict of its fields; ValueError names those unknown or missing."""
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(fields.keys() - known.keys()):
        raise ValueError(f"unknown {what} {', '.join(unknown)}")
    required = {name for name, f in known.items() if f.default is dataclasses.MISSING}
    if missing := sorted(required - fields.keys()):
        raise ValueError(f"missing {what} {', '.join(missing)}")
    return cls(**fields)


def is_real(number: object) -> bool:
    """Whether this is a real number and no bool."""
    return isinstance(number, int | float | np.integer | np.floating) and not isinstance(number, bool)
