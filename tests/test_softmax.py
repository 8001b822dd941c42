"""Softmax: probabilities, its Jacobian, and hidden scores left out exactly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import batch_shapes, check, rngs, sizes

from numpygpt.layers import Softmax


@st.composite
def softmaxes(draw):
    """Draw a layer, and an input with its axis anywhere."""
    shape = (*draw(batch_shapes), draw(sizes))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    return Softmax(axis), draw(rngs).standard_normal(shape)


@given(softmaxes())
def test_gradients(drawn):
    check(*drawn)


@given(softmaxes())
def test_the_gradient_sums_to_zero_along_the_axis(drawn):
    layer, x = drawn
    p = layer(x)
    want = np.exp(x) / np.exp(x).sum(axis=layer.axis, keepdims=True)
    np.testing.assert_allclose(p, want, rtol=1e-12)
    np.testing.assert_allclose(layer.backward(np.cos(7 * x)).sum(axis=layer.axis), 0, atol=1e-12)


def test_a_hidden_score_has_probability_and_gradient_zero_and_a_row_of_them_disturbs_nothing():
    # pytorch/pytorch#41508, tracel-ai/burn#4697: NaN for the whole batch
    x = np.array([[1, -np.inf, 2], [-np.inf] * 3, [0, 0, 0]], np.float32)
    layer = Softmax()
    p = layer(x)
    dx = layer.backward(np.array([[3, 4, 5]] * 3, np.float32))
    assert p.dtype == dx.dtype == np.float32
    assert p[0, 1] == dx[0, 1] == 0 and not p[1].any() and not dx[1].any()
    np.testing.assert_allclose(p[[0, 2]].sum(axis=-1), 1, rtol=1e-6)
    np.testing.assert_allclose(p[0, [0, 2]], [0.268941, 0.731059], rtol=1e-5)


@pytest.mark.parametrize("shift", [1e8, -1e8, 3e38])
def test_huge_scores_are_shifted_first(shift):
    x = np.array([1, 1, -3e38], np.float32) + np.array([shift, shift, 0], np.float32)
    p = Softmax()(x if shift < 3e38 else np.array([3e38, 3e38, 1], np.float32))
    np.testing.assert_array_equal(p, [0.5, 0.5, 0])


def test_an_axis_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="axis 2"):
        Softmax(2)(np.ones((3, 4)))
