"""Hugging Face's Llama and GPT-2, at random sizes and with random weights, are our model with the parts so named.

Logits, loss and every gradient agree in float64. Nothing is downloaded. Two tables say which of their parameters is
which of ours; one that is missing in a table, on either side, is an error. Then the same by way of folders: what
transformers has saved our loader opens, and what we have saved transformers opens.

What has no counterpart here, and is left out: heads of another width than d_model / num_heads (Llama's `head_dim`),
biases in attention or in the feed-forward layers alone, other scalings of rotary frequencies than two, padding masks,
and positions that start again inside a sequence (Hugging Face takes what follows for another sequence, and hides one
from the other).
"""

import contextlib
import dataclasses
import re
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from comparing import TOLERANCE, assert_all_close, assert_close, deviation
from hypothesis import given
from hypothesis import strategies as st
from strategies import rngs

from numpygpt import huggingface
from numpygpt.config import RopeScaling, TransformerConfig
from numpygpt.layers import CrossEntropy
from numpygpt.model import TransformerLM

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors.torch")  # here, and not for the first time where torch's names mean other dtypes
pytestmark = pytest.mark.usefixtures("one_torch_thread")

LIMIT = 12  # the longest sequence

# Their names and ours. # is the number of the layer; each part has a weight, and may have a bias.

LLAMA = {
    "model.embed_tokens": ["token_embeddings"],
    "model.layers.#.input_layernorm": ["layers.#.ln1"],
    "model.layers.#.self_attn.q_proj": ["layers.#.attn.q_proj"],
    "model.layers.#.self_attn.k_proj": ["layers.#.attn.k_proj"],
    "model.layers.#.self_attn.v_proj": ["layers.#.attn.v_proj"],
    "model.layers.#.self_attn.o_proj": ["layers.#.attn.output_proj"],
    "model.layers.#.post_attention_layernorm": ["layers.#.ln2"],
    "model.layers.#.mlp.gate_proj": ["layers.#.ffn.w1"],
    "model.layers.#.mlp.up_proj": ["layers.#.ffn.w3"],
    "model.layers.#.mlp.down_proj": ["layers.#.ffn.w2"],
    "model.norm": ["ln_final"],
    "lm_head": ["lm_head"],
}
GPT2 = {
    "transformer.wte": ["token_embeddings"],
    "transformer.wpe": ["positions.embeddings"],
    "transformer.h.#.ln_1": ["layers.#.ln1"],
    "transformer.h.#.attn.c_attn": ["layers.#.attn.q_proj", "layers.#.attn.k_proj", "layers.#.attn.v_proj"],
    "transformer.h.#.attn.c_proj": ["layers.#.attn.output_proj"],
    "transformer.h.#.ln_2": ["layers.#.ln2"],
    "transformer.h.#.mlp.c_fc": ["layers.#.ffn.w1"],
    "transformer.h.#.mlp.c_proj": ["layers.#.ffn.w2"],
    "transformer.ln_f": ["ln_final"],
    "lm_head": ["lm_head"],
}
CONV1D = ("c_attn", "c_proj", "c_fc")  # GPT-2's linear maps, whose weights are (in, out)

# Their activations, and our ffn: Llama's are gates.
LLAMA_FFN = {"silu": "swiglu", "sigmoid": "glu", "gelu": "geglu", "relu": "reglu", "linear": "bilinear"}
GPT2_FFN = {"gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu", "silu": "silu"}


def by_our_names(table, theirs, rope=None):
    """Weights or gradients of a Hugging Face model, as ours are named and laid out.

    All that happens to an array is that its elements change places, so what is right for weights is right for
    gradients. `rope` is (layout, d_k), where there is a RoPE.
    """
    ours = {}
    for name, array in theirs.items():
        part, kind = name.rsplit(".", 1)
        number = re.search(r"\.(\d+)\.", name)
        parts = table[re.sub(r"\.\d+\.", ".#.", part)]
        array = array.detach().numpy()
        array = array.T if part.endswith(CONV1D) else array
        for our, piece in zip(parts, np.split(array, len(parts)), strict=True):
            if rope is not None and our.endswith(("q_proj", "k_proj")):
                piece = from_half(piece, *rope)
            ours[f"{our}.{kind}".replace("#", number[1] if number else "")] = piece
    return ours


