"""Adam, AdamW, clipping and the schedule, against their formulas."""

import copy
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import rngs

from numpygpt import optim
from numpygpt.layers import LayerNorm, Linear
from numpygpt.module import FlatBuffer, Parameter
from numpygpt.optim import Adam, AdamW, clip_grad_norm, cosine_schedule

kinds = pytest.mark.parametrize("kind", [Adam, AdamW])


def parameters(dtype=np.float64, rng=None):
    """Return a matrix, a gain and another matrix, in one buffer, with random values."""
    rng = np.random.default_rng(rng)
    result = [Parameter(rng.standard_normal(shape).astype(dtype)) for shape in ((2, 3), (4,), (1, 5))]
    for p, name in zip(result, ("matrix", "gain", "other"), strict=True):
        p.name = name
    FlatBuffer(sorted(result, key=lambda p: not p.decays))
    return result


def one(gradient, value=0.0, dtype=np.float64):
    p = Parameter(np.array([value], dtype))
    p.grad = np.array([gradient])
    return p


@kinds
@pytest.mark.parametrize("piece", [3, 200_000])
@given(
    rng=rngs, beta1=st.sampled_from([0.0, 0.9]), beta2=st.sampled_from([0.0, 0.99]), decay=st.sampled_from([0.0, 0.3])
)
def test_steps_follow_the_formulas(kind, piece, rng, beta1, beta2, decay):
    params, eps = parameters(rng=rng), 0.1
    optimizer = kind(params, 0.5, (beta1, beta2), eps, decay)
    want, m, v = ([f(p.value) for p in params] for f in (np.copy, np.zeros_like, np.zeros_like))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim, "PIECE", piece)
        for t in (1, 2, 3, 4):
            optimizer.lr = lr = 0.5 / t  # the decay uses the current rate
            for i, p in enumerate(params):
                p.grad = rng.standard_normal(p.shape)
                g, wd = p.grad, decay * (p.value.ndim == 2)
                if kind is Adam:
                    g = g + wd * want[i]
                m[i] = beta1 * m[i] + (1 - beta1) * g
                v[i] = beta2 * v[i] + (1 - beta2) * g**2
                step = (m[i] / (1 - beta1**t)) / (np.sqrt(v[i] / (1 - beta2**t)) + eps)
                want[i] = want[i] - lr * step - (lr * wd * want[i] if kind is AdamW else 0)
            given_gradients = [p.grad.copy() for p in params]
            optimizer.step()
            assert all(np.array_equal(p.grad, g) for p, g in zip(params, given_gradients, strict=True))
    for p, w in zip(params, want, strict=True):
        np.testing.assert_allclose(p.value, w, rtol=1e-10, atol=1e-12)
    order = [0, 2, 1]  # matrices first
    np.testing.assert_allclose(np.concatenate(optimizer.m), np.concatenate([m[i].ravel() for i in order]), atol=1e-13)
    np.testing.assert_allclose(np.concatenate(optimizer.v), np.concatenate([v[i].ravel() for i in order]), atol=1e-13)
    assert optimizer.t == 4


