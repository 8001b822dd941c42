import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numpygpt.config import TransformerConfig
from numpygpt.model import TransformerLM
from numpygpt.sample import generate, next_token_distribution, penalise_repetition

LOGITS = np.log(np.array([0.15, 0.45, 0.05, 0.35]))


def kept(**limits):
    return set(np.flatnonzero(next_token_distribution(LOGITS, **limits)))


@pytest.fixture
def model():
    config = TransformerConfig(vocab_size=5, context_length=8, d_model=8, num_layers=1, num_heads=2)
    return TransformerLM(config, rng=0)


def test_temperature_zero_is_greedy_whatever_the_seed(model):
    assert np.array_equal(next_token_distribution(np.array([1.0, 3.0, 2.0]), temperature=0), [0, 1, 0])
    assert np.array_equal(next_token_distribution(np.array([3.0, 3.0]), temperature=0), [1, 0])  # first of equals
    runs = {tuple(generate(model, np.array([0]), 12, temperature=0, rng=seed)) for seed in range(5)}
    assert len(runs) == 1


def test_top_k_keeps_the_k_most_probable():
    assert kept(top_k=2) == {1, 3}
    assert kept(top_k=4) == kept(top_k=100) == kept(top_k=None) == {0, 1, 2, 3}
    assert set(np.flatnonzero(next_token_distribution(np.zeros(5), top_k=2))) == {0, 1}  # equals by id


@pytest.mark.parametrize(("p", "tokens"), [(0.6, {1, 3}), (0, {1}), (1e-9, {1}), (1, {0, 1, 2, 3}), (0.8, {1, 3})])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p, tokens):
    assert kept(top_p=p) == tokens


def test_min_p_is_relative_to_the_most_probable():
    assert kept(min_p=0.5) == {1, 3}
    assert kept(min_p=0) == {0, 1, 2, 3}


@given(
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([1e-3, 1.0, 1e3, 1e30]),
    temperature=st.sampled_from([0, 1e-6, 0.5, 1, 100]),
    top_k=st.none() | st.integers(1, 9),
    top_p=st.none() | st.floats(0, 1),
    min_p=st.none() | st.floats(0, 1),
)
def test_a_distribution_is_never_empty(seed, scale, temperature, top_k, top_p, min_p):
    logits = (scale * np.random.default_rng(seed).standard_normal((2, 7))).astype(np.float32)
    p = next_token_distribution(logits, temperature, top_k, top_p, min_p)
    assert np.all(p >= 0)
    assert np.allclose(p.sum(-1), 1, rtol=0, atol=1e-12)
    if top_k is not None:
        assert np.all((p > 0).sum(-1) <= top_k)


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"temperature": -1}, "-1"),
        ({"temperature": float("nan")}, "nan"),
        ({"top_k": 0}, "0"),
        ({"top_k": -1}, "-1"),
        ({"top_p": 1.5}, "1.5"),
        ({"min_p": -0.1}, "-0.1"),
    ],
)
def test_a_senseless_limit_is_named(limits, named):
    with pytest.raises(ValueError, match=named):
        next_token_distribution(LOGITS, **limits)


def test_nan_logits_are_refused():
    with pytest.raises(ValueError, match="NaN"):
        next_token_distribution(np.array([0.0, np.nan]))


@pytest.mark.parametrize("length", [1, 8, 20])
def test_a_prompt_of_any_length_goes_on(model, length):
    tokens = list(generate(model, np.zeros(length, int), 30, rng=0))
    assert len(tokens) == 30
    assert all(0 <= token < 5 for token in tokens)


def test_past_the_context_the_model_sees_the_latest_ids(model):
    ids = np.random.default_rng(0).integers(0, 5, 20)
    assert list(generate(model, ids, 3, rng=0)) == list(generate(model, ids[-8:], 3, rng=0))


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="empty"):
        next(generate(model, np.array([], int), 1))


def test_stop_ends_the_text_without_the_stopping_id(model):
    tokens = list(generate(model, np.array([0]), 50, rng=1))
    stopped = list(generate(model, np.array([0]), 50, rng=1, stop={tokens[5]}))
    assert stopped == tokens[: tokens.index(tokens[5])]


def test_repetition_penalty_makes_seen_tokens_less_probable(model):
    logits = np.array([2.0, -2.0, 1.0])
    assert np.array_equal(penalise_repetition(logits, np.array([0, 1, 1, 0]), 2.0), [1, -4, 1])
    assert np.array_equal(logits, [2, -2, 1])
    prompt = np.array([0])
    free, repeat = (list(generate(model, prompt, 50, rng=0, repetition_penalty=p)) for p in (1.0, 5.0))
    assert free != repeat
    with pytest.raises(ValueError, match="-2"):
        next(generate(model, prompt, 1, repetition_penalty=-2))


@pytest.mark.parametrize("training", [True, False])
def test_sampling_leaves_mode_and_gradients_as_they_were(model, training):
    model.train(training)
    list(generate(model, np.array([0]), 5, rng=0))
    assert model.training is training
    assert not model.flat.grad.any()
