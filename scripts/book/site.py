"""The whole book: where everything is, the frame of each page, and the files that are written."""

import json
import re
import shutil
from html import escape
from pathlib import Path

from book import indexes, links
from book.errors import BookError
from book.pages import DOCS, Page, read_pages
from book.source import Equation, by_name, code_references, loose_numbers, read_package
from book.writing import Writer

STATIC = Path(__file__).parent / "static"
MARK = "numpygpt-book"  # a file that says a folder holds a book, and may be written over
TITLE = "numpygpt: the derivations"


class Site:
    """All pages, and where each equation and its code are."""

    def __init__(self, folder: Path = DOCS):
        self.pages = read_pages(folder)
        self.equations: dict[str, Page] = {}  # the page of each
        self.code_page: dict[str, Page] = {}  # the page with its first line of code
        self.problems: list[str] = []
        self.ways: dict[str, str] = {}
        self.find_equations()
        self.check_numbers()

    def find_equations(self) -> None:
        """Note which page has which equation, and which lines of code carry its number."""
        self.shown = [
            (p, fence, read_package()[fence.argument]) for p in self.pages for fence in p.of_kind("derivation")
        ]
        for page, fence, one in self.shown:
            for equation in one.equations.values():
                if equation.key in self.equations:
                    other = self.equations[equation.key].shown
                    raise BookError(fence.place, f"{one.dotted} has its derivation on {other} already")
                self.equations[equation.key] = page
        for page, _, one in self.shown:
            for line in one.lines:
                for key in {reference.equation.key for reference in code_references(one, line)}:
                    self.ways.setdefault(key, line.way)
                    if key not in self.code_page or page is self.equations.get(key):
                        self.code_page[key] = page

    def check_numbers(self) -> None:
        """Note the numbers that lead nowhere: of equations, of lines of code, of questions."""
        for _, fence, one in self.shown:
            for line, number in loose_numbers(one):
                self.problem(f"{one.file}:{line.number}", f"({number}) is the number of no equation of {one.name}")
            for line in one.lines:
                for equation in (reference.equation for reference in code_references(one, line)):
                    if equation.key not in self.equations:
                        self.problem(f"{one.file}:{line.number}", f"no page has the derivation of {equation.title}")
            for equation in one.equations.values():
                if equation.key not in self.code_page:
                    self.problem(fence.place, f"no line of code shown in the book has the number of {equation.title}")
        names = {one.name for _, _, one in self.shown}
        for name, one in by_name().items():
            if name not in names:
                self.problem(one.file, f"{one.dotted} has equations, and no page has a {{derivation}} of it")
        questions = [fence for page in self.pages for fence in page.of_kind("question")]
        for i, fence in enumerate(questions):
            if any(fence.argument == other.argument for other in questions[:i]):
                self.problem(fence.place, f"another question is named {fence.argument} too")

    def problem(self, place: str, message: str) -> None:
        """Note something that makes the book wrong, and doesn't keep it from being written."""
        self.problems.append(f"{place}: {message}")

    def way(self, equation: Equation) -> str:
        """Return "back" if the equation's code is in a backward, else "forth"."""
        return self.ways.get(equation.key, "forth")

    def equation_href(self, equation: Equation, page: Page) -> str:
        """Return the link from a page to an equation."""
        there = self.equations.get(equation.key, page)
        return f"{'' if there is page else there.file}#{equation.key}"

    def code_href(self, equation: Equation, page: Page) -> str:
        """Return the link from a page to the line of an equation."""
        there = self.code_page.get(equation.key)
        if there is None:
            return f"#{equation.key}"
        return f"{'' if there is page else there.file}#{equation.key}-code"

    def write(self, out: Path) -> None:
        """Write the book into a folder, which must be new, empty or hold a book."""
        check_out(out)
        files = {page.file: self.frame(page) for page in self.pages}
        files["questions.html"] = self.shell("Questions", indexes.questions(self))
        files["equations.html"] = self.shell("Equations", indexes.equations(self))
        files["search.js"] = f"window.SEARCH = {json.dumps(list(indexes.entries(self)), ensure_ascii=False)};\n"
        files |= {path.name: path.read_text(encoding="utf-8") for path in sorted(STATIC.glob("book.*"))}
        if out.is_dir():
            shutil.rmtree(out)
        out.mkdir(parents=True)
        (out / MARK).write_text("Made by scripts/build_book.py, which writes it anew.\n", encoding="utf-8")
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
        self.problems += links.problems(out)

    def frame(self, page: Page) -> str:
        """Return a whole page."""
        writer = Writer(self, page)
        body = writer.body()
        here = "".join(f'<li><a href="#{anchor}">{escape(title)}</a></li>' for anchor, title in writer.sections)
        number = self.pages.index(page)
        before = self.pages[number - 1] if number else None
        after = self.pages[number + 1] if number + 1 < len(self.pages) else None
        turn = (
            f'<a rel="prev" href="{before.file}">← {escape(before.title)}</a>' if before else "<span></span>",
            f'<a rel="next" href="{after.file}">{escape(after.title)} →</a>' if after else "",
        )
        title = f"<h1>{escape(page.title)}</h1>"
        if number:
            title = f'<p class="where">{number} of {len(self.pages) - 1}</p>{title}'
            title += f'<nav class="here" aria-label="On this page"><ul>{here}</ul></nav>'
        inside = f'<main>{title}\n{body}</main>\n<nav class="turn" aria-label="Pages">{"".join(turn)}</nav>'
        return self.shell(page.title, inside, page, lights(body))

    def shell(self, title: str, inside: str, page: Page | None = None, style: str = "") -> str:
        """Return a file of HTML around what is in it."""
        rows = "".join(
            f'<li><a href="{p.file}"{" aria-current=page" if p is page else ""}>{escape(p.title)}</a></li>'
            for p in self.pages[1:]
        )
        name = title if page is self.pages[0] else f"{title} · {TITLE}"
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(name)}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="book.css">
<style>{style}</style>
<script src="book.js"></script>
<script src="search.js" defer></script>
</head>
<body>
<header class="bar">
<a class="home" href="index.html">numpygpt</a>
<details class="contents"><summary>Contents</summary><ol>{rows}</ol></details>
<a href="questions.html">Questions</a>
<a href="equations.html">Equations</a>
<form class="search" role="search" hidden><input type="search" placeholder="Search: RMSNorm 8" aria-label="Search"
 autocomplete="off" spellcheck="false"><ol class="found" hidden></ol></form>
<button type="button" class="theme" hidden aria-label="Dark or light">◐</button>
</header>
{inside}
</body>
</html>
"""


def lights(body: str) -> str:
    """Return the style that lights an equation with its lines when one of them is pointed at or linked to."""
    keys = dict.fromkeys(key for keys in re.findall(r'data-eq="([^"]*)"', body) for key in keys.split())
    return "\n".join(
        f'main:has([data-eq~="{k}"]:is(:hover,:focus-within)) [data-eq~="{k}"]{{background:var(--point)}}'
        f'main:has(:is([id="{k}"],[id="{k}-code"]):target) [data-eq~="{k}"]{{background:var(--pin)}}'
        for k in keys
    )


def check_out(out: Path) -> None:
    """Raise ValueError unless a folder is new, empty or holds a book."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: name a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / MARK).is_file():
        raise ValueError(f"--out {out} holds something that is no book, and is left alone: name a new or empty folder")
