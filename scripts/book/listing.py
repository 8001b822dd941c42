"""Code as HTML: each line an element, its words coloured by class, its numbers linked to their equations."""

from collections.abc import Callable, Iterable, Iterator
from html import escape
from typing import Any

from book.source import Line, Object, Reference, code_references
from numpygpt.extras import need

Piece = tuple[str, str]  # class and text
# Which kinds of words are told apart; the names are those of the classes in book.css.
KINDS = [
    ("String.Doc", "doc"),
    ("Comment", "remark"),
    ("Keyword", "word"),
    ("Operator.Word", "word"),
    ("Name.Function", "name"),
    ("Name.Class", "name"),
    ("Name.Decorator", "name"),
    ("String", "text"),
    ("Number", "number"),
]


def kind_of(token: Any) -> str:
    """Return the class of a word."""
    name = str(token).removeprefix("Token.").replace("Literal.", "")
    return next((kind for start, kind in KINDS if name == start or name.startswith(f"{start}.")), "")


def coloured(code: str) -> list[list[Piece]]:
    """Return for each line of some Python its pieces, as pairs of class and text."""
    lexer = need("pygments.lexers", "book").PythonLexer(stripnl=False, ensurenl=False)
    lines: list[list[Piece]] = [[]]
    for token, text in lexer.get_tokens(code):
        for i, piece in enumerate(text.split("\n")):
            if i:
                lines.append([])
            if piece:
                lines[-1].append((kind_of(token), piece))
    return lines


def plain_block(code: str, language: str) -> str:
    """Return a snippet as HTML; only Python is coloured."""
    lines = coloured(code) if language == "python" else [[("", line)] for line in code.split("\n")]
    return "<pre><code>" + "\n".join(map(pieces_to_html, lines)) + "</code></pre>"


def pieces_to_html(pieces: Iterable[Piece]) -> str:
    """Return the pieces of a line as HTML."""
    return "".join(
        f'<span class="{kind}">{escape(text)}</span>' if kind else escape(text, quote=False) for kind, text in pieces
    )


def cut_at(
    pieces: Iterable[tuple[str, str]], references: list[Reference]
) -> Iterator[tuple[str, str, Reference | None]]:
    """Yield the pieces of a line, cut so that each reference is a piece of its own."""
    at = 0
    for kind, text in pieces:
        stop = at + len(text)
        inside = [r for r in references if at <= r.start and r.stop <= stop]
        for r in inside:
            if at < r.start:
                yield kind, text[len(text) - (stop - at) :][: r.start - at], None
            yield kind, text[len(text) - (stop - r.start) :][: r.stop - r.start], r
            at = r.stop
        if at < stop:
            yield kind, text[len(text) - (stop - at) :], None
        at = stop


def without_loose_blanks(lines: list[Line]) -> list[Line]:
    """Return lines without the empty ones at a gap."""
    kept: list[Line] = []
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        blank = not line.text.strip()
        gap_before = bool(kept) and line.number != kept[-1].number + 1
        gap_behind = following is None or following.number != line.number + 1
        if not (blank and (gap_before or gap_behind or not kept)):
            kept.append(line)
    return kept


def listing(one: Object, link: Callable[[Reference], str], lines: Iterable[Line] | None = None) -> str:
    """Return an object's code as HTML; `link` makes the HTML of a number that belongs to an equation."""
    shown = without_loose_blanks(list(one.lines if lines is None else lines))
    html, last = [], shown[0].number - 1 if shown else 0
    for line, pieces in zip(shown, coloured("\n".join(line.text for line in shown)), strict=True):
        if line.number != last + 1:
            html.append('<span class="gap">⋮\n</span>')
        last = line.number
        found = code_references(one, line)
        keys = " ".join(dict.fromkeys(r.equation.key for r in found))
        words, note = "", ""
        for kind, text, r in cut_at(pieces, found):
            html_of_piece = f'<span class="{kind}">{link(r)}</span>' if r else pieces_to_html([(kind, text)])
            if note or kind == "remark":
                note += html_of_piece
            else:
                words += html_of_piece
        words += f'<span class="note">{note}</span>' if note else ""
        indent = len(line.text) - len(line.text.lstrip())
        mark = f' data-eq="{keys}"' if keys else ""
        html.append(
            f'<span class="line {line.way}" data-n="{line.number}" style="--in:{indent}"{mark}>{words}\n</span>'
        )
    return f'<pre class="code"><code>{"".join(html)}</code></pre>'
