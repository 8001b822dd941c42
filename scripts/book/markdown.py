"""Markdown as pages and docstrings use it: CommonMark with tables, $formulas$, and roles such as {eq}`Softmax 4`."""

import re
from collections.abc import Iterator
from typing import Any

from book.errors import BookError
from book.formula import to_mathml
from book.source import TAG
from numpygpt.extras import need

ROLE = re.compile(r"\{(\w+)\}`([^`]+)`")


def make_parser() -> Any:
    """Return a parser of markdown-it with formulas and roles."""
    parser = need("markdown_it", "book").MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.block.ruler.before("fence", "formula", display_rule, {"alt": ["paragraph", "list", "blockquote"]})
    parser.inline.ruler.before("escape", "formula", formula_rule)
    parser.inline.ruler.before("escape", "role", role_rule)
    return parser


def display_rule(state: Any, start: int, end: int, silent: bool) -> bool:
    """Take lines from $$ to $$ as a block, also in the middle of a paragraph."""
    text = state.getLines(start, end, state.blkIndent, False)
    if not text.lstrip().startswith("$$"):
        return False
    stop = text.find("$$", text.index("$$") + 2)
    if stop < 0 or text[stop + 2 :].partition("\n")[0].strip():
        return False  # it has no end, or a text goes on behind it
    if not silent:
        lines = text[: stop + 2].count("\n") + 1
        token = state.push("formula_block", "math", 0)
        token.content = text[text.index("$$") + 2 : stop]
        token.map = [start, start + lines]
        state.line = start + lines
    return True


def formula_rule(state: Any, silent: bool) -> bool:
    """Take what stands between dollars as a formula; inside a paragraph also between two of them."""
    if state.src[state.pos] != "$":
        return False
    mark = "$$" if state.src.startswith("$$", state.pos) else "$"
    start = state.pos + len(mark)
    stop = state.src.find(mark, start)
    if stop <= start or state.src[start].isspace() or state.src[stop - 1].isspace():
        return False
    if not silent:
        token = state.push("formula", "math", 0)
        token.content = state.src[start:stop]
    state.pos = stop + len(mark)
    return True


def role_rule(state: Any, silent: bool) -> bool:
    """Take {name}`argument` as a role."""
    match = ROLE.match(state.src, state.pos)
    if not match:
        return False
    if not silent:
        token = state.push("role", "", 0)
        token.info, token.content = match[1], match[2]
    state.pos = match.end()
    return True


def number_lines(tokens: list[Any], first: int) -> None:
    """Tell every token, also inside paragraphs, on which line of its file it stands (in meta["line"])."""
    for token in tokens:
        line = first + (token.map[0] if token.map else 0)
        token.meta["line"] = line
        for child in token.children or []:
            child.meta["line"] = line
            line += child.content.count("\n") + (child.type in ("softbreak", "hardbreak"))


def walk(tokens: list[Any]) -> Iterator[Any]:
    """Yield all tokens, also those inside paragraphs."""
    for token in tokens:
        yield token
        yield from walk(token.children or [])


def mathml(latex: str, display: bool, place: str) -> str:
    """Return a formula as MathML; BookError names the place and the formula if that can't be done."""
    try:
        return to_mathml(TAG.sub("", latex), display)
    except ValueError as error:
        raise BookError(place, f"the formula {' '.join(latex.split())!r} {error}") from error


def slug(title: str) -> str:
    """Return a heading as an anchor."""
    return "-".join(re.findall(r"[a-z0-9]+", title.lower())) or "section"
