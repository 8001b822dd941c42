"""Dropout: scaled in training, absent in evaluation, from its own generator."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Reseeded, batch_shapes, check, rngs, sizes

from numpygpt.layers import Dropout


@given(rngs, batch_shapes, sizes, st.sampled_from([0.0, 0.3, 0.9]), st.booleans())
def test_gradients(rng, batch, width, p, training):
    check(Reseeded(Dropout(p)).train(training), rng.standard_normal((*batch, width)))


def test_what_is_kept_is_scaled_so_that_the_expected_value_stays():
    x = np.full(100_000, 3, np.float32)
    y = Dropout(0.25, rng=0)(x)
    assert y.dtype == np.float32 and np.unique(y).tolist() == [0, 4]
    assert abs(np.mean(y == 0) - 0.25) < 0.01


def test_backward_uses_the_mask_of_its_forward():
    layer, x = Dropout(0.5, rng=0), np.ones(100)
    y = layer(x)
    assert 0 in y and np.array_equal(layer.backward(x), y)


def test_a_draw_of_exactly_p_is_kept():
    class Drawn:
        def random(self, shape, dtype):
            return np.array([0.25, 0.5, 0.75], dtype)

    layer = Dropout(0.5)
    layer.rng = Drawn()
    assert layer(np.ones(3)).tolist() == [0, 2, 2]  # draws are in [0, 1): half of them are below 0.5


@pytest.mark.parametrize("layer", [Dropout(0.5, rng=0).eval(), Dropout(0.0, rng=0)])
def test_evaluation_and_p_zero_are_the_identity(layer):
    x = np.random.default_rng(0).standard_normal((3, 4))
    assert layer(x) is x and layer.backward(x) is x  # no draws, no products


def test_masks_come_from_the_layers_own_generator():
    x = np.ones((20, 20))
    first, second, other = (Dropout(0.5, rng=seed) for seed in (0, 0, 1))
    y = first(x)
    assert np.array_equal(y, second(x)) and not np.array_equal(y, other(x)) and not np.array_equal(y, first(x))


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan")])
def test_a_probability_outside_0_to_1_is_refused(p):
    with pytest.raises(ValueError, match=str(p)):
        Dropout(p)