def test_epsilon_is_added_after_the_correction():
    # karpathy/nanochat#304, pytorch/pytorch#22628: 3.07e-5 if before
    p = one(1e-8)
    Adam([p], 1e-3, eps=1e-8).step()
    assert p.value[0] == pytest.approx(-5.0e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_under_a_constant_gradient_every_step_is_the_learning_rate(dtype):
    # eriklindernoren/ML-From-Scratch#35, frgfm/holocron#1: correction not powered by t, or applied in place
    p = one(1.0, dtype=dtype)
    optimizer = Adam([p], 0.1)
    for t in range(1, 30):
        optimizer.step()
        assert p.value[0] == pytest.approx(-0.1 * t, rel=1e-5)


def test_decay_is_of_matrices_only_and_times_the_learning_rate():
    # karpathy/minGPT#23, Lightning-AI/lit-llama#254
    params = parameters()
    before = [p.value.copy() for p in params]
    AdamW(params, 0.1, weight_decay=0.5).step()
    for p, old, factor in zip(params, before, (0.95, 1, 0.95), strict=True):
        np.testing.assert_allclose(p.value, factor * old, rtol=1e-15)


def test_adam_adds_its_decay_to_the_gradient():
    p = Parameter(np.array([[2.0]]))
    Adam([p], 0.1, weight_decay=0.5).step()
    assert p.value.item() == pytest.approx(1.9)  # a full step along the penalty, whatever its size


def test_a_tied_parameter_is_stepped_once_and_state_belongs_to_each_parameter():
    first, second = one(1.0), one(-3.0)
    optimizer = Adam([first, second, first], 0.1)
    optimizer.step()
    assert [m.tolist() for m in optimizer.m] == [[pytest.approx(0.1)], [pytest.approx(-0.3)]]
    assert first.value[0] == pytest.approx(-0.1) and second.value[0] == pytest.approx(0.1)


@kinds
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_refused_by_name_before_anything_changes(kind, bad):
    # pytorch/pytorch#46849, tensorflow/tensorflow#22048
    params = parameters(np.float32)
    optimizer = kind(params, 0.1, weight_decay=0.5)
    for p in params:
        p.grad += 1
    optimizer.step()
    params[1].grad[2] = bad
    before = [p.value.copy() for p in params], [x.copy() for x in (*optimizer.m, *optimizer.v)]
    for refused in (optimizer.step, lambda: clip_grad_norm(params, 0.5)):
        with pytest.raises(FloatingPointError, match=r"gain \(4,\)"):
            refused()
    assert all(map(np.array_equal, before[0], [p.value for p in params]))
    assert all(map(np.array_equal, before[1], [*optimizer.m, *optimizer.v])) and optimizer.t == 1
    assert params[0].grad.tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_the_parameter_that_is_named_is_the_first_bad_one_of_those_optimised(bad):
    before, after = one(0.0), one(0.0)
    optimised = sorted(parameters(), key=lambda p: not p.decays)
    FlatBuffer([before, *optimised, after])
    for p in (before, after):
        p.grad += np.inf
    assert clip_grad_norm(optimised, 1.0) == 0
    for p in optimised[bad:]:
        p.grad += np.inf
    with pytest.raises(FloatingPointError, match=rf"gradient of {optimised[bad].name} .*not finite"):
        clip_grad_norm(optimised, 1.0)


@kinds
def test_a_finite_gradient_whose_square_overflows_is_refused_before_anything_changes(kind):
    p = one(1e30, dtype=np.float32)
    optimizer = kind([p], 0.1)
    with pytest.raises(
        FloatingPointError, match="overflow"
    ):  # else v is infinite, and the weight stands still for ever
        optimizer.step()
    assert optimizer.t == 0 and not optimizer.m[0].any() and not optimizer.v[0].any() and not p.value.any()


def test_the_largest_norm_whose_square_is_finite_is_taken():
    p = Parameter(np.zeros(2, np.float32))
    p.grad = np.array([(1 - 2**-24) * 2**64, 2**52])  # the sum of the squares is the largest number
    optimizer = Adam([p], 0.1)
    assert optimizer.step() ** 2 == pytest.approx(np.finfo(np.float32).max, rel=1e-15)
    assert np.isfinite(optimizer.v[0]).all() and p.value[0] == pytest.approx(-0.1)


@kinds
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e25])
def test_a_step_that_clips_is_clipping_and_a_step_but_leaves_the_gradients(kind, scale):
    rng, params, others = np.random.default_rng(0), parameters(np.float32, 0), parameters(np.float32, 0)
    optimizer, other = (kind(ps, 0.1, eps=0.1, weight_decay=0.3) for ps in (params, others))
    for _ in range(2):
        gradients = [(scale * rng.standard_normal(p.shape)).astype(np.float32) for p in params]
        for p, q, g in zip(params, others, gradients, strict=True):
            p.grad = q.grad = g
        assert optimizer.step(max_norm=0.5) == clip_grad_norm(others, 0.5)
        other.step()
        for p, q, g in zip(params, others, gradients, strict=True):
            np.testing.assert_allclose(p.value, q.value, rtol=1e-5)
            assert np.array_equal(p.grad, g)
    optimizer.zero_grad()
    assert not any(p.grad.any() for p in params)


