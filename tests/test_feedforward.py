"""Feed-forward, plain and gated."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import batch_shapes, check_along, far_from_kinks, rngs, sizes, unit_scale, watch_relus

from numpygpt.layers import GLU, FeedForward, SwiGLU
from numpygpt.layers.activation import ACTIVATIONS, make_activation

activations = st.sampled_from(list(ACTIVATIONS))
kinds = st.sampled_from([FeedForward, GLU])


@given(rngs, kinds, batch_shapes, sizes, sizes, activations, st.booleans())
def test_gradients(rng, kind, batch, d_model, d_ff, activation, bias):
    layer = watch_relus(unit_scale(kind(d_model, d_ff, activation, bias, dtype=np.float64), rng))
    x = rng.standard_normal((*batch, d_model))
    y = layer(x)
    assume(far_from_kinks(layer))
    check_along(layer, x)

    weights = {name: p.value for name, p in layer.named_parameters()}
    z = {
        w: x @ weights[f"{w}.weight"].T + weights.get(f"{w}.bias", 0) for w in ("w1", "w3") if f"{w}.weight" in weights
    }
    h = make_activation(activation)(z["w1"]) * z.get("w3", 1)
    np.testing.assert_allclose(y, h @ weights["w2.weight"].T + weights.get("w2.bias", 0), rtol=1e-9, atol=1e-9)


@given(rngs, kinds, activations)
def test_nothing_flows_between_positions(rng, kind, activation):
    layer = unit_scale(kind(3, 4, activation, dtype=np.float64), rng)
    layer(rng.standard_normal((5, 3)))
    dy = np.zeros((5, 3))
    dy[2] = 1
    assert np.flatnonzero(layer.backward(dy).any(axis=-1)).tolist() in ([2], [])


def gradients(u, v, activation="sigmoid"):
    """Return the gradients of gate and value of a one-unit GLU with W1 x = u and W3 x = v."""
    layer = GLU(1, 1, activation, dtype=np.float64)
    for linear, weight in ((layer.w1, u), (layer.w3, v), (layer.w2, 1.0)):
        linear.weight.value = np.array([[weight]])
    layer(np.ones(1))
    layer.backward(np.ones(1))
    return layer.w1.weight.grad.item(), layer.w3.weight.grad.item()


def test_each_path_of_a_gate_is_scaled_by_what_the_other_carries():
    assert gradients(u=-1000.0, v=2.0) == (0, 0)  # shut and saturated: neither learns
    assert gradients(u=1000.0, v=2.0) == (0, 1)  # open and saturated: only the value
    assert gradients(u=0.0, v=0.0) == (0, 0.5)  # value zero: the gate learns nothing, however steep it is
    assert gradients(u=0.0, v=2.0, activation="identity") == (2, 0)  # shut, not saturated: only the gate


@pytest.mark.parametrize(
    ("kind", "d_model", "d_ff"),
    [(FeedForward, 5, 20), (SwiGLU, 24, 64), (SwiGLU, 25, 128), (GLU, 128, 384), (SwiGLU, 512, 1408)],
)
def test_the_default_width(kind, d_model, d_ff):
    assert kind(d_model).w1.weight.shape == (d_ff, d_model)


@pytest.mark.parametrize("kind", [FeedForward, GLU, SwiGLU])
def test_a_width_that_is_given_is_taken_as_given(kind):
    layer = kind(4, 7)
    assert layer.w1.weight.shape == (7, 4) and layer.w2.weight.shape == (4, 7)
    for size in ({"d_model": 0}, {"d_model": 4, "d_ff": 0}):
        with pytest.raises(ValueError, match=f"{list(size)[-1]}.*0"):
            kind(**size)


def test_swiglu_is_the_glu_with_silu():
    x = np.random.default_rng(0).standard_normal((2, 4), dtype=np.float32)
    assert np.array_equal(SwiGLU(4, 6, True, rng=0)(x), GLU(4, 6, "silu", True, rng=0)(x))
    assert SwiGLU(4, 6, True).w3.bias is not None and SwiGLU(4, 6).w3.bias is None


@pytest.mark.parametrize("kind", [FeedForward, GLU])
def test_an_unknown_activation_is_refused(kind):
    with pytest.raises(ValueError, match="swish"):
        kind(4, activation="swish")
