import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numpygpt.config import CHOICES, TransformerConfig
from numpygpt.model import TransformerLM
from numpygpt.sample import generate, generate_batch, next_token_distribution, penalise_repetition, until_stop

LOGITS = np.log(np.array([0.15, 0.45, 0.05, 0.35]))


def kept(**limits):
    return set(np.flatnonzero(next_token_distribution(LOGITS, **limits)))


def make(context_length=8, **fields):
    config = TransformerConfig(5, context_length, d_model=8, num_layers=2, num_heads=2, **fields)
    return TransformerLM(config, dtype=np.float64, rng=0)


@pytest.fixture
def model():
    return make()


def test_temperature_zero_is_greedy_whatever_the_seed(model):
    assert np.array_equal(next_token_distribution(np.array([1.0, 3.0, 2.0]), temperature=0), [0, 1, 0])
    assert np.array_equal(next_token_distribution(np.array([3.0, 3.0]), temperature=0), [1, 0])  # first of equals
    three = TransformerLM(TransformerConfig(3, 8, 8, 1, 2), rng=0)
    three.forward = lambda ids, *rest, **cache: np.broadcast_to([1.0, 3.0, 2.0], (*ids.shape, 3))
    for seed in range(5):  # karpathy/nanoGPT#738
        assert list(generate(three, np.array([0]), 6, temperature=0, rng=seed)) == [1] * 6
    runs = {tuple(generate(model, np.array([0]), 12, temperature=0, rng=seed)) for seed in range(5)}
    assert len(runs) == 1


def test_top_k_keeps_the_k_most_probable():
    assert kept(top_k=2) == {1, 3}
    assert kept(top_k=4) == kept(top_k=100) == kept(top_k=None) == {0, 1, 2, 3}
    assert set(np.flatnonzero(next_token_distribution(np.zeros(5), top_k=2))) == {0, 1}  # equals by id
    five = [next_token_distribution(np.arange(5.0), top_k=k) for k in (5, 6, None)]  # TransformerLens#1347
    assert np.array_equal(five[0], five[1]) and np.array_equal(five[0], five[2])


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


def without_cache(model, prompt, count, seed):
    """What sampling says, computed anew from the whole window for each id."""
    rng, context, text, start = np.random.default_rng(seed), model.config.context_length, [*map(int, prompt)], 0
    start = max(0, len(text) - context)
    for _ in range(count):
        if len(text) - start > context:
            start = len(text) - max(1, context // 2)
        logits = model.eval().forward(np.array(text[start:]))[-1]
        text.append(int(rng.choice(5, p=next_token_distribution(logits))))
    return text[len(prompt) :]


@pytest.mark.parametrize("context", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [1, 8, 20])
def test_a_prompt_of_any_length_goes_on_as_without_a_cache(context, length):
    # CarperAI/trlx#130, Lightning-AI/litgpt#1648, sgl-project/sglang#1593
    model = make(context)
    prompt = np.random.default_rng(0).integers(0, 5, length)
    tokens = list(generate(model, prompt, 30, rng=0))
    assert tokens == without_cache(model, prompt, 30, 0)
    assert len(tokens) == 30


def test_each_id_is_read_once_and_past_the_context_every_second_one_twice(monkeypatch):
    model, read = make(8), []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda ids, *a, **k: read.append(ids.shape[-1]) or forward(ids, *a, **k))
    list(generate(model, np.zeros(3, int), 14, rng=0))
    assert read == [3, 1, 1, 1, 1, 1, 4, 1, 1, 1, 1, 4, 1, 1]


def test_past_the_context_the_model_sees_the_latest_ids(model):
    ids = np.random.default_rng(0).integers(0, 5, 20)
    assert list(generate(model, ids, 3, rng=0)) == list(generate(model, ids[-8:], 3, rng=0))


# Several texts at once


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(CHOICES["positions"]),
    stop=st.sets(st.integers(0, 4), max_size=2),
    penalty=st.sampled_from([1.0, 3.0]),
)
def test_each_text_of_a_batch_is_the_one_it_would_be_alone(lengths, seed, kind, stop, penalty):
    model = make(6, positions=kind)
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 5, length) for length in lengths]
    seeds = [seed + i for i in range(len(prompts))]
    settings = {"stop": stop, "repetition_penalty": penalty}
    steps = list(generate_batch(model, prompts, 15, rng=seeds, **settings))
    for i, prompt in enumerate(prompts):
        draws = [step[i] for step in steps]
        tokens = [draw.token for draw in draws if draw is not None]
        assert tokens == list(generate(model, prompt, 15, rng=seeds[i], **settings))
        assert all(draw is None for draw in draws[len(tokens) :])  # ended is ended
        assert not stop & set(tokens)
    assert all(any(draw is not None for draw in step) for step in steps)  # and when all have, it's over


def test_a_draw_shows_what_it_was_drawn_from(model):
    ((draw,),) = generate_batch(model, [np.array([3])], 1, top_k=2, rng=0)
    expected = next_token_distribution(model.eval().forward(np.array([3]))[-1], top_k=2)
    np.testing.assert_allclose(draw.probs, expected, rtol=0, atol=1e-12)
    assert draw.probs[draw.token] > 0