@kinds
@pytest.mark.parametrize("shares", [2, 3, 50])
def test_a_step_dealt_out_is_the_same_step(kind, shares, monkeypatch):
    monkeypatch.setattr(optim, "PIECE", 3)
    rng, params, others = np.random.default_rng(0), parameters(np.float32, 0), parameters(np.float32, 0)
    whole, first = (kind(ps, 0.1, weight_decay=0.3) for ps in (params, others))
    team = [first, copy.copy(first)]  # as in another process: arrays are shared, numbers are not

    def deal(method, *args):
        return [getattr(team[i % 2], method)((i, shares), *args) for i in range(shares)]

    for lr in (0.1, 0.05):
        for p, q in zip(params, others, strict=True):
            p.grad = q.grad = rng.standard_normal(p.shape).astype(np.float32)
        whole.lr = first.lr = lr  # and not the copy's, which is told
        assert first.step(1.0, deal) == whole.step(1.0)
    assert all(np.array_equal(p.value, q.value) for p, q in zip(params, others, strict=True))


@kinds
@pytest.mark.parametrize("scale", [2.0**16, 0.5])
@pytest.mark.parametrize("max_norm", [0.5, np.inf])
def test_a_step_with_a_factor_is_that_of_gradients_times_it(kind, scale, max_norm):
    def steps(scale, factor):
        p, rng = Parameter(np.ones((3, 4), np.float32)), np.random.default_rng(0)
        optimizer, norms = kind([p], 0.1, eps=0.1, weight_decay=0.3), []
        for _ in range(2):
            p.grad = scale * rng.standard_normal(p.shape, np.float32)
            norms.append(optimizer.step(max_norm, factor=factor))
        return norms, p.value, *optimizer.m, *optimizer.v

    (norms, *arrays), (true_norms, *true) = steps(scale, 1 / scale), steps(1.0, 1.0)
    assert norms == true_norms and norms[0] > 0.5
    assert all(map(np.array_equal, arrays, true))


def test_squares_may_overflow_that_are_none_of_the_gradient_times_its_factor():
    p = one(0.0, dtype=np.float32)
    p.grad = np.full_like(p.value, 1e23)
    assert Adam([p], 0.1).step(factor=2.0**-16) == pytest.approx(1e23 / 2**16)


@pytest.mark.filterwarnings("error")
def test_squares_that_leave_float32_only_together_are_summed_in_silence():
    assert clip_grad_norm([one(1.5e19, dtype=np.float32) for _ in range(2)], 1.0) == pytest.approx(1.5e19 * 2**0.5)


@given(rngs, st.sampled_from([1e-30, 1e-20, 1.0, 1e18, 1e19, 1e30, 1e37]), st.sampled_from([1e-3, 1.0]))
def test_clipping_survives_squares_beyond_float32_and_keeps_the_direction(rng, scale, max_norm):
    params = parameters(np.float32, rng)
    for p in params:
        p.grad = rng.standard_normal(p.shape) * scale
    before = np.concatenate([p.grad.ravel() for p in params]).astype(float)
    norm = clip_grad_norm([*params, params[0]], max_norm)  # given twice, counted once
    assert norm == pytest.approx(np.linalg.norm(before), rel=1e-5, abs=0)
    after = np.concatenate([p.grad.ravel() for p in params])
    if norm <= max_norm:
        assert np.array_equal(after, before.astype(np.float32))
    else:
        np.testing.assert_allclose(after, before / np.linalg.norm(before) * max_norm, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("gradient", [-1e30, -1e-30])
def test_clipping_takes_the_size_of_a_negative_gradient_whose_square_is_none(gradient):
    p = one(gradient, dtype=np.float32)
    assert clip_grad_norm([p], abs(gradient) / 2) == pytest.approx(abs(gradient), rel=1e-6, abs=0)
    assert p.grad.item() == pytest.approx(gradient / 2, rel=1e-6, abs=0)


def test_clipping_leaves_a_gradient_within_the_bound_and_one_of_zeros_as_it_is():
    p = Parameter(np.zeros((2, 2)))
    assert clip_grad_norm([p], 1.0) == 0 and not p.grad.any()
    p.grad = np.array([[3.0, 0], [0, 4.0]])
    assert clip_grad_norm([p], 5.0) == 5 and p.grad.tolist() == [[3, 0], [0, 4]]
    assert clip_grad_norm([p], 2.5) == 5 and p.grad.tolist() == [[1.5, 0], [0, 2]]
    assert clip_grad_norm([], 1.0) == 0


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_a_bound_that_is_not_positive_is_refused(max_norm):
    with pytest.raises(ValueError, match=f"max_norm.*{max_norm}"):
        clip_grad_norm([one(1.0)], max_norm)


@kinds
@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"lr": -0.1}, "lr.*-0.1"),
        ({"lr": float("inf")}, "lr.*inf"),
        ({"lr": float("nan")}, "lr.*nan"),
        ({"betas": (1.0, 0.9)}, r"betas.*\(1.0, 0.9\)"),
        ({"betas": (0.9, -0.1)}, r"betas.*-0.1"),
        ({"betas": (0.9, float("nan"))}, "betas.*nan"),
        ({"eps": -1e-8}, "eps.*-1e-08"),
        ({"eps": 0.0}, "eps.*0.0"),  # a gradient that was always zero would be 0/0
        ({"eps": float("nan")}, "eps.*nan"),
        ({"weight_decay": -0.5}, "weight_decay.*-0.5"),
        ({"weight_decay": float("nan")}, "weight_decay.*nan"),
    ],
)
def test_a_bad_setting_is_refused(kind, setting, named):
    with pytest.raises(ValueError, match=named):
        kind([one(1.0)], **setting)


