"""LoRALinear: W x + b, and B A x beside it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import batch_shapes, check, rngs, sizes, unit_scale

from numpygpt.layers import Linear, LoRALinear
from numpygpt.optim import AdamW


def frozen(layer):
    """The layer, of which only the adapters learn."""
    for buffer in layer.linear.buffers():
        buffer.freeze()
    return layer


def make(in_features=5, out_features=4, rank=2, alpha=6.0, bias=True, dtype=np.float64):
    return LoRALinear(Linear(in_features, out_features, bias, dtype=dtype, rng=0), rank, alpha, rng=1)


@given(rngs, batch_shapes, sizes, sizes, st.data(), st.booleans(), st.booleans())
def test_gradients(rng, batch, in_features, out_features, data, bias, learns):
    rank = data.draw(st.integers(1, min(in_features, out_features)))
    alpha = data.draw(st.sampled_from([0.5, 1.0, 3.0]))
    layer = unit_scale(make(in_features, out_features, rank, alpha, bias), rng)
    x = rng.standard_normal((*batch, in_features))
    W, A, B = layer.linear.weight.value, layer.A.value, layer.B.value
    want = x @ (W + alpha / rank * B @ A).T + (layer.linear.bias.value if bias else 0)
    np.testing.assert_allclose(layer(x), want, rtol=1e-12, atol=1e-12)
    report = check(layer if learns else frozen(layer), x)
    names = {"input 0", "A", "B"} | ({"linear.weight"} | ({"linear.bias"} if bias else set()) if learns else set())
    assert {row.name for row in report.rows} == names


def test_it_begins_as_the_linear_map_exactly_and_then_only_B_has_a_gradient():
    """And A must not be zero too, or nothing would ever learn."""
    rng = np.random.default_rng(0)
    layer, x, dy = make(), rng.standard_normal((3, 5)), rng.standard_normal((3, 4))
    assert np.array_equal(layer(x), layer.linear(x))
    layer.backward(dy)
    assert not layer.A.grad.any() and layer.B.grad.all()
    assert np.array_equal(layer.merged(), layer.linear.weight.value)
    layer.B.value = layer.B.grad
    layer.zero_grad()
    layer(x)
    layer.backward(dy)
    assert layer.A.grad.all()
    layer.A.value, layer.B.value = np.zeros((2, 5)), np.zeros((4, 2))
    layer.zero_grad()
    layer(x)
    layer.backward(dy)
    assert not layer.A.grad.any() and not layer.B.grad.any()


@given(rngs, batch_shapes)
def test_each_adapter_sees_the_gradient_of_the_whole_matrix_through_the_other(rng, batch):
    layer = unit_scale(make(), rng)
    layer(rng.standard_normal((*batch, 5)))
    layer.backward(rng.standard_normal((*batch, 4)))
    dW, gamma = layer.linear.weight.grad, 3.0
    np.testing.assert_allclose(layer.B.grad, gamma * dW @ layer.A.value.T, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(layer.A.grad, gamma * layer.B.value.T @ dW, rtol=1e-10, atol=1e-10)


@given(rngs, batch_shapes, st.booleans())
def test_merged_it_is_one_linear_map(rng, batch, bias):
    layer = unit_scale(make(bias=bias), rng)
    x = rng.standard_normal((*batch, 5))
    y = layer(x)
    layer.linear.weight.value = layer.merged()
    np.testing.assert_allclose(layer.linear(x), y, rtol=1e-12, atol=1e-12)


def test_A_starts_so_that_its_features_are_as_large_as_those_of_x():
    layer = make(400, 300, 100, dtype=np.float32)
    h = np.random.default_rng(0).standard_normal((500, 400), dtype=np.float32) @ layer.A.value.T
    assert abs(h.std() - 0.98658) < 0.02  # of a normal cut at ±3
    assert 2.9 < np.abs(layer.A.value).max() * 20 <= 3.0001
    assert layer.A.value.dtype == layer.B.value.dtype == np.float32
    assert layer.A.shape == (100, 400) and layer.B.shape == (300, 100) and not layer.B.value.any()


def test_the_same_seed_makes_the_same_adapters():
    one, same, other = (LoRALinear(Linear(5, 4, rng=0), 2, rng=seed).A.value for seed in (1, 1, 2))
    assert np.array_equal(one, same) and not np.array_equal(one, other)


def test_what_is_frozen_keeps_its_value_and_has_no_moments():
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((3, n), dtype=np.float32) for n in (5, 4))
    grads = {}
    for learns in (True, False):
        layer = unit_scale(make(dtype=np.float32), np.random.default_rng(1))
        before = [p.value.copy() for p in layer.linear.parameters()]
        optimizer = AdamW((layer if learns else frozen(layer)).parameters(), lr=0.1, weight_decay=0.5)
        layer(x)
        grads[learns] = [layer.backward(dy), layer.A.grad, layer.B.grad]
        optimizer.step(max_norm=1.0)
        moved = [not np.array_equal(p.value, b) for p, b in zip(layer.linear.parameters(), before, strict=True)]
        assert moved == [learns, learns]
        assert sum(m.size for m in optimizer.m) == 2 * (5 + 4) + (4 * 5 + 4 if learns else 0)
    assert all(np.array_equal(a, b) for a, b in zip(*grads.values(), strict=True))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rank": 0}, "rank.*0"),
        ({"rank": 5}, "rank 5 is more than a map of 5 to 4"),
        ({"in_features": 3, "rank": 4}, "rank 4 is more than a map of 3 to 4"),
        ({"alpha": 0.0}, "alpha.*0.0"),
        ({"alpha": float("nan")}, "alpha.*nan"),
        ({"alpha": float("inf")}, "alpha.*inf"),
    ],
)
def test_a_rank_or_factor_that_makes_no_sense_is_refused(options, named):
    with pytest.raises(ValueError, match=named):
        make(**options)
