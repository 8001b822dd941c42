"""Positions: sinusoidal, learned, rotary."""

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import batch_shapes, check, positions, rngs, sizes, unit_scale

from numpygpt.config import RopeScaling
from numpygpt.layers import LearnedPositions, RotaryPositionalEmbedding, SinusoidalPositions

LIMIT = 12
layouts = st.sampled_from(["interleaved", "half"])
even = st.sampled_from([2, 4, 6])


def rope(d_k=4, layout="interleaved", theta=10000.0, length=LIMIT, dtype=np.float64):
    return RotaryPositionalEmbedding(theta, d_k, length, layout, dtype=dtype)


@st.composite
def inputs(draw, widths):
    """Draw x and positions."""
    rng, batch, length = draw(rngs), draw(batch_shapes), draw(sizes)
    x = rng.standard_normal((*batch, length, draw(widths)))
    return x, draw(positions(batch, length, LIMIT, rng))


@given(inputs(even), layouts, st.sampled_from([10000.0, 3.0]))
def test_rope_gradients(drawn, layout, theta):
    check(rope(drawn[0].shape[-1], layout, theta), *drawn)


@given(inputs(even), layouts)
def test_rope_keeps_lengths_and_its_backward_undoes_forward(drawn, layout):
    x, t = drawn
    layer = rope(x.shape[-1], layout)
    y = layer(x, t)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1))
    np.testing.assert_allclose(layer.backward(y), x, atol=1e-14)


@given(rngs, layouts, even, st.integers(0, 5), st.integers(0, 5), st.integers(1, 6))
def test_rope_scores_depend_on_the_distance_of_positions_only(rng, layout, d_k, m, n, shift):
    q, k = rng.standard_normal((2, 1, d_k))
    layer = rope(d_k, layout)
    here = np.vdot(layer(q, np.array([m])), layer(k, np.array([n])))
    there = np.vdot(layer(q, np.array([m + shift])), layer(k, np.array([n + shift])))
    assert there == pytest.approx(here, abs=1e-12)


@pytest.mark.parametrize(
    ("layout", "want"), [("interleaved", [0.5403, 0.8415, 0, 0]), ("half", [0.5403, 0, 0.8415, 0])]
)
def test_rope_pairs_features_as_its_layout_says(layout, want):
    # huggingface/transformers#25199, huggingface/candle#3948, ggml-org/llama.cpp#3364
    np.testing.assert_allclose(rope(layout=layout)(np.eye(1, 4), np.array([1]))[0], want, atol=5e-5)


@given(rngs, even, st.sampled_from([10000.0, 7.0]))
def test_rope_turns_pair_i_by_position_times_theta_to_minus_2i_over_d(rng, d_k, theta):
    x = rng.standard_normal((LIMIT, d_k))
    pairs = x[:, 0::2] + 1j * x[:, 1::2]
    t, i = np.ogrid[:LIMIT, : d_k // 2]
    want = pairs * np.exp(1j * t * theta ** (-2 * i / d_k))
    y = rope(d_k, theta=theta)(x, np.arange(LIMIT))
    np.testing.assert_allclose(y[:, 0::2] + 1j * y[:, 1::2], want, atol=1e-12)
    to_half = [*range(0, d_k, 2), *range(1, d_k, 2)]
    np.testing.assert_allclose(rope(d_k, "half", theta)(x[:, to_half], np.arange(LIMIT)), y[:, to_half], atol=1e-14)


@given(rngs, st.sampled_from([1.0, 2.0, 40.0]))
def test_a_linear_scaling_is_a_position_divided(rng, factor):
    x, t = rng.standard_normal((LIMIT, 4)), np.arange(LIMIT)
    layer = RotaryPositionalEmbedding(7.0, 4, LIMIT, scaling=RopeScaling("linear", factor), dtype=np.float64)
    pairs = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * t[:, None] / factor * 7.0 ** (-np.arange(2) / 2))
    np.testing.assert_allclose(layer(x, t), np.stack([pairs.real, pairs.imag], -1).reshape(x.shape), atol=1e-12)


def test_llama3_lowers_slow_frequencies_and_no_fast_ones():
    """In three cases by the wavelength, as Llama 3.1's code has it."""
    theta, d_k, factor, low, high, context = 500000.0, 64, 8.0, 1.0, 4.0, 8192
    cases = set()
    for i, turn in enumerate(
        RotaryPositionalEmbedding(
            theta, d_k, 2, scaling=RopeScaling("llama3", factor, low, high, context), dtype=np.float64
        ).turn[1]
    ):
        frequency = theta ** (-2 * i / d_k)
        wavelength = 2 * math.pi / frequency
        if wavelength < context / high:
            cases.add("fast")
        elif wavelength > context / low:
            cases.add("slow")
            frequency /= factor
        else:
            cases.add("between")
            smooth = (context / wavelength - low) / (high - low)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        assert np.angle(turn) == pytest.approx(frequency, rel=1e-9)
    assert cases == {"fast", "between", "slow"}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@given(rngs, layouts)
