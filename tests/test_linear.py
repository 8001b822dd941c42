"""Linear: y = W x + b."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import batch_shapes, check, rngs, sizes, unit_scale

from numpygpt.layers import Linear, linear


@given(rngs, batch_shapes, sizes, sizes, st.booleans())
def test_gradients(rng, batch, in_features, out_features, bias):
    layer = unit_scale(Linear(in_features, out_features, bias, dtype=np.float64), rng)
    x = rng.standard_normal((*batch, in_features))
    want = x @ layer.weight.value.T + (layer.bias.value if bias else 0)
    np.testing.assert_allclose(layer(x), want, rtol=1e-12, atol=1e-12)
    check(layer, x)


@pytest.mark.parametrize("block", [1, 7, 8, 100])  # of 5 rows of 4: one at once, one, two, all
def test_gradients_in_blocks_of_rows(block, monkeypatch):
    monkeypatch.setattr("numpygpt.module.BLOCK", block)
    rng = np.random.default_rng(0)
    layer = unit_scale(Linear(4, 5, dtype=np.float64), rng)
    assert len(layer.weight.blocks()) == {1: 5, 7: 5, 8: 3, 100: 1}[block]
    check(layer, rng.standard_normal((2, 3, 4)))


def test_the_start_is_a_normal_distribution_cut_at_three_deviations():
    weight = Linear(300, 500, rng=0).weight.value / math.sqrt(2 / 800)
    assert weight.dtype == np.float32 and 2.9 < np.abs(weight).max() <= 3.0001
    assert abs(weight.std() - 0.98658) < 0.005 and abs(weight.mean()) < 0.01  # of a normal cut at ±3
    assert abs(Linear(300, 500, std=7.0, rng=0).weight.value.std() / 7 - 0.98658) < 0.005
    assert Linear(3, 2).bias is None and not Linear(3, 2, bias=True).bias.value.any()


def test_a_seed_means_the_same_weights_in_every_precision():
    wide, narrow = Linear(5, 4, dtype=np.float64, rng=3).weight.value, Linear(5, 4, rng=3).weight.value
    assert np.array_equal(wide.astype(np.float32), narrow)
    assert not np.array_equal(narrow, Linear(5, 4, rng=4).weight.value)


def test_backward_adds_and_does_so_twice_when_called_twice():
    # karpathy/micrograd#2: reuse must sum, and only zero_grad starts again
    rng = np.random.default_rng(0)
    layer, dy = Linear(3, 2, bias=True, rng=rng), rng.standard_normal((4, 2), dtype=np.float32)
    layer(rng.standard_normal((4, 3), dtype=np.float32))
    layer.backward(dy)
    once = [p.grad.copy() for p in layer.parameters()]
    layer.backward(dy)
    assert all(np.array_equal(p.grad, 2 * g) for p, g in zip(layer.parameters(), once, strict=True))
    layer.zero_grad()
    assert not any(p.grad.any() for p in layer.parameters())
    layer.backward(dy)
    assert all(np.array_equal(p.grad, g) for p, g in zip(layer.parameters(), once, strict=True))


def test_two_layers_with_one_weight_sum_their_gradients():
    rng = np.random.default_rng(0)
    first, second = Linear(3, 3, dtype=np.float64, rng=0), Linear(3, 3, dtype=np.float64, rng=1)
    x, dy = rng.standard_normal((2, 5, 3)), rng.standard_normal((2, 5, 3))
    alone = []
    for i in range(2):
        first.zero_grad()
        first(x[i])
        first.backward(dy[i])
        alone.append(first.weight.grad.copy())
    first.zero_grad()
    second.weight = first.weight
    for i, layer in enumerate((first, second)):
        layer(x[i])
        layer.backward(dy[i])
    np.testing.assert_allclose(first.weight.grad, alone[0] + alone[1])


def test_a_frozen_weight_costs_no_product(monkeypatch):
    made = []
    einsum = linear.einsum
    monkeypatch.setattr(linear, "einsum", lambda notation, *xs: made.append(notation) or einsum(notation, *xs))
    rng = np.random.default_rng(0)
    layer, x, dy = (Linear(3, 2, bias=True, rng=0), *(rng.standard_normal((4, n), dtype=np.float32) for n in (3, 2)))
    passed_back = []
    for frozen in (False, True):
        layer.weight.buffer.freeze(frozen)
        made.clear()
        layer(x)
        passed_back.append(layer.backward(dy))
        assert ("...o,...i->oi" in made) != frozen
    assert np.array_equal(*passed_back)


@pytest.mark.parametrize(("sizes", "named"), [((0, 2), "in_features.*0"), ((3, -1), "out_features.*-1")])
def test_a_size_below_one_is_refused(sizes, named):
    with pytest.raises(ValueError, match=named):
        Linear(*sizes)


@pytest.mark.parametrize("std", [-1.0, float("nan"), float("inf")])
def test_a_bad_deviation_is_refused(std):
    with pytest.raises(ValueError, match=f"std.*{std}"):
        Linear(3, 2, std=std)


def test_an_input_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"size 3.*\(5, 4\)"):
        Linear(3, 2)(np.ones((5, 4), np.float32))
