"""The page: one HTML file that needs nothing beside it."""

import base64
import html
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from numpygpt.config import TransformerConfig
from numpygpt.data import Tokenizer
from numpygpt.layers import Softmax
from tracing.layout import Cell, Row, Section, lay_out
from tracing.picture import CELLS, LEVELS, Snapshot, png
from tracing.record import MAPS, Place, Run
from tracing.source import NUMBER, equation_of

NUMBERS = 128  # of an array that has its numbers in a title, at most
LABELS = 32  # tokens at the axes of a map of attention, at most
GUESSES = 3
STYLE = Path(__file__).with_name("page.css")
ABOUT = """
<p>This is one forward and one backward of a language model over a short text. <b class="forward">Forward reads down
the left</b>: each array as a line of the model's code made it. <b class="backward">Backward reads up the right</b>:
beside a value x stands its gradient, ∂L/∂x of the loss L, as the code made it on the way back. To lower the loss, each
element should move against its gradient.</p>
<ul>
<li>The numbers at the right of each half count the arrays in the order in which they were made.</li>
<li>A half is empty where the code has no such array: what was derived by hand needs fewer than forward has, and some of
its own.</li>
<li>Beside an input stands the part of its gradient that comes through that module. If the input is used elsewhere too,
the parts are added, and the sum is an array of its own. Beside a parameter stands what its gradient has come to after
that line.</li>
<li>What is faded was made elsewhere, and stands here again because it is used here. Its number leads there.</li>
<li>Numbers in parentheses are those of the equations in the docstring of the class, and their titles show them in
LaTeX.</li>
<li>Colours: {legend} from −m over 0 to +m, where ±m is the largest magnitude in that array and is written under it.
Grey is −∞. Where there is a row for each position, they stand in the order of the text, and heads stand side by side.
Pictures have at most {cells} rows and columns: of larger arrays, each cell is the element of largest magnitude in a
block. Pictures of at most {numbers} elements show their numbers as a title.</li>
</ul>
"""


class Book(NamedTuple):
    """A built book: the file that has each equation's anchor, from where the page will lie."""

    links: dict[str, str]

    @classmethod
    def read(cls, folder: Path, out: Path) -> "Book":
        """Find the anchors in a book's pages. ValueError if there are none."""
        links = {}
        for page in sorted(folder.glob("*.html")):
            for anchor in re.findall(r'id="(\w+-\w+)"', page.read_text(encoding="utf-8")):
                links[anchor] = f"{Path(os.path.relpath(page, out.parent)).as_posix()}#{anchor}"
        if not links:
            raise ValueError(f"--book {folder} holds no page with equations: python scripts/build_book.py makes a book")
        return cls(links)


def write(run: Run, config: TransformerConfig, tokenizer: Tokenizer, book: Book | None = None) -> str:
    """Return the page of a run; the last of its tokens is a target alone."""
    sections = lay_out(run.recorder)
    tokens = [tokenizer.decode([i]) for i in run.ids]
    title = f"A gradient flows through “{shown(''.join(tokens))}”"
    about = ABOUT.format(legend=legend(), cells=CELLS, numbers=NUMBERS)
    body = "".join(of_section(part, tokens[:-1], book) for part in sections)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f'{about}<p class="small"><code>{html.escape(str(config))}</code></p>\n{of_loss(run, tokenizer, tokens)}'
        f"<nav><ol>{''.join(contents(part) for part in sections)}</ol></nav>\n"
        '<div class="row columns"><span class="forward">↓ forward: values</span>'
        f'<span class="backward">↑ backward: gradients</span></div>\n{body}</body>\n</html>\n'
    )


def of_loss(run: Run, tokenizer: Tokenizer, tokens: list[str]) -> str:
    """Return the loss, and a table of what was predicted at each position."""
    probs = Softmax().forward(run.logits.astype(float))
    rows = [row("th", "position", "token", "next", "its probability", "its loss", "predicted next")]
    for t, (p, target) in enumerate(zip(probs, run.ids[1:], strict=True)):
        likely = np.argsort(-p[: tokenizer.vocab_size], kind="stable")[:GUESSES]
        guesses = [f"<span>{token(tokenizer.decode([i]))} {100 * p[i]:.1f} %</span>" for i in likely]
        scores = f"{100 * p[target]:.1f} %", f"{-np.log(p[target]):.3f}"
        rows.append(row("td", str(t), token(tokens[t]), token(tokens[t + 1]), *scores, ", ".join(guesses)))
    size, uniform = probs.shape[-1], np.log(probs.shape[-1])
    return (
        f"<p>The loss is <b>{run.loss:.4f}</b> nats a token; if all {size} were equally likely, {uniform:.4f}.</p>\n"
        f'<div class="wide"><table>\n{"".join(rows)}</table></div>\n'
    )


def row(kind: str, *cells: str) -> str:
    """Return a row of a table; its cells are of a kind, th or td."""
    return f"<tr>{''.join(f'<{kind}>{cell}</{kind}>' for cell in cells)}</tr>\n"


def contents(part: Section) -> str:
    """Return links to a section and those inside it."""
    depth = part.path.count(".") + 1 if part.path else 0
    link = f'<li style="padding-left:{0.8 * depth:.1f}em"><a href="#{anchor(part.path)}">{named(part.path)}</a></li>'
    return link + "".join(contents(item) for item in part.items if isinstance(item, Section))


