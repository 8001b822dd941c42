"""Hugging Face's config.json, of the families whose parts are ours, and a TransformerConfig: each from the other.

A config is read in full or not at all. Every key is one that is understood here, or one that is known to change no
number (ids of special tokens, say), or it is refused by its name and value; so is a value that asks for what this
engine lacks. What acts in training alone is told by a warning: a model can be run without it.
"""

import dataclasses
import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from numpygpt.config import RopeScaling, TransformerConfig
from numpygpt.tensorfile import CheckpointError

LLAMA_FFN = {
    "silu": "swiglu",
    "swish": "swiglu",
    "sigmoid": "glu",
    "gelu": "geglu",
    "relu": "reglu",
    "linear": "bilinear",
}
GPT2_FFN = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

# Keys that change no logit: where the file comes from, how it is stored, special tokens, the output's form, speed,
# generation, other heads than that of a language model, and the start of training.
IRRELEVANT = {
    *("_name_or_path", "architectures", "transformers_version", "transformers.js_config", "is_llama_config"),
    *("dtype", "torch_dtype", "use_bfloat16", "tf_legacy_loss", "torchscript", "_attn_implementation_autoset"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "unk_token_id"),
    *("return_dict", "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores"),
    *("use_cache", "gradient_checkpointing", "chunk_size_feed_forward", "is_decoder", "tokenizer_class", "prefix"),
    *("finetuning_task", "id2label", "label2id", "problem_type", "task_specific_params", "num_labels", "_num_labels"),
    *("temperature", "top_k", "top_p", "typical_p", "num_beams", "num_beam_groups", "do_sample", "early_stopping"),
    *("length_penalty", "repetition_penalty", "diversity_penalty", "no_repeat_ngram_size", "bad_words_ids"),
    *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "num_return_sequences", "suppress_tokens"),
    *("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
    *("max_length", "min_length", "max_new_tokens", "summary_type", "summary_use_proj", "summary_activation"),
    *("summary_first_dropout", "summary_proj_to_labels", "initializer_range", "n_ctx"),
}
# Keys of which one value is this engine's way (a missing key has it too).
FIXED = {
    "pruned_heads": {},
    "tie_encoder_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "quantization_config": None,
    "auto_map": None,
}
FIXED_LLAMA = FIXED | {"pretraining_tp": 1, "rope_interleaved": False, "partial_rotary_factor": 1}
FIXED_GPT2 = FIXED | {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
}
REQUIRED = object()