def from_half(rows, layout, d_k):
    """Bring rows of q or k from Hugging Face's layout, pairs (i, i + d_k/2), to ours."""
    if layout == "half":
        return rows
    return rows.reshape(-1, 2, d_k // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)  # pairs (2i, 2i + 1)


@contextlib.contextmanager
def float64():
    """Let Hugging Face's code compute in float64 throughout.

    In a model of float64 it goes through float32 wherever it says so: in Llama's norm (`.to(torch.float32)`), rotary
    frequencies and angles (`torch.float`, `.float()`) and softmax (`dtype=torch.float32`), and in the loss
    (`logits.float()`). It is meant to widen 16 bits, and narrows 64. Here these names mean float64: the code that
    runs is theirs, line by line. `test_without_float64_they_agree_as_far_as_float32_goes` shows what it does.
    """
    wide = {"float": torch.float64, "float32": torch.float64}
    with mock.patch.multiple(torch, **wide), mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def llama(config, attention):
    """Their model for a config of ours."""
    activations = {ours: theirs for theirs, ours in LLAMA_FFN.items()}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.context_length,
            rope_parameters={"rope_theta": config.rope_theta, **scaling_of_theirs(config.rope_scaling)},
            rms_norm_eps=config.norm_eps,
            hidden_act=activations[config.ffn],
            attention_bias=config.bias,
            mlp_bias=config.bias,
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation=attention,
        )
    )


def scaling_of_theirs(scaling):
    """Their words for a scaling of ours."""
    if scaling is None:
        return {"rope_type": "default"}
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }


def gpt2(config, attention):
    """Their model for a config of ours."""
    activations = {ours: theirs for theirs, ours in GPT2_FFN.items()}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_embd=config.d_model,
            n_inner=config.d_ff,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_positions=config.context_length,
            layer_norm_epsilon=config.norm_eps,
            activation_function=activations[config.ffn],
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation=attention,
        )
    )


TABLES = {llama: LLAMA, gpt2: GPT2}


def at_random(make, config, attention, rng):
    """Their model with random weights, gains and biases, in evaluation (GPT-2's dropouts are on by default)."""
    model = make(config, attention).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.tensor(rng.standard_normal(p.shape) * (config.d_model**-0.5 if p.ndim == 2 else 1.0)))
    return model


def run_theirs(model, ids, positions, labels, cotangent):
    """Logits, loss and gradients (of the loss and of the cotangent on the logits together)."""
    out = model(torch.tensor(ids), position_ids=torch.tensor(positions), labels=torch.tensor(labels))
    (out.loss + (out.logits * torch.tensor(cotangent)).sum()).backward()
    return out.logits, out.loss, {name: p.grad for name, p in model.named_parameters()}


def run_ours(model, ids, positions, labels, cotangent):
    """The same. Hugging Face shifts the labels itself: the target of a position is the label of the next."""
    targets = np.concatenate([labels[:, 1:], np.full_like(labels[:, :1], -100)], axis=1)
    cross_entropy = CrossEntropy(ignore_index=-100)
    logits = model.forward(ids, positions)
    loss = cross_entropy.forward(logits, targets)
    model.backward(cross_entropy.backward() + cotangent)
    return logits, loss, {name: p.grad for name, p in model.named_parameters()}