def test_one_seed_gives_each_text_draws_of_its_own(model):
    runs = [list(generate_batch(model, [np.array([0])] * 3, 20, rng=0)) for _ in range(2)]
    first, second = ([[draw.token for draw in step] for step in steps] for steps in runs)
    assert first == second
    assert len(set(zip(*first, strict=True))) == 3


def test_seeds_that_are_not_one_for_each_prompt_and_no_prompts_are_refused(model):
    with pytest.raises(ValueError, match="2 seeds were given for 1 prompt"):
        next(generate_batch(model, [np.array([0])], 1, rng=[0, 1]))
    with pytest.raises(ValueError, match="no prompt"):
        next(generate_batch(model, [], 1))


# Stop strings


def pieces_of(text, cuts):
    cuts = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(cuts)]


@given(
    text=st.text("ab", max_size=20),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 20)),
)
def test_a_text_ends_before_the_first_stop_string_however_it_is_cut(text, stop, cuts):
    def ends(n):
        return [len(s) for s in stop if text[:n].endswith(s)]

    end = next((n for n in range(len(text) + 1) if ends(n)), None)
    expected = text if end is None else text[: end - max(ends(end))]
    assert "".join(until_stop(pieces_of(text, cuts), stop)) == expected
    assert "".join(until_stop(text, stop)) == expected


@given(text=st.text("ab", max_size=20), stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_what_could_begin_a_stop_string_is_held_back_and_nothing_else_is(text, stop):
    read = []
    shown = ""
    for piece in until_stop((read.append(c) or c for c in text), stop):
        shown += piece
        so_far = "".join(read)
        if len(read) < len(text) and not any(s in so_far for s in stop):
            rest = so_far[len(shown) :]
            assert so_far.startswith(shown)
            assert not rest or any(s.startswith(rest) for s in stop)
            undecided = [i for i in range(len(so_far)) if any(s.startswith(so_far[i:]) for s in stop)]
            assert len(shown) == min(undecided, default=len(so_far))


def test_a_stop_string_may_span_tokens_and_what_only_looked_like_it_is_shown():
    assert list(until_stop(["to", "\n", "be", "\n", "\n", "or"], ["\n\n"])) == ["to", "\nbe"]
    assert list(until_stop(["a", "\n"], ["\n\n"])) == ["a", "\n"]
    assert list(until_stop(["to be"], ())) == ["to be"]
    with pytest.raises(ValueError, match="empty"):
        next(until_stop(["a"], [""]))


def test_nothing_is_read_beyond_the_stop_string():
    pieces = iter(["a", "b", "c"])
    assert list(until_stop(pieces, ["b"])) == ["a"]
    assert next(pieces) == "c"


# Errors and ends


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="empty"):
        next(generate(model, np.array([], int), 1))


def test_padding_of_the_vocabulary_is_never_drawn():
    """The numbers of karpathy/build-nanogpt#81: a model of 64 ids for a tokenizer of 61."""
    model = TransformerLM(TransformerConfig(64, 4, 8, 1, 2), rng=0)
    drawn = list(generate(model, np.array([0]), 500, temperature=5.0, vocab_size=61, rng=0))
    assert len(drawn) == 500 and max(drawn) < 61
    assert max(generate(model, np.array([0]), 500, temperature=5.0, rng=0)) >= 61
    with pytest.raises(ValueError, match="vocab_size"):
        next(generate(model, np.array([0]), 1, vocab_size=0))


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


# What sampling leaves behind


def state_of(model):
    """Modes, generators, and what is kept for backward, of every module."""
    return [
        (m.training, vars(m).get("saved"), repr(m.rng.bit_generator.state) if hasattr(m, "rng") else None)
        for m in model.modules()
    ]


@pytest.mark.parametrize("training", [True, False])
def test_sampling_leaves_the_model_as_it_was_between_any_two_ids(training):
    model = make(8, dropout=0.5).train(training)
    model.layers[0].eval()  # each module has a mode of its own
    before = state_of(model)
    for _ in generate(model, np.array([0]), 12, rng=0):
        assert all(a[0] is b[0] and a[1] is b[1] and a[2] == b[2] for a, b in zip(state_of(model), before, strict=True))
    assert not model.flat.grad.any()


def test_a_model_that_has_not_run_has_nothing_kept_after_sampling(model):
    list(generate(model, np.array([0]), 3, rng=0))
    assert not any("saved" in vars(m) for m in model.modules())
    with pytest.raises(AttributeError, match="forward"):
        model.backward(np.ones((1, 5)))


def test_a_pending_backward_is_right_after_sampling():
    gradients = []
    for samples in (False, True):
        model = make(8, dropout=0.5).train()
        for _ in range(2):  # the second one's dropout shows that sampling drew none
            logits = model.forward(np.array([[0, 1, 4]]))
            if samples:
                list(generate(model, np.array([0, 2]), 12, rng=0))
            model.backward(np.ones_like(logits))
        gradients.append(model.flat.grad.copy())
    assert np.array_equal(*gradients)


def test_the_model_has_its_mode_back_after_an_error(model):
    model.train()
    model.lm_head.weight.value[...] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        next(generate(model, np.array([0]), 1))
    with pytest.raises(IndexError, match="token id 9"):
        next(generate(model, np.array([9]), 1))
    assert all(m.training for m in model.modules())
