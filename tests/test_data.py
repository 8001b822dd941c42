"""Batches: every window is usable, and every error names what is wrong."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numpygpt.corpus import DataError
from numpygpt.data import random_batch, sequential_batches, split


def test_the_last_tenth_is_held_out():
    train, validation = split(np.arange(1000), context_length=99)
    assert train.tolist() == list(range(900)) and validation.tolist() == list(range(900, 1000))


def test_a_part_too_small_for_one_window():
    with pytest.raises(DataError, match=r"validation part of 1000 tokens has 100 tokens .* 100 needs 101"):
        split(np.arange(1000), context_length=100)
    with pytest.raises(DataError, match="training part"):
        split(np.arange(1000), context_length=100, held_out=0.95)
    for held_out in (0.0, 1.0, -0.1):
        with pytest.raises(DataError, match="between 0 and 1"):
            split(np.arange(1000), context_length=10, held_out=held_out)


def test_a_text_as_long_as_the_context():
    """The numbers of karpathy/nanoGPT#292: length = context has no window, context + 1 exactly one."""
    rng = np.random.default_rng(0)
    with pytest.raises(DataError, match="has 8 tokens and a context of 8 needs 9"):
        random_batch(np.arange(8), 4, 8, rng)
    inputs, targets = random_batch(np.arange(9), 4, 8, rng)
    assert (inputs == np.arange(8)).all() and (targets == np.arange(1, 9)).all()


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8))
def test_windows_are_consecutive_and_reach_both_ends(context, batch, windows):
    tokens = np.arange(context + windows).astype(np.uint16)
    rng = np.random.default_rng(0)
    starts = set()
    for _ in range(200):
        inputs, targets = random_batch(tokens, batch, context, rng)
        assert inputs.shape == targets.shape == (batch, context)
        assert inputs.dtype == targets.dtype == np.int64
        assert (inputs == inputs[:, :1] + np.arange(context)).all() and (targets == inputs + 1).all()
        starts.update(inputs[:, 0].tolist())
    assert starts == set(range(windows))


@given(st.integers(2, 60), st.integers(1, 5), st.integers(1, 9))
def test_every_target_comes_once(length, batch, context):
    tokens = np.arange(length).astype(np.uint8)
    seen = []
    for inputs, targets in sequential_batches(tokens, batch, context):
        assert inputs.shape == targets.shape and inputs.dtype == targets.dtype == np.int64
        assert inputs.shape[0] <= batch and inputs.shape[1] <= context
        assert (targets == inputs + 1).all()
        seen.extend(targets.ravel().tolist())
    assert seen == list(range(1, length))


def test_sequential_batches_are_full():
    shapes = [inputs.shape for inputs, _ in sequential_batches(np.arange(28), batch_size=2, context_length=5)]
    assert shapes == [(2, 5), (2, 5), (1, 5), (1, 2)]
    with pytest.raises(DataError, match="has 1 tokens"):
        next(sequential_batches(np.arange(1), 2, 5))


def test_batches_of_a_memory_map(tmp_path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "tokens")
    tokens = np.memmap(tmp_path / "tokens", np.uint16, "r")
    inputs, targets = random_batch(tokens, 3, 7, np.random.default_rng(0))
    assert inputs.shape == (3, 7) and (targets == inputs + 1).all()
    assert np.concatenate([t.ravel() for _, t in sequential_batches(tokens, 3, 7)]).tolist() == list(range(1, 100))
