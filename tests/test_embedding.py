"""Embedding: a row for each id; gradients of equal ids add up."""

import numpy as np
import pytest
from hypothesis import given
from strategies import batch_shapes, check, rngs, sizes

from numpygpt.layers import Embedding


@given(rngs, batch_shapes, sizes, sizes)
def test_gradients_also_of_repeated_ids(rng, shape, vocab_size, width):
    layer = Embedding(vocab_size, width, dtype=np.float64, rng=rng)
    ids = rng.integers(0, vocab_size, shape)
    assert np.array_equal(layer(ids), layer.weight.value[ids])
    check(layer, ids)


def test_every_repeat_counts():
    # tenstorrent/tt-metal#6232, FluxML/Flux.jl#1516
    layer = Embedding(3, 2)
    layer(np.array([0, 0, 1]))
    layer.backward(np.ones((3, 2), np.float32))
    assert layer.weight.grad.tolist() == [[2, 2], [1, 1], [0, 0]]


def test_float16_cotangents_are_not_summed_in_float16():
    layer = Embedding(1, 1)
    layer(np.array([0, 0]))
    layer.backward(np.full((2, 1), 40_000, np.float16))
    assert layer.weight.grad.item() == 80_000  # float16 ends at 65,504


@given(rngs, batch_shapes, sizes, sizes)
def test_the_sum_of_all_row_gradients_is_the_sum_of_the_cotangent(rng, shape, vocab_size, width):
    layer = Embedding(vocab_size, width, dtype=np.float64, rng=rng)
    dy = rng.standard_normal((*shape, width))
    layer(rng.integers(0, vocab_size, shape))
    assert layer.backward(dy) is None
    np.testing.assert_allclose(layer.weight.grad.sum(axis=0), dy.reshape(-1, width).sum(axis=0), atol=1e-12)


@pytest.mark.parametrize("bad", [5, -1])
def test_an_id_outside_the_vocabulary_is_refused_by_name(bad):
    # tensorflow/tensorflow#3739: NumPy would wrap -1
    with pytest.raises(IndexError, match=rf"token id {bad} is outside 0\.\.4"):
        Embedding(5, 2)(np.array([[0, 4], [bad, 1]]))


def test_ids_must_be_integers(unchecked):
    with pytest.raises(TypeError, match="float64"):
        Embedding(5, 2)(np.array([1.0]))


def test_no_ids_give_no_rows_and_no_gradient():
    layer = Embedding(5, 2)
    assert layer(np.zeros((3, 0), int)).shape == (3, 0, 2)
    layer.backward(np.zeros((3, 0, 2), np.float32))
    assert not layer.weight.grad.any()


def test_the_start_is_standard_normal_cut_at_three():
    weight = Embedding(300, 200, rng=0).weight.value
    assert weight.dtype == np.float32 and 2.9 < np.abs(weight).max() <= 3
    assert abs(weight.std() - 0.98658) < 0.01 and abs(weight.mean()) < 0.02


@pytest.mark.parametrize(("sizes", "named"), [((0, 2), "num_embeddings.*0"), ((3, 0), "embedding_dim.*0")])
def test_a_size_below_one_is_refused(sizes, named):
    with pytest.raises(ValueError, match=named):
        Embedding(*sizes)