@kinds
@pytest.mark.parametrize("lr", [-0.1, float("nan"), float("inf")])
def test_a_learning_rate_set_to_nonsense_is_refused_before_anything_changes(kind, lr):
    p = one(1.0)
    optimizer = kind([p], 0.1)
    optimizer.lr = lr
    with pytest.raises(ValueError, match=f"lr.*{lr}"):
        optimizer.step()
    assert optimizer.t == 0 and p.value[0] == 0 and not optimizer.m[0].any()


@kinds
def test_parameters_that_moved_to_another_buffer_are_refused(kind):
    p = one(1.0)
    optimizer = kind([p], 0.1)
    optimizer.step()
    FlatBuffer([one(1.0), p])
    before = p.value.copy()
    with pytest.raises(TypeError, match="moved"):
        optimizer.step()
    assert optimizer.t == 1 and np.array_equal(p.value, before)


class OtherArray(np.ndarray):
    """Stands for the array of another device."""


def test_parameters_that_moved_to_another_device_are_refused():
    p = one(1.0)
    optimizer = Adam([p], 0.1)
    p.buffer.convert(lambda x: x.view(OtherArray))
    with pytest.raises(TypeError, match="moved"):
        optimizer.step()
    assert optimizer.t == 0 and p.value[0] == 0


@kinds
def test_nothing_to_optimise_is_refused(kind, unchecked):
    with pytest.raises(ValueError, match="no parameters"):
        kind([])
    with pytest.raises(ValueError, match=r"betas.*\(0.9,\)"):
        kind([one(1.0)], betas=(0.9,))


def test_the_defaults():
    assert AdamW([one(1.0)]).weight_decay == 0.01 and Adam([one(1.0)]).weight_decay == 0
    assert (Adam([one(1.0)]).lr, Adam([one(1.0)]).betas, Adam([one(1.0)]).eps) == (1e-3, (0.9, 0.999), 1e-8)


@kinds
def test_layers_are_optimised_where_they_lie(kind):
    layers = [Linear(3, 2, bias=True, dtype=np.float64, rng=0), LayerNorm(3, dtype=np.float64)]
    params = [p for layer in layers for p in layer.parameters()]
    before = [p.value.copy() for p in params]
    for p in params:
        p.grad += 1
    kind(params, 0.1, weight_decay=0).step()
    assert all(np.allclose(p.value, old - 0.1) for p, old in zip(params, before, strict=True))


schedules = st.tuples(st.integers(0, 20), st.integers(0, 20), st.floats(1e-6, 1), st.floats(0, 1))