def of_section(part: Section, tokens: list[str], book: Book | None) -> str:
    """Return a module's rows, which can be folded away."""
    items = [of_row(i, tokens, book) if isinstance(i, Row) else of_section(i, tokens, book) for i in part.items]
    head = f"<b>{named(part.path)}</b> <span>{type(part.forward.module).__name__}</span>"
    return f'<details open id="{anchor(part.path)}"><summary>{head}</summary>\n{"".join(items)}</details>\n'


def of_row(row: Row, tokens: list[str], book: Book | None) -> str:
    """Return a value and its gradient side by side."""
    halves = [of_cell(cell, tokens, book) if cell else "<div></div>" for cell in (row.value, row.gradient)]
    return f'<div class="row">{"".join(halves)}</div>\n'


def of_cell(cell: Cell, tokens: list[str], book: Book | None) -> str:
    """Return a step: its name, shape and number, the lines that made it, its picture and norm."""
    step, seen = cell.step, cell.step.seen
    number = f'<a class="number" href="#step-{step.number}">{step.number}</a>' if step.number else ""
    role = f" {cell.role}" if cell.role else ""
    shape = " × ".join(map(str, seen.shape if cell.shape is None else cell.shape)) or "a number"
    places = [place for place in (step.place, *step.also) if place is not None]
    lines = "" if cell.again else "".join(of_line(place, book) for place in places)
    notes = [f"norm {seen.norm:.3g}", f"±{seen.largest:.3g}"]
    if seen.block != (1, 1):
        notes.append(f"each cell the largest of {seen.block[0]} × {seen.block[1]}")
    if seen.is_complex:
        notes.append("complex: real and imaginary parts in turn")
    if step.name == "e / z":
        notes.append("the weights, which no line computes")
    ident = "" if cell.again or not step.number else f' id="step-{step.number}"'
    name = html.escape(cell.name or step.name)
    return (
        f'<div class="{"backward" if step.backward else "forward"}{" again" if cell.again else ""}"{ident}>'
        f'<div class="what"><b>{name}</b><span class="small">{shape}{role}</span>{number}</div>'
        f'{lines}{pictures(step.name, seen, tokens)}<div class="small">{" · ".join(notes)}</div></div>'
    )


def of_line(place: Place, book: Book | None) -> str:
    """Return a line of code, the numbers of its equations explained or linked, and where it stands."""
    statement = place.statement
    code, mark, comment = html.escape(statement.code, quote=False).partition("  # ")
    comment = NUMBER.sub(lambda found: equation(found[1], place, book), comment)
    where = f"{named(place.path)}, {statement.path.name} {statement.line}"
    return f'<span class="line"><code>{code}{mark and "  #&nbsp;"}{comment}</code>\n{where}</span>'


def equation(number: str, place: Place, book: Book | None) -> str:
    """Return an equation's number, with the equation as its title and, beside a book, a link."""
    found = equation_of(number, place.statement.path, place.function)
    if found is None:
        return f"({number})"
    title = html.escape(f"{found.title}: {' '.join(found.latex.split())}")
    link = book.links.get(found.key) if book is not None else None
    if link is None:
        return f'<abbr title="{title}">({number})</abbr>'
    return f'<a href="{html.escape(link)}" title="{title}">({number})</a>'


def pictures(name: str, seen: Snapshot, tokens: list[str]) -> str:
    """Return the heat maps of an array, one for each of its panels."""
    height, width = seen.panels.shape[1:]
    attention = name in MAPS and (height, width) == (len(tokens),) * 2 and len(tokens) <= LABELS
    size = 16 if attention else min(12, max(3, 256 // max(width, height)))
    figures = []
    for i, panel in enumerate(seen.panels):
        data = base64.b64encode(png(panel, seen.largest)).decode()
        image = (
            f'<img src="data:image/png;base64,{data}" width="{width * size}" height="{height * size}" '
            f'alt="{html.escape(name)} as colours" title="{html.escape(numbers(panel))}">'
        )
        if attention:
            labels = "".join(f"<span>{shown(t)}</span>" for t in tokens)
            keys = "keys long" if max(map(len, tokens)) > 1 else "keys"
            image = (
                f'<div class="axes"><div class="{keys}">{labels}</div><div class="queries">{labels}</div>{image}</div>'
            )
        caption = f"<figcaption>{'head ' if attention else ''}{i}</figcaption>" if len(seen.panels) > 1 else ""
        figures.append(f"<figure>{caption}{image}</figure>")
    return f'<div class="maps">{"".join(figures)}</div>'


def numbers(panel: np.ndarray) -> str:
    """Return the elements of a small matrix as text, each in the fewest digits that tell it from its neighbours."""
    if panel.size > NUMBERS:
        return ""
    return "\n".join("  ".join(str(number) for number in row) for row in panel)


def legend() -> str:
    """Return a picture of all colours."""
    data = base64.b64encode(png(np.linspace(-1, 1, 2 * LEVELS + 1)[None], 1)).decode()
    return f'<img class="legend" src="data:image/png;base64,{data}" alt="purple to green">'


def shown(text: str) -> str:
    """Return text as HTML, its spaces and line breaks made visible."""
    return html.escape("".join({" ": "␣", "\n": "⏎", "\t": "⇥"}.get(c, c if c.isprintable() else "�") for c in text))


def token(text: str) -> str:
    """Return a token in a box."""
    return f'<span class="token">{shown(text)}</span>'


def named(path: str) -> str:
    """Return the name of a module; the model itself has an empty path."""
    return path or "model"


def anchor(path: str) -> str:
    """Return the id of a section."""
    return f"module-{named(path)}"
