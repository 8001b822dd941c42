"""Cross-entropy: from logits, over what is counted."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import batch_shapes, check, rngs, sizes

from numpygpt.layers import CrossEntropy


@st.composite
def logits_and_targets(draw):
    """Draw a loss, logits and targets, of which any share (also 0 and 1) is ignored."""
    rng, shape, vocab_size = draw(rngs), draw(batch_shapes), draw(sizes)
    ignore_index = draw(st.sampled_from([None, -100, 0]))
    targets = np.asarray(rng.integers(0, vocab_size, shape))
    if ignore_index is not None:
        targets = np.where(rng.random(shape) < draw(st.sampled_from([0.0, 0.5, 1.0])), ignore_index, targets)
    return CrossEntropy(ignore_index), rng.standard_normal((*shape, vocab_size)), targets


@given(logits_and_targets())
def test_gradients(drawn):
    loss, logits, targets = drawn
    check(loss, logits, targets)
    counted = [(x, y) for x, y in zip(logits.reshape(-1, logits.shape[-1]), targets.flat, strict=True)]
    counted = [math.log(sum(np.exp(x))) - x[y] for x, y in counted if y != loss.ignore_index]
    assert loss(logits, targets) == pytest.approx(sum(counted) / max(len(counted), 1), abs=1e-12)


@given(logits_and_targets())
def test_the_gradient_of_a_counted_position_sums_to_zero_and_that_of_an_ignored_one_is_zero(drawn):
    loss, logits, targets = drawn
    loss(logits, targets)
    dx = loss.backward()
    np.testing.assert_allclose(dx.sum(axis=-1), 0, atol=1e-12)
    assert not dx[targets == loss.ignore_index].any()


def test_backward_starts_from_one_unless_told():
    loss, logits, targets = CrossEntropy(), np.array([[1.0, 2.0, 4.0]]), np.array([1])
    loss(logits, targets)
    np.testing.assert_allclose(loss.backward(), loss.backward(1.0))
    np.testing.assert_allclose(loss.backward(3.0), 3 * loss.backward())


def test_all_targets_ignored_is_loss_zero_and_gradient_zero():
    # karpathy/nanochat#610, pytorch/pytorch#70348: 0/0
    loss = CrossEntropy(ignore_index=-1)
    assert loss(np.ones((4, 5), np.float32), np.full(4, -1)) == 0
    assert loss.backward().tolist() == np.zeros((4, 5)).tolist()


def test_large_logits_are_exact():
    # pytorch/pytorch#11752, PaddlePaddle/Paddle#21165
    loss = CrossEntropy()
    assert loss(np.array([[1e8, 1e8]], np.float32), np.array([1])) == pytest.approx(0.6931, abs=5e-5)
    assert loss(np.array([[0, -1000]], np.float32), np.array([1])) == 1000
    assert loss.backward().tolist() == [[1, -1]]


def test_float16_logits_are_computed_in_float32():
    x = np.linspace(-3, 3, 1000, dtype=np.float16).reshape(1, 1000)
    loss = CrossEntropy()
    wide = CrossEntropy()(x.astype(np.float64), np.array([7]))
    assert loss(x, np.array([7])) == pytest.approx(wide, rel=1e-6)
    assert loss.backward().dtype == np.float16


@pytest.mark.parametrize("ignore_index", [None, -100])
@pytest.mark.parametrize("bad", [5, -1])
def test_a_target_outside_the_vocabulary_is_refused_by_name(bad, ignore_index):
    # tensorflow/tensorflow#3739, tinygrad/tinygrad#5873
    with pytest.raises(IndexError, match=rf"target {bad} is outside 0\.\.4"):
        CrossEntropy(ignore_index)(np.zeros((2, 5)), np.array([0, bad]))


def test_targets_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"\(3,\).*\(2, 5\)"):
        CrossEntropy()(np.zeros((2, 5)), np.zeros(3, int))


def test_targets_must_be_integers(unchecked):
    with pytest.raises(TypeError, match="targets must be integers, not float64"):
        CrossEntropy()(np.zeros((1, 5)), np.zeros(1))


def test_the_loss_is_a_number_of_python():
    assert type(CrossEntropy()(np.ones((2, 3), np.float32), np.array([0, 1]))) is float


def test_the_mean_divides_by_the_full_count():
    # karpathy/nanoGPT#605 is wrong as filed: every counted position weighs 1/N
    logits = np.random.default_rng(0).standard_normal((2, 3, 5))
    targets = np.array([[0, 1, 2], [3, 4, 0]])
    each = [CrossEntropy()(x, y) for x, y in zip(logits.reshape(6, 1, 5), targets.reshape(6, 1), strict=True)]
    assert CrossEntropy()(logits, targets) == pytest.approx(sum(each) / 6)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_a_target_of_any_type_of_integer_is_read_as_the_number_it_is(dtype):
    # 200 tokens and the ignored -1 lie outside int8 and uint8; the largest uint64 is -1 when read as int64.
    loss, targets = CrossEntropy(ignore_index=-1), np.array([3, 100], dtype)
    logits = np.random.default_rng(0).standard_normal((2, 200))
    assert loss(logits, targets) == loss(logits, np.array([3, 100]))
    bad = -2 if dtype is np.int8 else np.iinfo(dtype).max
    with pytest.raises(IndexError, match=rf"target {bad} is outside 0\.\.199"):
        loss(logits, np.array([3, bad], dtype))
