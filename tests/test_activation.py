"""Activations: values, derivatives, and calm at any finite input."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import away_from_zero, batch_shapes, check, rngs, sizes

from numpygpt.layers import GELU, ReLU, Sigmoid
from numpygpt.layers.activation import ACTIVATIONS, make_activation

A = math.sqrt(2 / math.pi)
FORMULAS = {
    "relu": lambda x: max(x, 0),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * 0.5 * math.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(A * (x + 0.044715 * x**3))),
    "identity": lambda x: x,
}
every = pytest.mark.parametrize("name", FORMULAS)


def derivative(name, x):
    layer = make_activation(name)
    layer(x)
    return layer.backward(np.ones_like(x))


@given(rngs, batch_shapes, sizes, st.sampled_from(list(FORMULAS)))
def test_gradients(rng, batch, width, name):
    x = np.clip(2 * rng.standard_normal((*batch, width)), -4, 4)  # beyond, 1 + tanh rounds off more than y shows
    check(make_activation(name), away_from_zero(x))


@every
def test_values(name):
    assert ACTIVATIONS.keys() == FORMULAS.keys()
    x = np.linspace(-8, 8, 101)
    np.testing.assert_allclose(make_activation(name)(x), list(map(FORMULAS[name], x)), rtol=1e-12, atol=1e-15)


@every
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_any_finite_input_is_calm_and_keeps_its_dtype(name, dtype):
    huge = [s * x for s in (-1, 1) for x in (0, 1e-30, 9, 9.99, 10.5, 40, 88.8, 104, 750, 1e4, 1e19, 1e30)]
    x = np.array([*huge, np.finfo(dtype).max, np.finfo(dtype).min], dtype)
    layer = make_activation(name)
    y = layer(x)
    dx = layer.backward(np.full_like(x, 2))
    assert y.dtype == dx.dtype == dtype and np.isfinite(y).all() and np.isfinite(dx).all()
    limit_left, limit_right = {"sigmoid": (0, 0), "identity": (2, 2)}.get(name, (0, 2))
    np.testing.assert_allclose(dx[x < -200], limit_left, atol=1e-6)
    np.testing.assert_allclose(dx[x > 200], limit_right, atol=1e-6)


def test_gelu_has_two_named_forms():
    # karpathy/nanoGPT#2, kyutai-labs/pocket-tts#278
    x = np.array([-3.0])
    assert GELU()(x)[0] == pytest.approx(-0.004050, abs=5e-7)
    assert GELU("tanh")(x)[0] == pytest.approx(-0.003637, abs=5e-7)


def test_gelu_forms_differ_by_less_than_5e4_and_both_by_more_from_the_sigmoid_form():
    x = np.linspace(-10, 10, 20001)
    exact, tanh, sigmoid = GELU()(x), GELU("tanh")(x), x * Sigmoid()(1.702 * x)
    assert 1e-4 < np.abs(exact - tanh).max() < 5e-4
    assert np.abs(exact - sigmoid).max() > 5e-4 and np.abs(tanh - sigmoid).max() > 5e-4


@pytest.mark.parametrize("x", [-1.5, -0.3, 0.8, 2.0])
def test_gelu_is_the_expected_value_of_keeping_x_with_probability_phi(x):
    kept = np.random.default_rng(0).standard_normal(1_000_000) <= x
    assert GELU()(np.array([x]))[0] == pytest.approx(np.mean(x * kept), abs=5 * abs(x) / 2000)


def test_relu_has_derivative_zero_at_zero():
    assert derivative("relu", np.array([-1.0, 0, 1])).tolist() == [0, 0, 1]
    assert isinstance(make_activation("relu"), ReLU)


def test_sigmoid_is_steepest_in_the_middle():
    assert derivative("sigmoid", np.zeros(1))[0] == 0.25


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="swish"):
        make_activation("swish")
    with pytest.raises(ValueError, match="erf"):
        GELU("erf")