class Keys:
    """The keys of a JSON object, each taken once: `done` refuses those that are left over."""

    def __init__(self, keys: dict[str, Any], prefix: str = ""):
        self.left, self.prefix = dict(keys), prefix

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """Return a key's value; ValueError if there is none, and no default."""
        if name not in self.left and default is REQUIRED:
            raise ValueError(f"{self.prefix}{name} is missing")
        return self.left.pop(name, default)

    def choose(self, name: str, choices: dict[str, str], default: Any = REQUIRED) -> str:
        """Return what the value of a key is called here; ValueError if it has no counterpart."""
        value = self.take(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self.lacking(name, value, f"it may be {', '.join(choices)}")
        return choices[value]

    def fix(self, values: dict[str, Any]) -> None:
        """Take each of these keys; ValueError unless it has this value (or null for a false one) or is missing."""
        for name, value in values.items():
            given = self.take(name, value)
            if given != value and (given or value):
                raise self.lacking(name, given, f"it may be {json.dumps(value)}")

    def lacking(self, name: str, value: Any, remedy: str) -> ValueError:
        """Return the error of a value that asks for what this engine lacks."""
        return ValueError(f"{self.prefix}{name} = {json.dumps(value)} is something this engine lacks; {remedy}")

    def done(self, irrelevant: Iterable[str] = ()) -> None:
        """Raise ValueError if keys are left over that aren't known to be irrelevant."""
        if unknown := sorted(self.left.keys() - set(irrelevant)):
            value = json.dumps(self.left[unknown[0]])
            raise ValueError(
                f"{self.prefix}{unknown[0]} = {value} isn't known here and may change what the model computes; take it "
                "out if it doesn't"
            )


def read(path: Path) -> TransformerConfig:
    """Return the config in a Hugging Face config.json; CheckpointError, which names the file, if it can't be."""
    if not path.is_file():
        raise CheckpointError(f"{path} doesn't exist: give the folder of a Hugging Face model")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            raise ValueError("it holds no JSON object")
        return from_theirs(fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} describes no model that can be run here: {error}") from error


def from_theirs(fields: dict[str, Any]) -> TransformerConfig:
    """Return the TransformerConfig that a Hugging Face config describes; ValueError names what can't be had."""
    keys = Keys(fields)
    model_type = keys.choose("model_type", {name: name for name in ("llama", "mistral", "gpt2")})
    config = gpt2_from_theirs(keys) if model_type == "gpt2" else llama_from_theirs(keys, model_type)
    keys.done(IRRELEVANT)
    return config


def llama_from_theirs(keys: Keys, model_type: str) -> TransformerConfig:
    """Return the config of a Llama or a Mistral.

    Mistral's queries see `sliding_window` tokens back. In texts no longer than that nothing is hidden, so the window
    bounds the context length.
    """
    keys.fix(FIXED_LLAMA)
    warn_of_dropout(keys, "attention_dropout")
    d_model, num_heads = keys.take("hidden_size"), keys.take("num_attention_heads")
    d_k, context_length = keys.take("head_dim", None), keys.take("max_position_embeddings")
    if d_k is not None and d_k * num_heads != d_model:
        raise keys.lacking("head_dim", d_k, f"hidden_size is {d_model} and num_attention_heads {num_heads}")
    bias, window = False, None
    if model_type == "llama":
        num_kv_heads = keys.take("num_key_value_heads", None)
        bias = keys.take("attention_bias", False)
        if keys.take("mlp_bias", False) != bias:
            raise keys.lacking("attention_bias", bias, "it must be what mlp_bias is")
    else:
        num_kv_heads, window = keys.take("num_key_value_heads", 8), keys.take("sliding_window", 4096)
        keys.fix({"layer_types": None})
    theta, scaling = rope_from_theirs(keys, context_length)
    return TransformerConfig(
        vocab_size=keys.take("vocab_size"),
        context_length=context_length if window is None else min(window, context_length),
        d_model=d_model,
        num_layers=keys.take("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        d_ff=keys.take("intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=keys.take("rms_norm_eps"),
        ffn=keys.choose("hidden_act", LLAMA_FFN, "silu"),
        bias=bias,
        tie_embeddings=keys.take("tie_word_embeddings", False),
    )


def rope_from_theirs(keys: Keys, context_length: int) -> tuple[float, RopeScaling | None]:
    """Return theta and the scaling, from `rope_theta` and `rope_scaling`, or `rope_parameters` (transformers 5)."""
    theta, old, new = (keys.take(name, None) for name in ("rope_theta", "rope_scaling", "rope_parameters"))
    if old is not None and new is not None:
        raise ValueError("there are both rope_scaling and rope_parameters; one must go")
    rope = Keys(new or old or {}, "rope_scaling: " if new is None else "rope_parameters: ")
    thetas = {x for x in (theta, rope.take("rope_theta", None)) if x is not None}
    if len(thetas) > 1:
        raise ValueError(f"rope_theta has two values, {sorted(thetas)}; one must go")
    rope.fix({"partial_rotary_factor": 1})
    kinds = {kind: kind for kind in ("default", "linear", "llama3")}
    kind = rope.choose("rope_type", kinds, rope.left.get("type", "default"))
    if (other := rope.take("type", kind)) != kind:
        raise ValueError(f"{rope.prefix}type is {other!r} and rope_type {kind!r}; one must go")
    scaling = None
    if kind == "linear":
        scaling = RopeScaling(kind, rope.take("factor"))
    elif kind == "llama3":
        low, high = rope.take("low_freq_factor"), rope.take("high_freq_factor")
        original = rope.take("original_max_position_embeddings", context_length)
        scaling = RopeScaling(kind, rope.take("factor"), low, high, original)
    rope.done()
    return thetas.pop() if thetas else 10000.0, scaling


def gpt2_from_theirs(keys: Keys) -> TransformerConfig:
    """Return the config of a GPT-2."""
    keys.fix(FIXED_GPT2)
    dropout = keys.take("resid_pdrop", 0.1)
    if (other := keys.take("embd_pdrop", 0.1)) != dropout:
        raise keys.lacking("embd_pdrop", other, f"it must be what resid_pdrop is, {dropout!r}")
    warn_of_dropout(keys, "attn_pdrop", 0.1)
    d_model, d_ff = keys.take("n_embd"), keys.take("n_inner", None)
    return TransformerConfig(
        vocab_size=keys.take("vocab_size"),
        context_length=keys.take("n_positions"),
        d_model=d_model,
        num_layers=keys.take("n_layer"),
        num_heads=keys.take("n_head"),
        d_ff=4 * d_model if d_ff is None else d_ff,
        norm="layernorm",
        norm_eps=keys.take("layer_norm_epsilon", 1e-5),
        ffn=keys.choose("activation_function", GPT2_FFN, "gelu_new"),
        positions="learned",
        bias=True,
        tie_embeddings=keys.take("tie_word_embeddings", True),
        dropout=dropout,
        init="gpt2",
    )


def warn_of_dropout(keys: Keys, name: str, default: float = 0.0) -> None:
    """Warn that a dropout on attention's weights, if there is one, isn't made here."""
    if p := keys.take(name, default):
        warnings.warn(
            f"{name} = {p!r} is something this engine lacks: the model runs the same, but trains without",
            stacklevel=2,
        )


def misfits(config: TransformerConfig) -> dict[str, list[str]]:
    """Return, for each family of Hugging Face's, by its `model_type`, the fields of a config that it lacks."""
    fitting: dict[str, dict[str, Iterable]] = {
        "llama": {
            "norm_position": ["pre"],
            "norm": ["rmsnorm"],
            "positions": ["rope"],
            "ffn": LLAMA_FFN.values(),
        },
        "gpt2": {
            "norm_position": ["pre"],
            "norm": ["layernorm"],
            "positions": ["learned"],
            "ffn": GPT2_FFN.values(),
            "bias": [True],
            "num_kv_heads": [None, config.num_heads],
        },
    }
    return {
        model_type: [field for field, values in fields.items() if getattr(config, field) not in values]
        for model_type, fields in fitting.items()
    }


def family(config: TransformerConfig) -> str | None:
    """Return the `model_type` under which Hugging Face has such a model, "llama" or "gpt2", or None."""
    return next((model_type for model_type, fields in misfits(config).items() if not fields), None)


def to_theirs(config: TransformerConfig, d_ff: int, dtype: str) -> dict[str, Any]:
    """Return the Hugging Face config of a model that has a family; `d_ff` is the width its feed-forward layers have.

    Ids of special tokens are the tokenizer's affair: there are none here.
    """
    theirs: dict[str, Any] = {
        "model_type": family(config),
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if theirs["model_type"] == "gpt2":
        return theirs | {
            "architectures": ["GPT2LMHeadModel"],
            "n_positions": config.context_length,
            "n_embd": config.d_model,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_inner": d_ff,
            "activation_function": first_name(GPT2_FFN, config.ffn),
            "layer_norm_epsilon": config.norm_eps,
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": 0.0,
        }
    return theirs | {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": config.context_length,
        "hidden_size": config.d_model,
        "intermediate_size": d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "hidden_act": first_name(LLAMA_FFN, config.ffn),
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_to_theirs(config.rope_scaling),
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
    }


def rope_to_theirs(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return the scaling as `rope_scaling`, which every version of transformers reads."""
    if scaling is None:
        return None
    names = {"kind": "rope_type", "original_context": "original_max_position_embeddings"}
    fields = dataclasses.asdict(scaling).items()
    return {names.get(name, name): value for name, value in fields if value}


def first_name(choices: dict[str, str], ours: str) -> str:
    """Return the first of their names for a choice of ours."""
    return next(theirs for theirs, choice in choices.items() if choice == ours)
