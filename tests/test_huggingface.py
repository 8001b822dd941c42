"""Hugging Face's folders, written by hand here: what they hold is taken as it stands, and what isn't understood is
refused. That transformers agrees is for test_transformers.py, which needs it."""

import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from numpygpt import checkpoint, hf_config, huggingface
from numpygpt.config import RopeScaling, TransformerConfig
from numpygpt.model import TransformerLM
from numpygpt.tensorfile import CheckpointError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 36,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 12,
    "rms_norm_eps": 1e-3,
    "rope_theta": 50.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 11,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 12,
    "n_ctx": 12,
    "layer_norm_epsilon": 1e-3,
    "resid_pdrop": 0.2,
    "embd_pdrop": 0.2,
    "attn_pdrop": 0.0,
}
# The same models in our words, with Hugging Face's pairs of rotary features.
OUR_LLAMA = TransformerConfig(11, 12, 36, 2, 6, 2, 20, rope_theta=50.0, rope_layout="half", norm_eps=1e-3)
OUR_GPT2 = TransformerConfig(
    vocab_size=11,
    context_length=12,
    d_model=12,
    num_layers=2,
    num_heads=3,
    norm="layernorm",
    norm_eps=1e-3,
    ffn="gelu_tanh",
    positions="learned",
    bias=True,
    tie_embeddings=True,
)
IDS = np.random.default_rng(0).integers(0, 11, (2, 9))


def at_random(config, dtype=np.float32):
    """A model with random weights, gains and biases, in which every part is seen."""
    model = TransformerLM(config, rng=0, dtype=dtype).eval()
    rng = np.random.default_rng(1)
    for p in model.parameters():
        p.value = rng.standard_normal(p.shape) * (p.shape[-1] ** -0.5 if p.decays else 1.0)
    return model


def llama_tensors(model):
    """The tensors of a Llama, whose rotary pairs lie as in Hugging Face's."""
    state = model.state_dict()
    tensors = {
        "model.embed_tokens.weight": state["token_embeddings.weight"],
        "model.norm.weight": state["ln_final.weight"],
    }
    if "lm_head.weight" in state:
        tensors["lm_head.weight"] = state["lm_head.weight"]
    names = {
        "input_layernorm": "ln1",
        "self_attn.q_proj": "attn.q_proj",
        "self_attn.k_proj": "attn.k_proj",
        "self_attn.v_proj": "attn.v_proj",
        "self_attn.o_proj": "attn.output_proj",
        "post_attention_layernorm": "ln2",
        "mlp.gate_proj": "ffn.w1",
        "mlp.down_proj": "ffn.w2",
        "mlp.up_proj": "ffn.w3",
    }
    for i in range(model.config.num_layers):
        for theirs, ours in names.items():
            for kind in ("weight", "bias"):
                if f"layers.{i}.{ours}.{kind}" in state:
                    tensors[f"model.layers.{i}.{theirs}.{kind}"] = state[f"layers.{i}.{ours}.{kind}"]
    return tensors


def gpt2_tensors(model):
    """The tensors of a GPT-2: its linear maps are transposed, its queries, keys and values side by side."""
    state = model.state_dict()
    tensors = {
        "transformer.wte.weight": state["token_embeddings.weight"],
        "transformer.wpe.weight": state["positions.embeddings.weight"],
        "transformer.ln_f.weight": state["ln_final.weight"],
        "transformer.ln_f.bias": state["ln_final.bias"],
    }
    for i in range(model.config.num_layers):
        own, his = f"layers.{i}.", f"transformer.h.{i}."
        qkv = [own + f"attn.{x}_proj" for x in "qkv"]
        tensors[his + "attn.c_attn.weight"] = np.concatenate([state[f"{x}.weight"].T for x in qkv], axis=1).copy()
        tensors[his + "attn.c_attn.bias"] = np.concatenate([state[f"{x}.bias"] for x in qkv])
        for theirs, ours in {"attn.c_proj": "attn.output_proj", "mlp.c_fc": "ffn.w1", "mlp.c_proj": "ffn.w2"}.items():
            tensors[f"{his}{theirs}.weight"] = np.ascontiguousarray(state[f"{own}{ours}.weight"].T)
            tensors[f"{his}{theirs}.bias"] = state[f"{own}{ours}.bias"]
        for theirs, ours in {"ln_1": "ln1", "ln_2": "ln2"}.items():
            for kind in ("weight", "bias"):
                tensors[f"{his}{theirs}.{kind}"] = state[f"{own}{ours}.{kind}"]
    return tensors