@given(schedules)
def test_the_rate_rises_to_its_peak_falls_to_its_floor_and_stays(drawn):
    # karpathy/nanoGPT#578, deepspeedai/DeepSpeed#8142: zero at step 0, 0/0 when warm-up and decay coincide
    w, more, max_lr, share = drawn
    min_lr, d = share * max_lr, w + more
    lr = [cosine_schedule(s, max_lr=max_lr, min_lr=min_lr, warmup_steps=w, decay_steps=d) for s in range(d + 4)]
    rounding = 1e-15
    assert all(0 < x <= max_lr + rounding for x in lr[:d]) and all(x >= min_lr - rounding for x in lr[w:])
    assert lr[d:] == [min_lr] * 4
    assert all(np.diff(lr[:w]) > 0) and all(np.diff(lr[w:]) <= rounding)
    if w:
        assert lr[w - 1] == max_lr and lr[0] == pytest.approx(max_lr / w)
    if more:
        assert lr[w] == pytest.approx(max_lr)
        middle = cosine_schedule(w + 5, max_lr=max_lr, min_lr=min_lr, warmup_steps=w, decay_steps=w + 10)
        assert middle == pytest.approx((max_lr + min_lr) / 2)


def test_warm_up_and_decay_of_one_length():
    lr = [cosine_schedule(s, max_lr=0.3, min_lr=0.1, warmup_steps=4, decay_steps=4) for s in range(6)]
    assert lr == pytest.approx([0.075, 0.15, 0.225, 0.3, 0.1, 0.1]) and lr[3] == 0.3


def test_a_peak_no_higher_than_the_floor_is_a_constant_rate_after_the_warm_up():
    lr = [cosine_schedule(s, max_lr=0.2, min_lr=0.2, warmup_steps=2, decay_steps=4) for s in range(6)]
    assert lr == [0.1, 0.2, 0.2, 0.2, 0.2, 0.2]


def test_a_quarter_of_the_way_down_is_half_a_cosine():
    lr = cosine_schedule(3, max_lr=1.0, min_lr=0.0, warmup_steps=1, decay_steps=9)
    assert lr == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"warmup_steps": 11}, "11 and 10"),
        ({"warmup_steps": -1}, "-1 and 10"),
        ({"min_lr": 0.5}, "0.5 and 0.1"),
        ({"min_lr": -0.5}, "-0.5 and 0.1"),
        ({"max_lr": float("nan")}, "nan"),
        ({"step": -1}, "step.*-1"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(change, named):
    with pytest.raises(ValueError, match=named):
        cosine_schedule(**{"step": 0, "max_lr": 0.1, "min_lr": 0.01, "warmup_steps": 2, "decay_steps": 10} | change)


def test_an_optimiser_with_the_state_of_another_takes_the_same_step():
    layers = [Linear(3, 2, bias=True, rng=0) for _ in range(2)]  # alone: its parameters have no names yet
    one, other = (AdamW(layer.parameters()) for layer in layers)
    for p in layers[0].parameters():
        p.grad[...] = np.arange(p.size).reshape(p.shape) - 2
    one.step()
    layers[1].load_state_dict(layers[0].state_dict())
    other.load_state_dict(one.state_dict())
    for layer, optimizer in zip(layers, (one, other), strict=True):
        for p in layer.parameters():
            p.grad[...] = 1
        optimizer.step()
    assert other.t == 2
    for p, q in zip(*(layer.parameters() for layer in layers), strict=True):
        assert np.array_equal(p.value, q.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"m.7": np.zeros(1)}, r"unknown \['m\.7'\]"),
        ({"v.0": np.zeros((2, 2), np.float32)}, r"v\.0 is \(2, 3\) float32 here and \(2, 2\)"),
        ({"v.0": np.zeros((2, 3))}, r"v\.0 .* float64"),
        ({"t": np.array(-1)}, "t must be"),
        ({"t": np.array(1.5)}, "t must be"),
    ],
)
def test_a_state_of_other_parameters_is_refused_by_name(change, said):
    optimizer = AdamW(Linear(3, 2, rng=0).parameters())
    state = {**optimizer.state_dict(), "m.0": np.ones((2, 3), np.float32), **change}
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(state)
    assert not optimizer.m[0].any()
