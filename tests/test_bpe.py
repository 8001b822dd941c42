"""Byte pairs: nothing is lost, the merges are those of the declared rule, and every error names what is wrong."""

import itertools
import json
import random
import re
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numpygpt.corpus import DataError, at_words
from numpygpt.data import BPETokenizer, CharTokenizer, load_tokenizer, per_character

tokenizers = pytest.importorskip("tokenizers", reason='needs pip install -e ".[bpe]"')

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)  # Cs: lone surrogates, no characters
nasty = st.text(st.sampled_from("ab'st1.é \n\r\t\0\x1c\x85\xa0\u0301\u200b\u2028\u3000漢\U0001f600"))  # where words end
ENGLISH = "the cat sat on the mat\nthe hat that sat\nzz yy zz yy\n" * 5


@pytest.fixture(scope="module")
def english():
    return BPETokenizer.train(ENGLISH, 300)


@given(text=texts | nasty)
def test_any_text_survives(english, text):
    ids = english.encode(text)
    assert ids.dtype == np.uint16 and ids.ndim == 1
    assert english.decode(ids) == text
    assert english.decode(ids.tolist()) == text


@given(text=texts | nasty)
def test_any_text_survives_a_tokenizer_trained_on_it(text):
    if text:
        tokenizer = BPETokenizer.train(text, 400)
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text",
    ["a\r\nb\rc\n", "  both ends \t", "\x00", "\U0001f468\u200d\U0001f469", "e\u0301 \xe9", "<|endoftext|>", ""],
)
def test_what_often_gets_lost_survives(english, text):
    assert english.decode(english.encode(text)) == text


@pytest.mark.parametrize("order", list(itertools.permutations(["bb", "aa", "dd", "cc"])))
def test_pairs_equally_frequent_are_merged_in_the_order_of_their_ids(order):
    tokenizer = BPETokenizer.train("".join(order), 260)
    assert [tokenizer.decode([index]) for index in range(256, 260)] == ["aa", "bb", "cc", "dd"]


def test_pairs_that_overlap():
    tokenizer = BPETokenizer.train("aaaa", 300)
    assert [tokenizer.decode([index]) for index in range(256, tokenizer.vocab_size)] == ["aa", "aaaa"]
    assert tokenizer.encode("aaaaa").tolist() == [257, *tokenizer.encode("a")]
    assert tokenizer.encode("aaa").tolist() == [256, *tokenizer.encode("a")]


@given(st.lists(st.text("abcd", min_size=1, max_size=6), min_size=1, max_size=8))
def test_the_merges_are_those_of_the_declared_rule(words):
    """The most frequent pair, counted anew each time; of equals, the one of smaller ids."""
    words = [re.sub(r"(.)\1+", r"\1", word) for word in words]  # how often "aa" is in "aaa" is a matter of taste
    tokenizer = BPETokenizer.train("\n".join(words), 262)
    rows = [tuple(int(tokenizer.encode(character)[0]) for character in word) for word in words]
    for new in range(256, tokenizer.vocab_size):
        counts = Counter(pair for row in rows for pair in itertools.pairwise(row))
        pair = min(counts, key=lambda pair: (-counts[pair], pair))
        assert tokenizer.decode([new]) == tokenizer.decode(list(pair))
        rows = [merged(row, pair, new) for row in rows]


def test_a_text_without_white_space_is_learned_from_in_parts():
    """Such as a genome: merging inside one word of a megabyte would take hours."""
    text = "".join(random.Random(0).choices("acgt", k=300_000))
    tokenizer = BPETokenizer.train(text, 500)  # as one word, a minute or more
    assert tokenizer.vocab_size == 500
    assert tokenizer.decode(tokenizer.encode(text[:5000])) == text[:5000]
    assert BPETokenizer.train(iter([f"{text} ", f" {text}"]), 300) == BPETokenizer.train(f"{text}  {text}", 300)
    assert BPETokenizer.train("ab" * 256 + "cd", 300) == BPETokenizer.train(iter(["ab" * 256, "cd"]), 300)


def test_the_order_of_the_lines_does_not_matter():
    lines = ENGLISH.splitlines(keepends=True)
    for seed in range(10):
        random.Random(seed).shuffle(lines)
        assert BPETokenizer.train("".join(lines), 300) == BPETokenizer.train(ENGLISH, 300)


@given(text=nasty, size=st.integers(1, 5))
def test_pieces_of_a_text_have_the_ids_of_the_whole(english, text, size):
    pieces = list(at_words(text[start : start + size] for start in range(0, len(text), size)))
    assert "".join(pieces) == text
    whole = english._library.encode(text).ids
    assert [index for piece in pieces for index in english.encode(piece)] == whole == english.encode(text).tolist()
    if text:
        assert BPETokenizer.train(iter(pieces), 300) == BPETokenizer.train(text, 300)


@given(data=st.data())
def test_a_stream_gives_the_text_in_whole_characters(english, data):
    ids = data.draw(st.just(english.encode(data.draw(texts))) | st.lists(st.integers(0, english.vocab_size - 1)))
    pieces = list(english.stream(iter(ids)))
    assert "".join(pieces) == english.decode(ids) == english._library.decode(list(ids))
    assert all(pieces)


