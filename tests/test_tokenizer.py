"""Characters as tokens: nothing is lost, and every error names what is wrong."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numpygpt.corpus import DataError
from numpygpt.data import CharTokenizer, load_tokenizer, per_character

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
    assert list(tokenizer.stream([1, 0])) == ["b", "a"]


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
    assert loaded == load_tokenizer(folder) == tokenizer and hash(loaded) == hash(tokenizer)
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


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    CharTokenizer.train("abc").save(tmp_path)
    new = CharTokenizer.train("abd")
    monkeypatch.setattr(CharTokenizer, "_to_json", lambda self: "\ud800")
    with pytest.raises(UnicodeEncodeError):
        new.save(tmp_path)
    assert CharTokenizer.load(tmp_path) == CharTokenizer.train("abc")
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]


def test_of_characters_the_loss_per_character_is_the_loss():
    tokenizer = CharTokenizer.train("abcd")
    assert per_character(1.5, tokenizer.encode("abcd"), tokenizer) == 1.5
    assert tokenizer.count_characters(tokenizer.encode("abcd")) == 4


def test_characters_are_learned_from_pieces_too():
    assert CharTokenizer.train(iter(["ba", "", "cb"])) == CharTokenizer.train("abc")
    with pytest.raises(DataError, match="empty text"):
        CharTokenizer.train(iter([""]))
