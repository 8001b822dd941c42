"""Tokens and batches: nothing is lost, every window is usable, and every error names what is wrong."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numpygpt.corpus import DataError
from numpygpt.data import CharTokenizer, random_batch, sequential_batches, split

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)  # Cs: lone surrogates, no characters


@given(texts)
def test_characters_survive(text):
    tokenizer = CharTokenizer.train(text)
    ids = tokenizer.encode(text)
    assert ids.shape == (len(text),) and tokenizer.vocab_size == len(set(text))
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.tolist()) == text


def test_line_ends_survive():
    text = "a\r\nb\rc\n\u2028\x00\U0001f600"
    tokenizer = CharTokenizer.train(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_follow_the_code_points_in_the_smallest_dtype():
    tokenizer = CharTokenizer.train("cab")
    assert tokenizer.encode("abc").tolist() == [0, 1, 2] and tokenizer.encode("abc").dtype == np.uint8
    many = "".join(map(chr, range(257)))
    assert CharTokenizer.train(many[:256]).encode("a").dtype == np.uint8
    assert CharTokenizer.train(many).encode(many)[-1] == 256
    assert tokenizer.encode("").shape == (0,) and tokenizer.decode([]) == ""


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("aπ", "'π' (U+03C0) at position 1 is not among the 3 of the vocabulary 'abc'"),
        ("abA", "'A' (U+0041) at position 2"),
        ("\udcff", r"'\udcff' (U+DCFF) at position 0"),
    ],
)
def test_an_unknown_character_is_named(prompt, message):
    with pytest.raises(DataError, match=re.escape(message)):
        CharTokenizer.train("abc").encode(prompt)


@pytest.mark.parametrize("bad", [61, 63, -1])
def test_an_id_out_of_range_is_named(bad):
    tokenizer = CharTokenizer.train("".join(map(chr, range(32, 32 + 61))))
    with pytest.raises(DataError, match=f"the id {bad} at position 1 is not one of 0 to 60"):
        tokenizer.decode([60, bad])
    with pytest.raises(DataError, match="float64"):
        tokenizer.decode([0.5])


def test_what_cannot_be_trained_on():
    with pytest.raises(DataError, match="empty"):
        CharTokenizer.train("")
    with pytest.raises(DataError, match=r"U\+D800"):
        CharTokenizer.train("a\ud800")


@given(text=texts)
def test_a_saved_tokenizer_is_the_same(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "new"
    tokenizer = CharTokenizer.train(text)
    tokenizer.save(folder)
    loaded = CharTokenizer.load(folder)
    assert loaded == tokenizer and hash(loaded) == hash(tokenizer)
    assert loaded.decode(loaded.encode(text)) == text


def test_fingerprints_tell_tokenizers_apart():
    """Of equal size, yet not equal; and the same in every process, so that checkpoints can hold it."""
    assert CharTokenizer.train("abc") == CharTokenizer.train("cba")
    assert CharTokenizer.train("abc") != CharTokenizer.train("abd")
    assert CharTokenizer.train("abc") != "abc"
    assert CharTokenizer.train("abc").fingerprint == "561e6e4b3d2ce849"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"kind": "char", "fingerprint": "561e6e4b3d2ce849", "vocabulary": 3}',
        b'{"kind": "char", "fingerprint": "561e6e4b3d2ce849", "vocabulary": ["a", "b", "c"]}',
        b'{"kind": "char", "fingerprint": "561e6e4b3d2ce849", "vocabulary": "abd"}',
        b'{"kind": "char", "fingerprint": "561e6e4b3d2ce849", "vocabulary": ""}',
        b'{"kind": "bpe", "fingerprint": "561e6e4b3d2ce849", "vocabulary": "abc"}',
        None,
    ],
)
def test_a_damaged_or_foreign_file_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(str(path))):
        CharTokenizer.load(tmp_path)


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