def test_a_stream_holds_back_an_unfinished_character(english):
    *first, last = english.encode("\U0001f600")
    stream = english.stream([*first, last, *first])
    assert next(stream) == "\U0001f600"
    assert list(stream) == ["\ufffd"]


def test_bytes_that_are_no_character_become_the_replacement_character(english):
    for byte in (0x80, 0xFF, 0xC3):
        assert english.decode([english._bytes.index(bytes([byte]))]) == "\ufffd"
    assert english.decode(english.encode("a\xe9")[:2]) == "a\ufffd"


@pytest.mark.parametrize("bad", [270, -1])
def test_an_id_out_of_range_is_named(bad):
    tokenizer = BPETokenizer.train("ababcdcdefef" * 2, 261)
    assert tokenizer.vocab_size == 261
    with pytest.raises(DataError, match=f"the id {bad} at position 1 is not one of 0 to 260"):
        tokenizer.decode([60, bad])
    with pytest.raises(DataError, match=f"the id {bad} "):
        list(tokenizer.stream([bad]))
    with pytest.raises(DataError, match="float64"):
        tokenizer.decode([0.5])


def test_a_lone_surrogate_is_named(english):
    with pytest.raises(DataError, match=r"U\+D800\) at position 2"):
        english.encode("ab\ud800")
    with pytest.raises(DataError, match=r"U\+DCFF"):
        BPETokenizer.train("ab\udcff", 300)


@pytest.mark.parametrize("vocab_size", [255, 0, -1, 2**20 + 1, 10**30])
def test_a_vocabulary_too_small_or_too_large_is_named(vocab_size):
    with pytest.raises(DataError, match=f"from 256 .* not {vocab_size}"):
        BPETokenizer.train("abc", vocab_size)


@pytest.mark.parametrize("text", ["", [], ["", ""]])
def test_an_empty_text_is_refused(text):
    with pytest.raises(DataError, match="empty"):
        BPETokenizer.train(text, 300)


def test_a_text_too_small_gives_fewer_tokens():
    assert BPETokenizer.train("a b", 1000).vocab_size == 257  # " b" is the only pair inside a word
    assert BPETokenizer.train("abab", 256).vocab_size == 256
    assert BPETokenizer.train("abab", 256).encode("a").dtype == np.uint8


@given(text=texts)
def test_a_saved_tokenizer_is_the_same_and_the_library_opens_it(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "new"
    tokenizer = BPETokenizer.train(text, 280)
    tokenizer.save(folder)
    for loaded in (BPETokenizer.load(folder), load_tokenizer(folder)):
        assert loaded == tokenizer and loaded.fingerprint == tokenizer.fingerprint
        assert loaded.decode(loaded.encode(text)) == text
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert theirs.encode(text).ids == tokenizer.encode(text).tolist()


def test_the_fingerprint_is_the_same_in_every_process(english):
    assert english.fingerprint == "ef08eae0bcbaa9bb"
    assert english != BPETokenizer.train(ENGLISH.upper(), 300) and english != CharTokenizer.train(ENGLISH)


def test_either_kind_is_loaded(english, tmp_path):
    english.save(tmp_path)
    with pytest.raises(DataError, match="of kind 'bpe', not 'char'"):
        CharTokenizer.load(tmp_path)
    CharTokenizer.train("abc").save(tmp_path)
    assert load_tokenizer(tmp_path) == CharTokenizer.train("abc")
    with pytest.raises(DataError, match="of kind 'char', not 'bpe'"):
        BPETokenizer.load(tmp_path)
    with pytest.raises(DataError, match="cannot read"):
        load_tokenizer(tmp_path / "missing")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content["model"]["vocab"].update(a=400), "have gaps"),
        (lambda content: content["model"]["vocab"].pop("a"), "out of vocabulary|have gaps"),
        (lambda content: content["model"]["merges"].append(["x", "qq"]), "out of vocabulary"),
        (lambda content: content.update(pre_tokenizer=None), "plain byte-level"),
        (lambda content: content.update(normalizer={"type": "Lowercase"}), "plain byte-level"),
        (lambda content: content["model"].update(dropout=0.5), "plain byte-level"),
        (lambda content: content.pop("model"), "is not a tokenizer"),
        (lambda content: content["model"].pop("merges"), "damaged"),
    ],
)
def test_a_damaged_or_lossy_file_is_named(english, tmp_path, damage, message):
    english.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    damage(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DataError, match=f"{re.escape(str(path))}.*({message})"):
        load_tokenizer(tmp_path)


def test_a_loss_per_character_counts_the_characters():
    """Four characters in two tokens: half the loss of a token each."""
    tokenizer = BPETokenizer.train("abab", 257)
    assert per_character(1.5, tokenizer.encode("abab"), tokenizer) == 0.75


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_characters_are_counted_without_making_the_text(english, text):
    assert english.count_characters(english.encode(text)) == len(text)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=re.escape('pip install -e ".[bpe]"')):
        BPETokenizer.train("abc", 300)


def merged(row, pair, new):
    """The row with each occurrence of the pair, from the left, made one."""
    result = []
    for index in row:
        if result and (result[-1], index) == pair:
            result[-1] = new
        else:
            result.append(index)
    return tuple(result)