def test_rope_takes_features_that_do_not_lie_side_by_side(order, rng, layout):
    layer, x, t = rope(layout=layout), rng.standard_normal((2, 3, 4)), np.arange(3)
    strided = x.transpose(order).copy().transpose(np.argsort(order))
    assert np.array_equal(layer(strided, t), layer(x, t))
    assert np.array_equal(layer.backward(strided), layer.backward(x))


@given(rngs, layouts)
def test_rope_of_half_precision_is_half_precision(rng, layout):
    half, layer, t = rope(layout=layout, dtype=np.float16), rope(layout=layout), np.arange(3)
    x = rng.standard_normal((3, 4)).astype(np.float16)
    for mine, want in ((half(x, t), layer(x.astype(float), t)), (half.backward(x), layer.backward(x.astype(float)))):
        assert mine.dtype == np.float16
        np.testing.assert_allclose(mine, want, rtol=1e-3, atol=1e-3)


@given(rngs, layouts)
def test_a_cached_token_is_turned_by_its_true_position(rng, layout):
    # RobertCsordas/moeut#6, lucidrains/rotary-embedding-torch#11, skyzh/tiny-llm#46
    layer, x = rope(layout=layout), rng.standard_normal((LIMIT, 4))
    full = layer(x, np.arange(LIMIT))
    for offset in (7, 3):  # the second has the same length as the first
        assert np.array_equal(layer(x[[offset]], np.array([offset])), full[[offset]])


@given(inputs(sizes))
def test_sinusoidal_gradients(drawn):
    check(SinusoidalPositions(LIMIT, drawn[0].shape[-1], dtype=np.float64), *drawn)


@pytest.mark.parametrize("width", [1, 4, 5])  # huggingface/transformers#48101: an odd width works
def test_sinusoidal_vectors(width):
    y = SinusoidalPositions(LIMIT, width, dtype=np.float64)(np.ones((LIMIT, width)), np.arange(LIMIT))
    for t in range(LIMIT):
        for c in range(width):
            wave = math.cos if c % 2 else math.sin
            assert y[t, c] == pytest.approx(1 + wave(t / 10000 ** ((c - c % 2) / width)), abs=1e-12)


@given(inputs(sizes))
def test_learned_gradients_also_of_repeated_positions(drawn):
    x, t = drawn
    layer = unit_scale(LearnedPositions(LIMIT, x.shape[-1], dtype=np.float64), np.random.default_rng(0))
    np.testing.assert_array_equal(layer(x, t), x + layer.embeddings.weight.value[t])
    check(layer, x, t)


LAYERS = {"rope": rope(), "sinusoidal": SinusoidalPositions(LIMIT, 4), "learned": LearnedPositions(LIMIT, 4)}
each = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


@each
@pytest.mark.parametrize("bad", [LIMIT, -1])
def test_a_position_outside_the_table_is_refused_by_name(layer, bad):
    with pytest.raises(IndexError, match=rf"position {bad} is outside 0\.\.{LIMIT - 1}"):
        layer(np.ones((2, 4)), np.array([0, bad]))


@each
@pytest.mark.parametrize("width", [1, 3])
def test_an_input_of_another_width_is_refused(layer, width, unchecked):
    with pytest.raises(ValueError, match=rf"size 4.*\(3, {width}\)"):  # a width of 1 would be broadcast
        layer.forward(np.ones((3, width)), np.arange(3))


@each
@pytest.mark.parametrize("shape", [(2,), (4,), (3, 3), (1, 2, 3)])
def test_positions_that_do_not_broadcast_to_the_sequences_are_refused(layer, shape, unchecked):
    with pytest.raises(ValueError, match=rf"{re.escape(str(shape))} don't broadcast to.*\(2, 3\)"):
        layer.forward(np.ones((2, 3, 4)), np.zeros(shape, int))


@each
def test_positions_must_be_integers(layer, unchecked):
    with pytest.raises(TypeError, match="positions must be integers, not float64"):
        layer(np.ones((2, 4)), np.array([0.0, 1.0]))


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ({"d_k": 5}, "even, not 5"),
        ({"d_k": 0}, "d_k.*0"),
        ({"length": 0}, "max_seq_len.*0"),
        ({"theta": 0.0}, "theta.*0"),
        ({"theta": -1.0}, "theta.*-1"),
        ({"theta": float("inf")}, "theta.*inf"),
        ({"theta": float("nan")}, "theta.*nan"),
        ({"layout": "neox"}, "layout.*neox"),
    ],
)
def test_rope_refuses_bad_arguments(argument, named):
    with pytest.raises(ValueError, match=named):
        rope(**argument)


@pytest.mark.parametrize("layer", [SinusoidalPositions, LearnedPositions])
def test_a_size_below_one_is_refused(layer):
    with pytest.raises(ValueError, match=r"max_seq_len.*0"):
        layer(0, 4)
    with pytest.raises(ValueError, match=r"d_model.*0"):
        layer(4, 0)