def inputs(config, rng, batch, length):
    """Ids, positions from an offset of each sequence on, labels of which some are ignored, a cotangent."""
    ids = rng.integers(0, config.vocab_size, (batch, length))
    positions = np.arange(length) + rng.integers(0, LIMIT - length + 1, (batch, 1))
    labels = np.where(rng.random(ids.shape) < 0.3, -100, ids)
    labels[0, -1] = 0  # where all are ignored, Hugging Face's loss is NaN (ours is 0)
    return ids, positions, labels, rng.standard_normal((batch, length, config.vocab_size))


def both(make, config, attention, rng, batch, length, table=None, **mistake):
    """Ours and theirs, with the same weights. A wrong table, or options of ours that are wrong, may be given."""
    table, our_config = table or TABLES[make], dataclasses.replace(config, **mistake)
    rope = (config.rope_layout, config.d_model // config.num_heads) if config.positions == "rope" else None
    case = inputs(config, rng, batch, length)
    with float64():
        reference = at_random(make, config, attention, rng)
        logits, loss, gradients = run_theirs(reference, *case)
    model = TransformerLM(our_config, dtype=np.float64)
    model.load_state_dict(by_our_names(table, dict(reference.named_parameters()), rope))
    return run_ours(model, *case), (logits, loss, by_our_names(table, gradients, rope))


def compare(*drawn):
    """Hold our model against theirs, in everything."""
    (our_logits, our_loss, our_gradients), (logits, loss, gradients) = both(*drawn)
    assert_close(our_logits, logits, "logits")
    assert_close(our_loss, loss, "loss")
    assert_all_close(our_gradients, gradients)


# Of the latter, pairs of features turn slowly, fast, and in between.
SCALINGS = [RopeScaling("llama3", 4.0, 0.5, 1.0, 10), RopeScaling("llama3", 2.0, 0.1, 1.5, 8)]
attentions = st.sampled_from(["eager", "sdpa"])
batches, lengths = st.integers(1, 3), st.integers(2, LIMIT - 3)
sizes = {
    "vocab_size": st.integers(2, 13),
    "context_length": st.just(LIMIT),
    "num_layers": st.integers(1, 3),
    "d_ff": st.integers(1, 20),
    "norm_eps": st.sampled_from([1e-6, 1e-5, 1e-2]),
    "tie_embeddings": st.booleans(),
}


def with_heads(heads, d_k, **fields):
    num_heads, num_kv_heads = heads
    return TransformerConfig(d_model=num_heads * d_k, num_heads=num_heads, num_kv_heads=num_kv_heads, **fields)


llamas = {
    "heads": st.sampled_from([(1, 1), (2, 2), (2, 1), (3, 1), (4, 2), (4, 1), (6, 2), (6, 3)]),
    "d_k": st.sampled_from([2, 4, 6, 8]),
    "rope_theta": st.sampled_from([10000.0, 500000.0, 20.0]),
    "rope_scaling": st.sampled_from([None, RopeScaling("linear", 3.0), *SCALINGS]),
    "ffn": st.sampled_from(list(LLAMA_FFN.values())),
    "bias": st.booleans(),
    **sizes,
}
gpt2s = st.builds(
    with_heads,
    heads=st.sampled_from([(1, None), (2, None), (3, None), (4, None)]),
    d_k=st.integers(2, 8),
    norm=st.just("layernorm"),
    positions=st.just("learned"),
    bias=st.just(True),
    ffn=st.sampled_from(list(GPT2_FFN.values())),
    **sizes,
)


@given(st.builds(with_heads, **llamas, rope_layout=st.just("half")), attentions, rngs, batches, lengths)
def test_llama_with_the_weights_as_they_are(config, attention, rng, batch, length):
    compare(llama, config, attention, rng, batch, length)


@given(st.builds(with_heads, **llamas, rope_layout=st.just("interleaved")), attentions, rngs, batches, lengths)
def test_llama_with_rows_of_queries_and_keys_brought_to_the_layout_of_the_paper(config, attention, rng, batch, length):
    compare(llama, config, attention, rng, batch, length)


@given(gpt2s, attentions, rngs, batches, lengths)
def test_gpt2(config, attention, rng, batch, length):
    compare(gpt2, config, attention, rng, batch, length)


# By way of folders


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
interleaved = st.builds(with_heads, **llamas)
cases = st.one_of(st.tuples(st.just(llama), interleaved), st.tuples(st.just(gpt2), gpt2s))


def opened(folder, dtype, attention="eager"):
    """The model that transformers finds in a folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, local_files_only=True
    )
    return model.eval()


def opened_in_float64(folder, attention):
    """The same, computing in float64 throughout: it is made in that light, and then given what was read."""
    model = opened(folder, torch.float64, attention)
    with float64():
        twin = type(model)(model.config).double().eval()
    twin.load_state_dict(model.state_dict())
    return twin


@given(cases, attentions, rngs, batches, lengths, st.sampled_from(DTYPES), st.sampled_from(["1KB", "1GB"]))
@pytest.mark.filterwarnings("ignore:attn_pdrop")
def test_a_folder_of_theirs_is_opened_and_one_of_ours_by_them(pair, attention, rng, batch, length, dtype, shards):
    pytest.importorskip("ml_dtypes")
    make, config = pair
    case = inputs(config, rng, batch, length)
    with tempfile.TemporaryDirectory() as temporary:
        theirs, ours = Path(temporary) / "theirs", Path(temporary) / "ours"
        at_random(make, config, attention, rng).to(dtype).save_pretrained(theirs, max_shard_size=shards)
        reference = opened_in_float64(theirs, attention)
        with float64():
            logits, loss, gradients = run_theirs(reference, *case)
        model = huggingface.load(theirs, dtype=np.float64)
        our_logits, our_loss, our_gradients = run_ours(model, *case)
        rope = ("interleaved", config.d_model // config.num_heads) if make is llama else None
        assert_close(our_logits, logits, "logits")
        assert_close(our_loss, loss, "loss")
        assert_all_close(our_gradients, by_our_names(TABLES[make], gradients, rope))
        huggingface.save(ours, model)
        again = opened_in_float64(ours, attention)
        with float64():
            assert_close(run_theirs(again, *case)[0], our_logits, "logits of our folder")


def test_a_mistral_is_opened_and_its_window_bounds_the_context(tmp_path):
    config = transformers.MistralConfig(
        vocab_size=11,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=LIMIT,
        sliding_window=7,
        initializer_range=0.3,
    )
    theirs = transformers.MistralForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    model = huggingface.load(tmp_path)
    assert model.config.context_length == 7
    ids = np.random.default_rng(0).integers(0, 11, (2, LIMIT))
    with torch.no_grad():
        assert deviation(model.forward(ids[:, :7]), theirs(torch.tensor(ids[:, :7])).logits) < 1e-5
        hidden, seen = (theirs(torch.tensor(text)).logits[:, -1] for text in (ids[:, :8], ids[:, 1:8]))
    assert deviation(hidden, seen) > 1e-3  # in a longer text, through a second layer, one position more is seen


# That the comparison can fail


A_LLAMA = with_heads(
    (6, 2), 4, vocab_size=11, context_length=LIMIT, num_layers=2, d_ff=20, rope_layout="half", norm_eps=1e-3
)
A_GPT2 = with_heads(
    (3, None),
    4,
    vocab_size=11,
    context_length=LIMIT,
    num_layers=2,
    d_ff=12,
    norm="layernorm",
    positions="learned",
    bias=True,
    ffn="gelu_tanh",
    tie_embeddings=True,
)


FLOAT32 = {
    "llama": (llama, A_LLAMA),
    "linear": (llama, dataclasses.replace(A_LLAMA, rope_scaling=RopeScaling("linear", 3.0), rope_theta=30.0)),
    "llama3": (llama, dataclasses.replace(A_LLAMA, rope_scaling=SCALINGS[0], tie_embeddings=True)),
    "gpt2": (gpt2, A_GPT2),
    "gpt2, untied": (gpt2, dataclasses.replace(A_GPT2, tie_embeddings=False, d_ff=20)),
}


@pytest.mark.parametrize(("make", "config"), FLOAT32.values(), ids=FLOAT32)
@pytest.mark.filterwarnings("ignore:attn_pdrop")
def test_in_float32_folders_agree_as_far_as_that_goes(make, config, tmp_path):
    rng = np.random.default_rng(0)
    ids, positions, *_ = inputs(config, rng, 2, 9)
    at_random(make, config, "eager", rng).float().save_pretrained(tmp_path / "theirs")
    model = huggingface.load(tmp_path / "theirs")
    huggingface.save(tmp_path / "ours", model)
    logits = model.forward(ids, positions)
    assert logits.dtype == np.float32
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        reference = opened(folder, torch.float32)
        with torch.no_grad():
            reference_logits = reference(torch.tensor(ids), position_ids=torch.tensor(positions)).logits
        assert deviation(logits, reference_logits) < 1e-5


def exchanged(table, one, other):
    return table | {one: table[other], other: table[one]}


LAYER = "model.layers.#."
MISTAKES = {
    "keys for values": (llama, exchanged(LLAMA, LAYER + "self_attn.k_proj", LAYER + "self_attn.v_proj"), {}),
    "gates for values": (llama, exchanged(LLAMA, LAYER + "mlp.gate_proj", LAYER + "mlp.up_proj"), {}),
    "norms": (llama, exchanged(LLAMA, LAYER + "input_layernorm", LAYER + "post_attention_layernorm"), {}),
    "rope layout": (llama, LLAMA, {"rope_layout": "interleaved"}),
    "theta": (llama, LLAMA, {"rope_theta": 10001.0}),
    "scaling": (llama, LLAMA, {"rope_scaling": RopeScaling("linear", 1.01)}),
    "eps": (llama, LLAMA, {"norm_eps": 1.1e-3}),
    "values for keys": (gpt2, GPT2 | {"transformer.h.#.attn.c_attn": [f"layers.#.attn.{x}_proj" for x in "qvk"]}, {}),
    "exact gelu": (gpt2, GPT2, {"ffn": "gelu"}),
}


@pytest.mark.parametrize(("make", "table", "options"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_seen(make, table, options):
    config = A_LLAMA if make is llama else A_GPT2
    (our_logits, *_), (logits, *_) = both(make, config, "eager", np.random.default_rng(0), 2, 7, table, **options)
    assert deviation(our_logits, logits) > 1e-6 > 100 * TOLERANCE


def test_a_parameter_that_is_missing_in_the_table_is_an_error():
    weights = dict(llama(A_LLAMA, "eager").named_parameters())
    without = {name: parts for name, parts in LLAMA.items() if name != "model.norm"}
    with pytest.raises(KeyError, match=r"model\.norm"):
        by_our_names(without, weights)
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match=r"missing \['ln_final.weight'\]"):
        TransformerLM(A_LLAMA, dtype=np.float64).load_state_dict(by_our_names(LLAMA, weights))


def test_without_float64_they_agree_as_far_as_float32_goes():
    rng = np.random.default_rng(0)
    case = inputs(A_LLAMA, rng, 2, 7)
    reference = at_random(llama, A_LLAMA, "eager", rng)
    logits, loss, _ = run_theirs(reference, *case)
    model = TransformerLM(A_LLAMA, dtype=np.float64)
    model.load_state_dict(by_our_names(LLAMA, dict(reference.named_parameters())))
    our_logits, our_loss, _ = run_ours(model, *case)
    assert TOLERANCE < deviation(our_logits, logits) < 1e-5
    assert TOLERANCE < deviation(our_loss, loss) < 1e-5
