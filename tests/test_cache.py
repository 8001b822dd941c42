"""The key/value cache: any chunking of a text gives the logits of one full pass, and wrong use changes nothing."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import batch_shapes, rngs, unit_scale

from numpygpt.cache import BLOCK, LayerCache
from numpygpt.config import CHOICES
from numpygpt.layers import DecoderBlock, MultiHeadAttention, RotaryPositionalEmbedding
from numpygpt.model import TransformerConfig, TransformerLM

CONTEXT = 9
CLOSE = {"rtol": 0, "atol": 1e-12}


def make(context_length=CONTEXT, dtype=np.float64, **fields):
    config = TransformerConfig(7, context_length, 8, **{"num_layers": 2, "num_heads": 4, "d_ff": 6} | fields)
    return TransformerLM(config, dtype=dtype, rng=0).eval()


@pytest.fixture
def model():
    return make()


fields_of_models = st.fixed_dictionaries(
    {name: st.sampled_from(CHOICES[name]) for name in ("positions", "rope_layout", "norm", "norm_position")}
    | {"bias": st.booleans(), "num_kv_heads": st.sampled_from([1, 2, 4]), "num_layers": st.integers(1, 3)}
)


@st.composite
def chunkings(draw, length):
    """Draw where to cut a sequence: pieces of at least one, in order."""
    cuts = sorted(draw(st.sets(st.integers(1, length - 1)))) if length > 1 else []
    return list(zip([0, *cuts], [*cuts, length], strict=True))


@given(fields=fields_of_models, rng=rngs, batch=batch_shapes, length=st.integers(1, CONTEXT), data=st.data())
def test_any_chunking_gives_the_logits_of_one_full_pass(fields, rng, batch, length, data):
    model = make(**fields)
    ids = rng.integers(0, 7, (*batch, length))
    full = model.forward(ids)
    cache = model.new_cache(batch)
    for start, stop in data.draw(chunkings(length)):
        assert cache.length == start
        np.testing.assert_allclose(model.forward(ids[..., start:stop], cache=cache), full[..., start:stop, :], **CLOSE)
    assert cache.length == length


@given(fields=fields_of_models, rng=rngs, lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_texts_of_different_lengths_go_on_each_at_its_own_position(fields, rng, lengths):
    model = make(**fields)
    ids = rng.integers(0, 7, (len(lengths), CONTEXT))
    full = model.forward(ids)
    rows, lengths = np.arange(len(lengths)), np.array(lengths)
    filled = np.where(np.arange(lengths.max()) < lengths[:, None], ids[:, : lengths.max()], 6)
    cache = model.new_cache(len(lengths))
    logits = model.forward(filled, cache=cache)
    np.testing.assert_allclose(logits[rows, lengths - 1], full[rows, lengths - 1], **CLOSE)
    for step in range(CONTEXT - lengths.max()):
        at = lengths + step
        logits = model.forward(ids[rows, at][:, None], at[:, None], cache)
        np.testing.assert_allclose(logits[:, 0], full[rows, at], **CLOSE)


@pytest.mark.parametrize("kind", CHOICES["positions"])
def test_a_token_has_the_position_that_it_has_in_the_text(kind):
    # RobertCsordas/moeut#6, lucidrains/rotary-embedding-torch#11, skyzh/tiny-llm#46
    model = make(positions=kind)
    ids = np.random.default_rng(0).integers(0, 7, (1, 8))
    full = model.forward(ids)
    cache = model.new_cache(1)
    model.forward(ids[:, :7], cache=cache)
    np.testing.assert_allclose(model.forward(ids[:, 7:], cache=cache), full[:, 7:], **CLOSE)
    np.testing.assert_allclose(model.forward(ids[:, 3:4], np.array([3]), cache), full[:, 3:4], **CLOSE)
    assert cache.length == 4  # what came after the token that was written anew is forgotten
    np.testing.assert_allclose(model.forward(ids[:, 4:], cache=cache), full[:, 4:], **CLOSE)


def test_no_token_is_computed_twice(model, monkeypatch):
    seen = []
    forward = MultiHeadAttention.forward
    monkeypatch.setattr(
        MultiHeadAttention, "forward", lambda self, x, *rest: seen.append(x.shape[-2]) or forward(self, x, *rest)
    )
    cache = model.new_cache(1)
    for n in (4, 1, 1, 2):
        model.forward(np.zeros((1, n), int), cache=cache)
    assert seen == [4, 4, 1, 1, 1, 1, 2, 2]  # two layers


def test_the_cache_holds_turned_keys_and_values_of_the_key_heads_alone():
    model = make(num_kv_heads=2, num_layers=1)
    ids = np.arange(5)
    cache = model.new_cache()
    model.forward(ids, cache=cache)
    attn, (layer,) = model.layers[0].attn, cache.layers
    x = model.layers[0].ln1.forward(model.token_embeddings.forward(ids))
    keys, values = (np.moveaxis(z.reshape(5, 2, 2), 0, 1) for z in (attn.k_proj(x), attn.v_proj(x)))
    assert layer.length == 5
    np.testing.assert_allclose(layer.keys[:, :5], attn.k_rope.forward(keys, np.arange(5)), **CLOSE)
    np.testing.assert_allclose(layer.values[:, :5], values, **CLOSE)


def test_the_arrays_grow_in_doubling_blocks_up_to_the_context_and_keep_what_they_hold():
    model = make(context_length=5 * BLOCK)
    ids = np.random.default_rng(0).integers(0, 7, 5 * BLOCK)
    cache, sizes = model.new_cache(), []
    assert cache.nbytes == 0
    pieces = []
    for start in range(0, 5 * BLOCK, 16):
        pieces.append(model.forward(ids[start : start + 16], cache=cache))
        sizes.append(cache.layers[0].keys.shape[-2])
    assert sorted(set(sizes)) == [BLOCK, 2 * BLOCK, 4 * BLOCK, 5 * BLOCK]
    assert cache.nbytes == 2 * 2 * 8 * 5 * BLOCK * 8  # layers, keys and values, features, slots, bytes
    np.testing.assert_allclose(np.concatenate(pieces), model.forward(ids), **CLOSE)
    small = make().new_cache(3)
    make().forward(np.zeros((3, 2), int), cache=small)
    assert small.layers[0].keys.shape == (3, 4, CONTEXT, 2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_cache_has_the_dtype_of_the_model(dtype):
    model = make(dtype=dtype)
    cache = model.new_cache(2)
    assert model.forward(np.zeros((2, 3), int), cache=cache).dtype == dtype
    assert all(x.dtype == dtype for layer in cache.layers for x in (layer.keys, layer.values))


@pytest.mark.parametrize("rope", [None, RotaryPositionalEmbedding(10000.0, 2, CONTEXT, dtype=np.float64)])
@pytest.mark.parametrize("masked", [False, True])
@given(rng=rngs, batch=batch_shapes, data=st.data())
def test_attention_and_block_count_on_from_their_cache_without_a_model(rope, masked, rng, batch, data):
    config = TransformerConfig(7, CONTEXT, 8, 1, 4, num_kv_heads=2, positions="none")
    x = rng.standard_normal((*batch, 6, 8))
    mask = rng.random((6, 6)) < 0.7 if masked else None
    for layer in (
        MultiHeadAttention(8, 4, 2, rope, dtype=np.float64, rng=rng),
        DecoderBlock(config, rope=rope, dtype=np.float64, rng=rng),
    ):
        unit_scale(layer, rng)
        full = layer.forward(x, mask=mask)
        cache = LayerCache((*batch, 2, 0, 2), CONTEXT, x)
        for start, stop in data.draw(chunkings(6)):
            here = None if mask is None else mask[start:stop, :stop]
            y = layer.forward(x[..., start:stop, :], mask=here, cache=cache)
            np.testing.assert_allclose(y, full[..., start:stop, :], rtol=1e-10, atol=1e-10)


# Wrong use


def contents(cache):
    return [(layer.length, layer.keys.copy(), layer.values.copy()) for layer in cache.layers]


def unchanged(cache, before):
    return all(
        n == m and np.array_equal(k, keys) and np.array_equal(v, values)
        for (n, k, v), (m, keys, values) in zip(contents(cache), before, strict=True)
    )


@pytest.mark.parametrize(
    ("shape", "positions", "error", "named"),
    [
        ((2, 4), None, ValueError, "4 tokens after 6 cached ones don't fit context_length 9"),
        ((2, 10), None, ValueError, "10 tokens.*context_length 9"),
        ((3, 1), None, ValueError, r"batch axes \(2,\).*\(3,\)"),
        ((1,), None, ValueError, r"batch axes \(2,\).*\(\)"),
        ((1, 2, 1), None, ValueError, r"batch axes \(2,\).*\(1, 2\)"),
        ((2, 2), [8, 9], IndexError, "position 9"),
        ((2, 1), [7], ValueError, "6 tokens cached"),
        ((2, 1), [[6], [7]], ValueError, "6 tokens cached"),
        ((2, 2), [5, 7], ValueError, "go up by one"),
        ((2, 2), [[0, 1], [1, 0]], ValueError, "go up by one"),
        ((2, 2), [[0, 1]], ValueError, r"shape \(2,\) or \(2, 2\), not \(1, 2\)"),
        ((2, 2), [0], ValueError, r"shape \(2,\) or \(2, 2\), not \(1,\)"),
        ((2, 1), [0.0], TypeError, "float64"),
    ],
)
def test_ids_that_do_not_fit_the_cache_are_refused_before_anything_changes(
    model, shape, positions, error, named, unchecked
):
    cache = model.new_cache(2)
    model.forward(np.ones((2, 6), int), cache=cache)
    before = contents(cache)
    positions = None if positions is None else np.array(positions)
    with pytest.raises(error, match=named):
        model.forward(np.ones(shape, int), positions, cache)
    assert unchanged(cache, before)
    model.forward(np.ones((2, 3), int), cache=cache)  # and it still takes what fits


def test_an_id_outside_the_vocabulary_changes_nothing(model):
    cache = model.new_cache(1)
    before = contents(cache)
    with pytest.raises(IndexError, match="token id 7"):
        model.forward(np.array([[7]]), cache=cache)
    assert unchanged(cache, before)


@pytest.mark.parametrize("size", [0, -1, 1.5, (2, 0)])
def test_a_cache_for_no_texts_is_refused(model, size, unchecked):
    with pytest.raises(ValueError, match="batch axis"):
        model.new_cache(size)


def test_the_cache_of_another_model_is_refused(model):
    other = TransformerLM(dataclasses.replace(model.config, num_heads=2), dtype=np.float64)
    with pytest.raises(ValueError, match="another config"):
        model.forward(np.zeros((1, 1), int), cache=other.new_cache(1))


def test_a_forward_that_fails_half_way_does_not_count(model, monkeypatch):
    ids = np.arange(7)
    full = model.forward(ids)
    cache = model.new_cache()
    model.forward(ids[:3], cache=cache)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.layers[1], "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.forward(ids[3:6], cache=cache)
    assert cache.length == 3
    np.testing.assert_allclose(model.forward(ids[3:], cache=cache), full[3:], **CLOSE)


# Backward


def test_a_backward_after_a_cached_forward_is_refused_and_adds_nothing(model):
    ids = np.zeros((1, 3), int)
    model.forward(ids)  # even after one that could be followed by it
    logits = model.forward(ids, cache=model.new_cache(1))
    with pytest.raises(AttributeError, match="without a cache"):
        model.backward(np.ones_like(logits))
    assert not model.flat.grad.any()
    attention = MultiHeadAttention(4, 2, rng=0)
    x = np.ones((3, 4), np.float32)
    attention.forward(x, cache=LayerCache((2, 0, 2), CONTEXT, x))
    with pytest.raises(AttributeError, match="without a cache"):
        attention.backward(x)
    assert not any(p.grad.any() for p in attention.parameters())


@pytest.mark.parametrize("place", CHOICES["norm_position"])
def test_a_block_alone_refuses_it_too_before_it_adds_anything(place):
    block = DecoderBlock(TransformerConfig(5, CONTEXT, 4, 1, 2, norm_position=place), rng=0)
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    block.forward(x, cache=LayerCache((2, 0, 2), CONTEXT, x))
    with pytest.raises(AttributeError, match="without a cache"):
        block.backward(x)
    assert not any(p.grad.any() for p in block.parameters())
    block.forward(x)
    assert block.backward(x).any()


def test_a_forward_without_a_cache_can_be_followed_by_backward_again(model):
    ids, dlogits = np.zeros((1, 3), int), np.ones((1, 3, 7))
    model.forward(ids)
    model.backward(dlogits)
    gradient = model.flat.grad.copy()
    model.zero_grad()
    model.forward(ids, cache=model.new_cache(1))
    model.forward(ids)
    model.backward(dlogits)
    assert np.array_equal(model.flat.grad, gradient)
