"""Files of tokens: mapped, not read; and whatever is not such a file, or not whole, is refused by name."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numpygpt.corpus import DataError, corpus_pieces, load_corpus
from numpygpt.data import (
    BPETokenizer,
    CharTokenizer,
    open_tokens,
    random_batch,
    sequential_batches,
    split,
    write_tokens,
)
from numpygpt.tokens import HEADER_BYTES

ROOT = Path(__file__).parents[1]
ABC = CharTokenizer.train("abc")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "new" / "abc.tokens"
    write_tokens(path, ABC.encode("abcabcab"), ABC)
    return path


@given(
    rows=st.lists(st.lists(st.integers(0, 299), max_size=9), min_size=1).filter(any),
    size=st.sampled_from([300, 70_000]),
)
def test_what_was_written_is_read(rows, size, tmp_path_factory):
    tokenizer = CharTokenizer("".join(map(chr, [*range(0xD800), *range(0xE000, 0x20000)][:size])))
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    write_tokens(path, (np.array(row, np.int64) for row in rows), tokenizer)
    tokens = open_tokens(path, tokenizer)
    assert tokens.tolist() == [index for row in rows for index in row]
    assert isinstance(tokens, np.memmap) and tokens.dtype == tokenizer.dtype and not tokens.flags.writeable


def test_the_header_can_be_read_by_eye(path):
    header = path.read_bytes()[:HEADER_BYTES]
    assert header.endswith(b"\n")
    content = json.loads(header)
    assert content.pop("crc32") > 0
    assert content == {
        "numpygpt tokens": 1, "dtype": "|u1", "vocab_size": 3, "count": 8, "tokenizer": ABC.fingerprint
    }  # fmt: skip
    assert len(path.read_bytes()) == HEADER_BYTES + 8


def test_the_batches_of_a_file_are_those_of_the_array(path):
    array, tokens = ABC.encode("abcabcab"), open_tokens(path)
    for row in (array, tokens):
        batch = random_batch(row, 3, 4, np.random.default_rng(0))
        assert all(type(part) is np.ndarray and part.dtype == np.int64 for part in batch)
    for part, other in zip(batch, random_batch(array, 3, 4, np.random.default_rng(0)), strict=True):
        assert (part == other).all()
    pairs = zip(sequential_batches(array, 2, 3), sequential_batches(tokens, 2, 3), strict=True)
    assert all((a == b).all() for one, other in pairs for a, b in zip(one, other, strict=True))
    for part, other in zip(split(array, 1, 0.5), split(tokens, 1, 0.5), strict=True):
        assert (part == other).all() and not np.shares_memory(part, other)


def test_a_file_cut_short_anywhere_is_refused(path):
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(DataError, match=path.name):
            open_tokens(path)


def test_a_byte_changed_anywhere_is_found(path):
    """Except in the size of the vocabulary, which is there for people, and in the spaces, if it stays JSON."""
    content = path.read_bytes()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 0x01
        path.write_bytes(changed)
        try:
            tokens = open_tokens(path, ABC)
        except DataError as error:
            assert path.name in str(error)
        else:
            assert b'"vocab_size": 3' not in changed
            assert tokens.tolist() == ABC.encode("abcabcab").tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: b"", "no file of tokens"),
        (lambda content: b"[1]", "no file of tokens"),
        (lambda content: b"\x93NUMPY" + content, "no file of tokens"),
        (lambda content: content.replace(b'tokens": 1', b'tokens": 2'), "has format 2, and this program reads 1"),
        (lambda content: content.replace(b'"|u1"', b'"<f8"'), "names 8 ids of dtype '<f8'"),
        (lambda content: content.replace(b'"count": 8', b'"count": 0'), "names 0 ids"),
        (lambda content: content + b"\0", "9 bytes aren't the 8 ids"),
    ],
)
def test_a_foreign_file_is_refused(path, change, message):
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=f"{path.name}.*{message}"):
        open_tokens(path)


def test_a_missing_file_and_a_folder_are_named(path):
    for wrong in (path.parent, path.parent / "missing"):
        with pytest.raises(DataError, match=f"cannot read {wrong}"):
            open_tokens(wrong)


def test_another_tokenizer_of_equal_size_is_refused(path):
    other = CharTokenizer.train("abd")
    with pytest.raises(DataError, match=f"{path.name}.*{ABC.fingerprint}.*{other.fingerprint}"):
        open_tokens(path, other)
    assert len(open_tokens(path, ABC)) == 8


@pytest.mark.parametrize("rows", [[[0, 3]], [[0], [-1]], [], [[]]])
def test_ids_that_cannot_be_written_leave_the_old_file(path, rows):
    with pytest.raises(DataError, match=r"the id 3|the id -1|no tokens to write"):
        write_tokens(path, (np.array(row, np.int64) for row in rows), ABC)
    assert open_tokens(path, ABC).tolist() == ABC.encode("abcabcab").tolist()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_memory_stays_flat_over_two_thousand_batches(tmp_path):
    """karpathy/nanoGPT#287: each batch read more of the file into the process, until it held all of it."""
    tokens = np.random.default_rng(0).integers(3, size=20_000_000, dtype=np.uint8)
    write_tokens(tmp_path / "tokens", tokens, ABC)
    code = """
import mmap, sys, numpy as np
from numpygpt.data import open_tokens, random_batch, sequential_batches, split

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE

tokens, _ = split(open_tokens(sys.argv[1]), 64)
rng = np.random.default_rng(0)
random_batch(np.zeros(99, np.uint8), 12, 64, rng)
start = resident()
for _ in range(2000):
    random_batch(tokens, 12, 64, rng)
print(resident() - start)
for _ in sequential_batches(tokens, 100, 64):
    pass
print(resident() - start)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "tokens")]
    result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    grown = [int(line) for line in result.stdout.split()]
    assert max(grown) < 3e6, grown  # without letting the pages go, 18 MB


def test_a_folder_of_texts_is_encoded_in_pieces(tmp_path):
    pytest.importorskip("tokenizers", reason='needs pip install -e ".[bpe]"')
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_bytes((name + ": To be, or not to be\r\n  é\n\n" * 9).encode())
    source = str(tmp_path)
    text = load_corpus(source)
    tokenizer = BPETokenizer.train(corpus_pieces(source, 10), 300)
    assert tokenizer == BPETokenizer.train(text, 300)
    write_tokens(tmp_path / "tokens", map(tokenizer.encode, corpus_pieces(source, 10)), tokenizer)
    tokens = open_tokens(tmp_path / "tokens", tokenizer)
    assert (tokens == tokenizer.encode(text)).all()
    assert tokenizer.decode(tokens) == text
