"""Attention: its gradients, what a mask hides, and how heads are split, shared and merged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import batch_shapes, check, check_along, masks, positions, rngs, sizes, unit_scale

from numpygpt.layers import MultiHeadAttention, RotaryPositionalEmbedding, ScaledDotProductAttention, Softmax, attention

LIMIT = 9


@st.composite
def queries_keys_values(draw):
    """Draw q, k, v and a mask."""
    rng, batch = draw(rngs), draw(batch_shapes)
    queries, keys, d_k, d_v = (draw(sizes) for _ in range(4))
    shapes = (queries, d_k), (keys, d_k), (keys, d_v)
    return *(rng.standard_normal((*batch, *s)) for s in shapes), draw(masks(batch, queries, keys, rng))


@given(queries_keys_values())
def test_gradients_under_any_mask(drawn):
    *qkv, mask = drawn
    check(ScaledDotProductAttention(), *qkv, mask=mask)


@given(queries_keys_values())
def test_a_query_that_sees_no_key_gets_zero_and_no_gradient(drawn):
    q, k, v, mask = drawn
    mask = np.zeros((q.shape[-2], k.shape[-2]), bool) if mask is None else mask
    hidden = ~np.broadcast_to(mask, (*q.shape[:-1], k.shape[-2])).any(axis=-1)
    layer = ScaledDotProductAttention()
    o = layer(q, k, v, mask)
    dq, dk, dv = layer.backward(np.cos(o))
    assert not o[hidden].any() and not dq[hidden].any()
    unseen = ~np.broadcast_to(mask, (*q.shape[:-1], k.shape[-2])).any(axis=-2)
    assert not dk[unseen].any() and not dv[unseen].any()


def test_hiding_every_key_from_one_query_leaves_the_other_rows_as_they_were():
    # pytorch/pytorch#41508, tracel-ai/burn#4697
    rng = np.random.default_rng(0)
    q, k, v, do = rng.standard_normal((4, 5, 3))
    mask = np.tri(5, dtype=bool)
    others = [0, 1, 3, 4]
    layer = ScaledDotProductAttention()
    o, dq = layer(q, k, v, mask), layer.backward(do)[0]
    mask[2] = False
    o_hidden, gradients = layer(q, k, v, mask), layer.backward(do)
    assert all(np.isfinite(g).all() for g in gradients)
    assert not o_hidden[2].any() and not gradients[0][2].any()
    assert np.array_equal(o_hidden[others], o[others]) and np.array_equal(gradients[0][others], dq[others])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_legal_score_however_low_lets_a_hidden_key_leak(dtype):
    q, k, v = (np.array(x, dtype) for x in ([[1e15]], [[-1e15], [1e15]], [[1], [1e30]]))
    layer = ScaledDotProductAttention()
    assert layer(q, k, v, np.array([[True, False]])) == 1
    dq, dk, dv = layer.backward(np.ones((1, 1), dtype))
    assert not dq.any() and not dk.any() and dv.tolist() == [[1], [0]]


def test_scores_are_divided_by_the_root_of_the_head_width():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, 5, 9)), rng.standard_normal((2, 5, 9)), rng.standard_normal((2, 5, 4))
    np.testing.assert_allclose(ScaledDotProductAttention()(q, k, v), Softmax()(q @ k.swapaxes(1, 2) / 3) @ v)


def test_without_a_mask_nothing_is_hidden_also_where_none_means_everywhere(monkeypatch):
    q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    want, copyto = ScaledDotProductAttention()(q, k, v, np.ones((5, 5), bool)), np.copyto

    def as_in_cupy(to, x, where=None):
        copyto(to, x, where=True if where is None else where)

    monkeypatch.setattr(np, "copyto", as_in_cupy)
    assert np.array_equal(ScaledDotProductAttention()(q, k, v), want)


@pytest.mark.parametrize(("mask", "kind"), [(np.ones((3, 3)), "float64"), ("causal", "str")])
def test_a_mask_that_is_not_boolean_is_refused_by_its_kind(mask, kind, unchecked):
    x = np.ones((3, 4), np.float32)
    for layer, arguments in ((ScaledDotProductAttention(), (x, x, x)), (MultiHeadAttention(4, 2), (x,))):
        with pytest.raises(TypeError, match=f"mask must be a boolean array.*, not {kind}$"):
            layer.forward(*arguments, mask=mask)


@pytest.mark.parametrize("shape", [(3, 1), (1, 2), (2, 3, 2), (2,), (3, 4)])
def test_a_cotangent_of_another_shape_is_refused(shape, unchecked):
    layer = ScaledDotProductAttention()
    layer.forward(np.ones((3, 4)), np.ones((5, 4)), np.ones((5, 2)))
    with pytest.raises(ValueError, match=r"cotangent has shape .*forward returned shape \(3, 2\)"):
        layer.backward(np.ones(shape))


@pytest.mark.parametrize("t", [np.array([0]), np.array([0, 1]), np.array([0.0, 1, 2]), np.array([True] * 3)])
def test_positions_that_are_not_one_integer_for_each_token_are_refused(t, unchecked):
    with pytest.raises(ValueError, match=rf"each of the 3 positions.*not {t.dtype} of shape \({t.size},\)"):
        MultiHeadAttention(4, 2).forward(np.ones((2, 3, 4), np.float32), t)


@st.composite
def multi_heads(draw):
    """Draw the options of a MultiHeadAttention, an input and its other arguments by name."""
    rng, batch, length = draw(rngs), draw(batch_shapes), draw(st.integers(1, 4))
    d_k = draw(st.sampled_from([1, 2, 4]))
    num_heads, num_kv_heads = draw(st.sampled_from([(1, 1), (2, 2), (2, 1), (4, 2), (3, 1)]))
    layout = draw(st.sampled_from([None, "interleaved", "half"])) if d_k > 1 else None
    options = d_k, num_heads, num_kv_heads, layout, draw(st.booleans()), rng
    x = 0.5 * rng.standard_normal((*batch, length, num_heads * d_k))
    token_positions = draw(st.none() | positions(batch, length, LIMIT, rng))
    return options, x, {"token_positions": token_positions, "mask": draw(masks(batch, length, length, rng))}


def make(options):
    d_k, num_heads, num_kv_heads, layout, bias, rng = options
    rope = layout and RotaryPositionalEmbedding(50.0, d_k, LIMIT, layout, dtype=np.float64)
    return unit_scale(MultiHeadAttention(num_heads * d_k, num_heads, num_kv_heads, rope, bias, dtype=np.float64), rng)


@given(multi_heads())
def test_multi_head_gradients(drawn):
    options, x, arguments = drawn
    layer = make(options)
    check_along(layer, x, **arguments)


@given(multi_heads())
def test_multi_head_attention_is_attention_head_by_head(drawn):
    options, x, arguments = drawn
    layer = make(options)
    t, mask = arguments["token_positions"], arguments["mask"]
    t = np.broadcast_to(np.arange(x.shape[-2]) if t is None else t, x.shape[:-1])
    visible = t[..., :, None] >= t[..., None, :]
    visible = visible if mask is None else visible & mask
    d_k = layer.d_k
    heads = []
    for h in range(x.shape[-1] // d_k):
        g = h // layer.group
        q = layer.q_proj(x)[..., h * d_k : (h + 1) * d_k]
        k, v = (proj(x)[..., g * d_k : (g + 1) * d_k] for proj in (layer.k_proj, layer.v_proj))
        if layer.q_rope is not None:
            q, k = layer.q_rope(q, t), layer.q_rope(k, t)
        heads.append(ScaledDotProductAttention()(q, k, v, visible))
    want = layer.output_proj(np.concatenate(heads, axis=-1))
    np.testing.assert_allclose(layer(x, **arguments), want, rtol=1e-9, atol=1e-10)


@given(multi_heads(), st.data())
def test_an_output_has_no_gradient_in_later_tokens(drawn, data):
    options, x, _ = drawn
    layer = make(options)
    length = x.shape[-2]
    t = data.draw(st.integers(0, length - 1))
    dy = np.zeros_like(x)
    dy[..., t, :] = 1
    layer(x)
    dx = layer.backward(dy)
    assert dx[..., t, :].any() and not dx[..., t + 1 :, :].any()


@given(multi_heads(), st.data())
def test_a_permutation_of_the_heads_commutes_with_attention(drawn, data):
    options, x, arguments = drawn
    layer = make(options)
    kv, group, d_k = layer.num_kv_heads, layer.group, layer.d_k
    order = np.array(data.draw(st.permutations(range(kv))))
    inside = np.array(data.draw(st.permutations(range(group))))
    q_rows = np.arange(kv * group * d_k).reshape(kv, group, d_k)[order][:, inside].reshape(-1)
    kv_rows = np.arange(kv * d_k).reshape(kv, d_k)[order].reshape(-1)
    y = layer(x, **arguments)
    for proj, rows in ((layer.q_proj, q_rows), (layer.k_proj, kv_rows), (layer.v_proj, kv_rows)):
        for p in proj.parameters():
            p.value = p.value[rows]
    layer.output_proj.weight.value = layer.output_proj.weight.value[:, q_rows]
    np.testing.assert_allclose(layer(x, **arguments), y, rtol=1e-9, atol=1e-10)


@given(rngs, batch_shapes, st.integers(1, 9), st.integers(1, 3), st.sampled_from([1, 2, 4, 64]))
def test_causal_attention_in_blocks_is_attention_under_the_causal_mask(rng, batch, length, group, block):
    q = rng.standard_normal((*batch, length * group, 3))
    k, v = rng.standard_normal((2, *batch, length, 3))
    do = rng.standard_normal(q.shape)
    layer, masked = ScaledDotProductAttention(), ScaledDotProductAttention()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "QUERIES", block)
        o = layer(q, k, v, causal=group)
        assert len(layer.saved[-1]) == -(-length // block)  # blocks
    want = masked(q, k, v, np.repeat(np.tri(length, dtype=bool), group, axis=0))
    for mine, other in zip((o, *layer.backward(do)), (want, *masked.backward(do)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-12, atol=1e-13)


@given(multi_heads(), st.sampled_from([1, 2, 64]))
def test_positions_that_are_given_change_nothing_if_they_are_those_that_are_not(drawn, block):
    """With positions a mask is made, without them attention goes in blocks."""
    options, x, _ = drawn
    layer = make(options)
    dy = np.cos(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "QUERIES", block)
        y, dx = layer(x), layer.backward(dy)
    np.testing.assert_allclose(layer(x, np.arange(x.shape[-2])), y, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(layer.backward(dy), dx, rtol=1e-9, atol=1e-10)


def test_a_token_sees_those_at_its_position_or_before_in_whatever_order_they_stand():
    layer, order = MultiHeadAttention(4, 2, dtype=np.float64, rng=0), np.array([2, 0, 1])
    x = np.random.default_rng(0).standard_normal((3, 4))
    np.testing.assert_allclose(layer(x[order], order), layer(x)[order])


def test_two_heads_that_attend_to_themselves_only_merge_back_into_v():
    # jsbaan/transformer-from-scratch#6: heads merged without a transpose
    layer = MultiHeadAttention(4, 2, dtype=np.float64, rng=0)
    layer.v_proj.weight.value = layer.output_proj.weight.value = np.eye(4)
    x = np.random.default_rng(0).standard_normal((3, 4))
    np.testing.assert_allclose(layer(x, mask=np.eye(3, dtype=bool)), x)


def test_queries_and_keys_of_two_attentions_may_share_one_rope():
    rope = RotaryPositionalEmbedding(100.0, 2, LIMIT, dtype=np.float64)
    rng = np.random.default_rng(0)
    first, second = (unit_scale(MultiHeadAttention(4, 2, rope=rope, dtype=np.float64), rng) for _ in range(2))
    x, dy = rng.standard_normal((2, 3, 4))
    first(x, np.array([0, 1, 2]))
    want = first.backward(dy)
    first(x, np.array([0, 1, 2]))
    second(x, np.array([6, 3, 8]))
    assert np.array_equal(first.backward(dy), want)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 1), "d_model.*0"),
        ((4, 0), "num_heads.*0"),
        ((4, 2, 0), "num_kv_heads.*0"),
        ((4, 3), "num_heads 3 doesn't divide d_model 4"),
        ((8, 4, 3), "num_kv_heads 3 doesn't divide num_heads 4"),
        ((8, 2, 2, RotaryPositionalEmbedding(10.0, 2, 4)), "width 2.*is 4"),
    ],
)
def test_heads_that_do_not_fit_are_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        MultiHeadAttention(*arguments)
