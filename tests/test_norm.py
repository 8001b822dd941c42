"""RMSNorm and LayerNorm: to a common scale, and no gradient along what they ignore."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import batch_shapes, check, epsilons, rngs, sizes, unit_scale

from numpygpt.layers import LayerNorm, RMSNorm

NORMS = {"rmsnorm": RMSNorm, "layernorm": LayerNorm, "no bias": functools.partial(LayerNorm, bias=False)}
norms = st.sampled_from(list(NORMS.values()))
both = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)


@given(rngs, norms, batch_shapes, sizes, epsilons)
def test_gradients(rng, norm, batch, width, eps):
    check(unit_scale(norm(width, eps, dtype=np.float64), rng), rng.standard_normal((*batch, width)))


@both
def test_gradients_of_a_3d_input_with_unequal_gains(norm):
    # flagos-ai/FlagGems#5392: wrong on 3-D inputs, hidden by a uniform cotangent
    rng = np.random.default_rng(0)
    layer = unit_scale(norm(4, dtype=np.float64), rng)
    check(layer, rng.standard_normal((2, 3, 4)), directions=10)


@given(rngs, batch_shapes, st.integers(2, 6))
def test_rmsnorm_has_no_gradient_along_x(rng, batch, width):
    layer = unit_scale(RMSNorm(width, 0.0, dtype=np.float64), rng)
    x, dy = rng.standard_normal((2, *batch, width))
    layer(x)
    np.testing.assert_allclose(np.sum(layer.backward(dy) * x, axis=-1), 0, atol=1e-10)


@given(rngs, batch_shapes, st.integers(3, 6))
def test_layernorm_has_no_gradient_along_ones_or_along_the_normalised_x(rng, batch, width):
    layer = LayerNorm(width, 0.0, dtype=np.float64)
    x, dy = rng.standard_normal((2, *batch, width))
    h = layer(x)  # gain 1, bias 0
    unit_scale(layer, rng)
    layer(x)
    dx = layer.backward(dy)
    np.testing.assert_allclose(dx.sum(axis=-1), 0, atol=1e-9)
    np.testing.assert_allclose(np.sum(dx * h, axis=-1), 0, atol=1e-9)


@given(rngs, norms, batch_shapes)
def test_the_length_of_x_is_ignored_and_by_layernorm_its_mean(rng, norm, batch):
    layer = unit_scale(norm(5, 0.0, dtype=np.float64), rng)
    x = rng.standard_normal((*batch, 5))
    np.testing.assert_allclose(layer(7 * x), layer(x), rtol=1e-9, atol=1e-9)
    if norm is not RMSNorm:
        np.testing.assert_allclose(layer(x + 3), layer(x), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("norm", "x", "eps", "want"),
    [
        (LayerNorm, [0, 0, 10], 1e-5, 1.4142),  # dividing by n - 1 would give 1.1547
        (LayerNorm, [-1e-3, 1e-3], 1e-5, 0.3015),  # eps outside the root would give .990
        (RMSNorm, [1e-3] * 4, 1e-5, 0.3015),
        (RMSNorm, [1e-3] * 4, 1e-6, 0.7071),
    ],
)
def test_the_variance_is_biased_and_eps_inside_the_root(norm, x, eps, want):
    # hyunwoongko/transformer#7, harvardnlp/annotated-transformer#119; Lightning-AI/lit-llama#339
    assert norm(len(x), eps)(np.array(x, np.float32))[-1] == pytest.approx(want, abs=5e-5)


@both
def test_gain_and_bias_apply_after_normalising(norm):
    layer = norm(2)
    layer.weight.value = np.array([2.0, 5.0])
    if getattr(layer, "bias", None):
        layer.bias.value = np.array([10.0, 20.0])
    want = np.array([2.0, -5.0]) + ([10, 20] if getattr(layer, "bias", None) else 0)
    np.testing.assert_allclose(layer(np.array([1e3, -1e3], np.float32)), want, rtol=1e-6)


@both
def test_float16_is_computed_in_float32_and_returned_as_float16(norm):
    # ggml-org/llama.cpp#2384: in float16 the square of 1e-4 is 0
    x = np.array([1e-4, -1e-4], np.float16)
    layer = norm(2, 1e-9)
    y = layer(x)
    assert y.dtype == np.float16 and abs(abs(y[0]) - 0.953) < 0.002
    dx = layer.backward(np.array([1, 2], np.float16))
    assert dx.dtype == np.float16 and np.isfinite(dx).all() and dx.any()


@both
def test_float16_gains_and_cotangents_are_multiplied_in_float32(norm):
    layer = norm(2, 1e-9, dtype=np.float16)
    layer.weight.value = np.full(2, 1e-4, np.float16)
    layer(np.array([1e-4, -1e-4], np.float16))
    assert layer.backward(np.array([1e-4, 2e-4], np.float16)).any()  # in float16 their product is 0


def test_float16_cotangents_are_summed_in_float32():
    layer = LayerNorm(2)
    x = np.ones((4096, 2), np.float16)
    layer(x)
    layer.backward(x)
    assert layer.bias.grad.tolist() == [4096, 4096]  # in float16, 2048 + 1 = 2048


@both
def test_a_width_below_one_is_refused(norm):
    with pytest.raises(ValueError, match=r"d_model.*0"):
        norm(0)


@both
@pytest.mark.parametrize("eps", [-1e-5, float("nan"), float("inf")])
def test_a_bad_eps_is_refused(norm, eps):
    with pytest.raises(ValueError, match=f"eps.*{eps}"):
        norm(4, eps)