def write(folder, config, tensors):
    """Write a Hugging Face folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def changed(config, **fields):
    """A config with other values, or without the keys whose value is `...`."""
    return {name: value for name, value in {**config, **fields}.items() if value is not ...}


def write_llama(folder, **fields):
    """The folder of a random Llama, whose config.json alone has other fields."""
    return write(folder, changed(LLAMA, **fields), llama_tensors(at_random(OUR_LLAMA)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_a_llama_is_opened(tmp_path, tied, bias, kv_heads):
    ours = dataclasses.replace(OUR_LLAMA, tie_embeddings=tied, bias=bias, num_kv_heads=kv_heads)
    model = at_random(ours, np.float64)
    fields = dict(tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias, num_key_value_heads=kv_heads)
    loaded = huggingface.load(write(tmp_path, LLAMA | fields, llama_tensors(model)), dtype=np.float64)
    assert loaded.config == dataclasses.replace(ours, rope_layout="interleaved")
    assert not loaded.training
    np.testing.assert_allclose(loaded.forward(IDS), model.forward(IDS), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_a_gpt2_is_opened_with_its_prefix_or_without(tmp_path, prefix):
    model = at_random(OUR_GPT2)
    tensors = gpt2_tensors(model)
    tensors["transformer.h.1.attn.bias"] = np.tri(12, dtype=bool)[None, None]
    tensors["transformer.h.1.attn.masked_bias"] = np.array(-1e4, np.float32)
    tensors = {prefix + name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    loaded = huggingface.load(write(tmp_path, GPT2, tensors))
    assert loaded.config == dataclasses.replace(OUR_GPT2, d_ff=48, dropout=0.2, init="gpt2")
    assert np.array_equal(loaded.forward(IDS), model.forward(IDS))
    assert loaded.lm_head.weight is loaded.token_embeddings.weight


def bfloat16():
    return pytest.importorskip("ml_dtypes").bfloat16


@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "bfloat16"])
def test_every_kind_of_number_is_read_exactly(tmp_path, kind):
    dtype = bfloat16() if kind == "bfloat16" else kind
    tensors = {name: tensor.astype(dtype) for name, tensor in llama_tensors(at_random(OUR_LLAMA)).items()}
    loaded = huggingface.load(write(tmp_path, LLAMA, tensors))
    assert loaded.flat.value.dtype == np.float32
    for ours, theirs in (
        ("token_embeddings", "model.embed_tokens"),
        ("layers.1.ffn.w2", "model.layers.1.mlp.down_proj"),
    ):
        want = tensors[f"{theirs}.weight"].astype(np.float32)
        assert np.array_equal(loaded.state_dict()[f"{ours}.weight"], want)


def test_bfloat16_without_its_package_is_said_in_one_line(tmp_path, monkeypatch, unchecked):
    tensors = {name: tensor.astype(bfloat16()) for name, tensor in llama_tensors(at_random(OUR_LLAMA)).items()}
    write(tmp_path, LLAMA, tensors)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match=r'package ml_dtypes: pip install -e "\.\[hf\]"'):
        huggingface.load(tmp_path)


def write_shards(folder, tensors, weight_map=None):
    names = sorted(tensors)
    parts = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, part in parts.items():
        safetensors.numpy.save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = weight_map or {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return weight_map


def test_a_model_in_several_files_is_opened(tmp_path):
    model = at_random(OUR_LLAMA)
    weight_map = write_shards(tmp_path, llama_tensors(model))
    np.testing.assert_allclose(huggingface.load(tmp_path).forward(IDS), model.forward(IDS), rtol=1e-4, atol=1e-5)
    for wrong, said in (
        ({**weight_map, "lm_head.weight": "../a.safetensors"}, r"'\.\./a\.safetensors', which isn't in this folder"),
        ({**weight_map, "lm_head.weight": "c.safetensors"}, r"c\.safetensors can't be read: it doesn't exist"),
        ({**weight_map, "wings": "a.safetensors"}, "differ in the tensor wings"),
        ({k: v for k, v in weight_map.items() if k != "lm_head.weight"}, "differ in the tensor lm_head.weight"),
        ([1], "no index"),
    ):
        write_shards(tmp_path, llama_tensors(model), wrong)
        with pytest.raises(CheckpointError, match=said):
            huggingface.load(tmp_path)
    write_shards(tmp_path, llama_tensors(model))
    shutil.copy(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"b\.safetensors holds the tensor .*, and so does .*a\.safetensors"):
        huggingface.load(tmp_path)


def test_every_key_of_a_real_config_is_known():
    """SmolLM2-135M-Instruct's and GPT-2's."""
    smollm2 = {
        **{"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1},
        **{"eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664},
        **{"intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False},
        **{"model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3},
        **{"pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False},
        **{"rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "transformers_version": "4.42.3"},
        **{"use_cache": True, "vocab_size": 49152},
    }
    assert hf_config.from_theirs(smollm2) == TransformerConfig(
        49152, 8192, 576, 30, 9, 3, 1536, rope_theta=100000, tie_embeddings=True
    )
    gpt2 = {
        **{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1},
        **{"bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02},
        **{
            "layer_norm_epsilon": 1e-05,
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
        },
        **{"n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1},
        **{"summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True},
        **{"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257},
    }
    with pytest.warns(UserWarning, match=r"attn_pdrop = 0\.1 .*trains without"):
        config = hf_config.from_theirs(gpt2)
    assert config == TransformerConfig(
        **{
            "vocab_size": 50257,
            "context_length": 1024,
            "d_model": 768,
            "num_layers": 12,
            "num_heads": 12,
            "d_ff": 3072,
        },
        **{"norm": "layernorm", "ffn": "gelu_tanh", "positions": "learned", "bias": True, "tie_embeddings": True},
        **{"dropout": 0.1, "init": "gpt2"},
    )


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({}, 50.0, None),
        ({"rope_theta": ...}, 10000.0, None),
        ({"rope_scaling": None}, 50.0, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 50.0, RopeScaling("linear", 2.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, 50.0, RopeScaling("linear", 2)),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 50.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 8)),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, None),
        (
            {"rope_parameters": {"type": "linear", "rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}},
            50.0,
            RopeScaling("linear", 2.0),
        ),
        (
            {"rope_theta": ..., "rope_parameters": {"rope_type": "llama3", "rope_theta": 9.0, **LLAMA3}},
            9.0,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 8),
        ),
        (
            {"rope_scaling": changed({"rope_type": "llama3", **LLAMA3}, original_max_position_embeddings=...)},
            50.0,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 12),
        ),
    ],
)
def test_both_spellings_of_the_rotary_frequencies_are_read(fields, theta, scaling):
    config = hf_config.from_theirs(changed(LLAMA, **fields))
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "qwen2"}, 'model_type = "qwen2"'),
        ({"model_type": ...}, "model_type is missing"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"rms_norm_eps": ...}, "rms_norm_eps is missing"),
        ({"hidden_act": "gelu_new"}, 'hidden_act = "gelu_new"'),
        ({"hidden_act": ["silu"]}, r'hidden_act = \["silu"\]'),
        ({"head_dim": 8}, "head_dim = 8 .*hidden_size is 36 and num_attention_heads 6"),
        ({"attention_bias": True}, "attention_bias = true .*mlp_bias"),
        ({"mlp_bias": True}, "attention_bias = false .*mlp_bias"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2"),
        ({"rope_interleaved": True}, "rope_interleaved = true"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5"),
        ({"quantization_config": {"bits": 4}}, r'quantization_config = {"bits": 4}'),
        ({"pruned_heads": {"0": [1]}}, r'pruned_heads = {"0": \[1\]}'),
        ({"auto_map": {"AutoModel": "x.y"}}, "auto_map"),
        ({"sliding_window": 4}, "sliding_window = 4 isn't known here"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping = 30\.0 isn't known here"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 'rope_scaling: rope_type = "yarn"'),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_scaling: rope_type = "dynamic"'),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, r"factor must be a positive number, not -2\.0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, "rope_scaling: beta = 1 isn't known"),
        ({"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}}, "one must go"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {}}, "one must go"),
        ({"rope_parameters": {"rope_theta": 3.0}}, r"rope_theta has two values, \[3\.0, 50\.0\]"),
        ({"rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_key_value_heads": 4}, "num_kv_heads 4 doesn't divide num_heads 6"),
        ({"vocab_size": "11"}, "vocab_size"),
        ({"max_position_embeddings": None}, "context_length"),
        ({"tie_word_embeddings": None}, "tie_embeddings"),
    ],
)
def test_what_a_config_asks_for_and_cannot_have_is_refused_by_name(tmp_path, fields, said, unchecked):
    folder = write_llama(tmp_path, **fields)
    with pytest.raises(CheckpointError, match=said) as raised:
        huggingface.load(folder)
    assert str(folder / "config.json") in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn = true"),
        ({"scale_attn_weights": False}, "scale_attn_weights = false"),
        ({"scale_attn_weights": None}, "scale_attn_weights = null"),
        ({"add_cross_attention": True}, "add_cross_attention = true"),
        ({"embd_pdrop": 0.0}, r"embd_pdrop = 0\.0 .*resid_pdrop is, 0\.2"),
        ({"activation_function": "tanh"}, 'activation_function = "tanh"'),
        ({"n_positions": ...}, "n_positions is missing"),
        ({"rope_theta": 10000.0}, "rope_theta"),
    ],
)
def test_the_same_for_gpt2(fields, said):
    with pytest.raises(ValueError, match=said):
        hf_config.from_theirs(changed(GPT2, **fields))


def test_a_mistral_reads_no_further_than_its_window():
    mistral = LLAMA | {"model_type": "mistral"}
    for window, length in ((4, 4), (4096, 12), (None, 12), (..., 12)):
        config = hf_config.from_theirs(changed(mistral, sliding_window=window))
        assert config == dataclasses.replace(OUR_LLAMA, context_length=length, rope_layout="interleaved")
    with pytest.raises(ValueError, match="attention_bias"):
        hf_config.from_theirs(mistral | {"attention_bias": True})


def test_attention_dropout_is_warned_of():
    with pytest.warns(UserWarning, match=r"attention_dropout = 0\.1"):
        hf_config.from_theirs(LLAMA | {"attention_dropout": 0.1})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lm_head.weight": ...}, r"the tensor lm_head\.weight is missing$"),
        ({"model.norm.weight": ..., "lm_head.weight": ...}, r"model\.norm\.weight is missing, and 1 more"),
        ({"model.wings": np.zeros(3)}, r"the tensor model\.wings is unknown"),
        ({"score.weight": np.zeros(3)}, r"the tensor score\.weight is unknown"),
        ({"model.layers.0.self_attn.q_proj.bias": np.zeros(24)}, r"q_proj\.bias is unknown"),
        ({"model.norm.weight": np.zeros(37)}, r"model\.norm\.weight has shape \(37,\), not the config's \(36,\)"),
        ({"model.norm.weight": np.zeros(24, np.int8)}, r"model\.norm\.weight is of dtype I8; these are read"),
        ({"model.layers.1.self_attn.k_proj.weight": np.zeros((36, 36))}, r"\(36, 36\), not the config's \(12, 36\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, change, said):
    write(tmp_path, LLAMA, changed(llama_tensors(at_random(OUR_LLAMA)), **change))
    with pytest.raises(CheckpointError, match=said) as raised:
        huggingface.load(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_a_tied_head_may_be_there_twice_but_not_differ(tmp_path):
    tied = dataclasses.replace(OUR_LLAMA, tie_embeddings=True)
    tensors = llama_tensors(at_random(tied))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    config = LLAMA | {"tie_word_embeddings": True}
    alone = huggingface.load(write(tmp_path, config, tensors))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    twice = huggingface.load(write(tmp_path, config, tensors))
    assert np.array_equal(alone.flat.value, twice.flat.value)
    assert twice.lm_head.weight is twice.token_embeddings.weight
    tensors["lm_head.weight"][3, 4] += 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is tied to model\.embed_tokens\.weight, but"):
        huggingface.load(write(tmp_path, config, tensors))


def test_files_that_are_missing_or_damaged_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json doesn't exist"):
        huggingface.load(tmp_path)
    path = write_llama(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors can't be read: it was cut off within .* model\.norm"
    ):
        huggingface.load(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors can't be read"):
        huggingface.load(tmp_path)
    path.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="can run code"):
        huggingface.load(tmp_path)
    for text in ("{", "[1]", "null"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json describes no model"):
            huggingface.load(tmp_path)


SAVED = {
    "llama": dataclasses.replace(OUR_LLAMA, rope_layout="interleaved"),
    "half": OUR_LLAMA,
    "tied, linear": dataclasses.replace(OUR_LLAMA, tie_embeddings=True, rope_scaling=RopeScaling("linear", 2.0)),
    "llama3, biases": dataclasses.replace(OUR_LLAMA, bias=True, rope_scaling=RopeScaling("llama3", 2.0, 0.2, 0.9, 8)),
    "geglu, all heads": dataclasses.replace(OUR_LLAMA, ffn="geglu", num_kv_heads=None, d_ff=None),
    "gpt2": OUR_GPT2,
    "gpt2, untied": dataclasses.replace(OUR_GPT2, tie_embeddings=False, ffn="relu", num_kv_heads=3, d_ff=7),
}
TENSORS = {"llama": llama_tensors, "gpt2": gpt2_tensors}


@pytest.mark.parametrize("config", SAVED.values(), ids=SAVED)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_saved_folder_is_opened_again_and_is_a_checkpoint(tmp_path, config, dtype):
    model = at_random(config, dtype)
    huggingface.save(tmp_path / "saved", model)
    for loaded in (huggingface.load(tmp_path / "saved", dtype=dtype), checkpoint.load(tmp_path / "saved")[0]):
        assert loaded.flat.value.dtype == dtype
        tolerance = 1e-4 if dtype == np.float32 else 1e-12
        np.testing.assert_allclose(loaded.forward(IDS), model.forward(IDS), rtol=tolerance, atol=tolerance)
    assert loaded.config == config
    assert np.array_equal(loaded.flat.value, model.flat.value)
    theirs = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert theirs["torch_dtype"] == np.dtype(dtype).name
    with safetensors.safe_open(tmp_path / "saved" / "model.safetensors", "numpy") as file:
        assert file.metadata()["format"] == "pt"
        if config.rope_layout == "half" or config.norm == "layernorm":
            want = TENSORS[theirs["model_type"]](model)
            assert want.keys() - {"lm_head.weight"} == set(file.keys()) - {"lm_head.weight"}
            assert all(np.array_equal(file.get_tensor(name), want[name]) for name in want)
    with pytest.raises(FileExistsError):
        huggingface.save(tmp_path / "saved", model)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"norm_position": "post"}, "no norm_position = 'post'; save"),
        ({"ffn": "gelu"}, "no ffn = 'gelu'; save"),
        ({"positions": "sinusoidal"}, "no positions = 'sinusoidal'; save"),
        ({"positions": "learned", "norm": "layernorm", "ffn": "gelu", "num_kv_heads": 6}, "no bias = False; save"),
    ],
)
def test_a_model_that_hugging_face_lacks_is_refused_by_its_field(tmp_path, fields, said):
    with pytest.raises(ValueError, match=said):
        huggingface.save(tmp_path / "saved", TransformerLM(dataclasses.replace(OUR_LLAMA, **fields), rng=0))
    assert not list(tmp_path.iterdir())


PEAK = """
import sys
from numpygpt import huggingface

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))

before = peak()
model = huggingface.load(sys.argv[1])
print(peak() - before, model.flat.value.nbytes, max(p.value.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only there it is told")
def test_no_more_memory_is_needed_than_the_model_and_its_largest_tensor(tmp_path):
    config = TransformerConfig(8000, 16, 512, 6, 4, 2, 1024, rope_layout="half")
    model = TransformerLM.blank(config)
    huggingface.save(tmp_path / "saved", model)
    result = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path / "saved"], capture_output=True, text=True, check=True
    )
    used, whole, largest = map(int, result.stdout.split())
    assert whole > 70e6 and 15e6 < largest < 17e6
    assert whole < used < whole + largest + 4e6  # and what Python needs
