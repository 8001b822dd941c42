"""A decoder block: two residual halves, with the norm before or behind."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import (
    Reseeded,
    batch_shapes,
    check_along,
    far_from_kinks,
    masks,
    positions,
    rngs,
    unit_scale,
    watch_relus,
)

from numpygpt.config import CHOICES, RopeScaling, TransformerConfig
from numpygpt.layers import DecoderBlock, RotaryPositionalEmbedding
from numpygpt.layers.block import make_rope

LIMIT = 6
configs = st.builds(
    TransformerConfig,
    vocab_size=st.just(1),
    context_length=st.just(LIMIT),
    d_model=st.just(8),
    num_layers=st.just(1),
    num_heads=st.just(4),
    num_kv_heads=st.sampled_from([None, 1, 2]),
    d_ff=st.integers(1, 4),
    norm_eps=st.sampled_from([1e-5, 0.1]),
    bias=st.booleans(),
    dropout=st.sampled_from([0.0, 0.4]),
    **{name: st.sampled_from(CHOICES[name]) for name in ("rope_layout", "norm", "norm_position", "ffn", "positions")},
)
places = pytest.mark.parametrize("place", ["pre", "post"])


@given(rngs, configs, batch_shapes, st.integers(1, 4), st.booleans(), st.data())
def test_gradients(rng, config, batch, length, training, data):
    block = watch_relus(unit_scale(DecoderBlock(config, dtype=np.float64), rng)).train(training)
    x = rng.standard_normal((*batch, length, 8))
    arguments = {
        "token_positions": data.draw(st.none() | positions(batch, length, LIMIT, rng)),
        "mask": data.draw(masks(batch, length, length, rng)),
    }
    layer = Reseeded(block)
    layer.forward(x, **arguments)
    assume(far_from_kinks(block))
    check_along(layer, x, directions=1, **arguments)


def make(place, **fields):
    config = TransformerConfig(5, LIMIT, 8, 1, 2, d_ff=3, norm_position=place, **fields)
    return unit_scale(DecoderBlock(config, dtype=np.float64, rng=0), np.random.default_rng(0))


@places
def test_gradients_with_dropout_in_either_place(place):
    block = make(place, dropout=0.5)
    check_along(Reseeded(block), np.random.default_rng(1).standard_normal((2, 3, 8)))
    assert all(np.count_nonzero(dropout.saved == 0) for dropout in (block.dropout1, block.dropout2))


@places
def test_each_half_is_x_plus_its_sublayer_with_the_norm_before_or_behind(place):
    block, x = make(place), np.random.default_rng(1).standard_normal((2, 3, 8))
    ln1, attn, ln2, ffn = block.ln1, block.attn, block.ln2, block.ffn
    if place == "pre":
        middle = x + attn(ln1(x))
        want = middle + ffn(ln2(middle))
    else:
        middle = ln1(x + attn(x))
        want = ln2(middle + ffn(middle))
    np.testing.assert_array_equal(block(x), want)


def test_with_the_norm_before_a_cotangent_passes_untouched_whatever_the_sublayers_do():
    block = make("pre")
    for silent in (block.attn.output_proj, block.ffn.w2):
        silent.weight.value = np.zeros(silent.weight.shape)
    x, dy = np.random.default_rng(0).standard_normal((2, 3, 8))
    assert np.array_equal(block(x), x) and np.array_equal(block.backward(dy), dy)


@places
def test_dropout_acts_on_what_each_sublayer_adds(place):
    block = make(place, dropout=0.5)
    calls = []
    for layer in (block.dropout1, block.dropout2):
        layer.forward = lambda z: calls.append(z) or np.zeros_like(z)
    x = np.random.default_rng(0).standard_normal((3, 8))
    want = x if place == "pre" else block.ln2(block.ln1(x))
    np.testing.assert_allclose(block(x), want)
    assert len(calls) == 2


def test_the_parts_take_their_settings_from_the_config():
    # Lightning-AI/lit-llama#339, ggml-org/llama.cpp#2384: eps and theta hard-coded
    block = make("pre", norm="layernorm", norm_eps=0.25, rope_theta=50.0, rope_layout="half", bias=True, num_kv_heads=1)
    assert block.ln1.eps == block.ln2.eps == 0.25 and block.attn.q_rope.layout == "half"
    np.testing.assert_allclose(block.attn.q_rope.turn[1], np.exp(1j * np.array([1, 50**-0.5])), rtol=1e-6)
    biased = [block.ln1, block.ln2, block.attn.q_proj, block.attn.output_proj, block.ffn.w1, block.ffn.w2, block.ffn.w3]
    assert all(part.bias is not None for part in biased)
    assert block.attn.k_proj.weight.shape == (4, 8) and block.ffn.w1.weight.shape == (3, 8)
    plain = DecoderBlock(dataclasses.replace(TransformerConfig(5, 4, 8, 1, 2), norm="layernorm", positions="none"))
    assert plain.ln1.bias is None and plain.attn.q_rope is None


def test_rope_is_made_as_the_config_has_it():
    scaling = RopeScaling("linear", 3.0)
    config = TransformerConfig(5, 9, 12, 1, 2, rope_theta=70.0, rope_layout="half", rope_scaling=scaling)
    made, want = make_rope(config, np.float64), RotaryPositionalEmbedding(70.0, 6, 9, "half", scaling, dtype=np.float64)
    assert made.layout == "half"
    assert np.array_equal(made.turn, want.turn)
