"""The pages of docs/book, read: Markdown whose fences name derivations, figures, questions, checks and exercises."""

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

from book.errors import BookError
from book.source import ROOT, definitions, extent, read_package
from numpygpt.extras import need

DOCS = ROOT / "docs" / "book"
FENCES = "derivation", "equation", "figure", "question", "check", "exercise", "contents"


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A line of code that an exercise breaks, and the tests that must see it."""

    file: Path
    tests: Path
    function: str  # that the line is in
    number: int
    old: str
    new: str
    place: str

    def source(self) -> str:
        """Return the file with the line broken."""
        lines = self.file.read_text(encoding="utf-8").split("\n")
        indent = lines[self.number - 1][: -len(self.old)]
        lines[self.number - 1] = indent + (self.new or "pass")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Fence:
    """A fenced part of a page."""

    kind: str
    argument: str
    head: str  # of a question or an exercise: what stands before ---; else all of it
    answer: str
    place: str  # file and line, for messages
    line: int  # of the fence
    answer_line: int  # of the answer
    mutation: Mutation | None = None


@dataclasses.dataclass(frozen=True)
class Page:
    """A page: where it comes from, what it is called, and its fences."""

    path: Path
    name: str  # of the file that is made, without .html
    title: str
    text: str
    fences: list[Fence]

    @property
    def file(self) -> str:
        """The name of the page that is made."""
        return f"{self.name}.html"

    @property
    def shown(self) -> str:
        """The path as messages have it."""
        return shown(self.path)

    def of_kind(self, kind: str) -> list[Fence]:
        """Return the fences of a kind."""
        return [fence for fence in self.fences if fence.kind == kind]


def shown(path: Path) -> str:
    """Return a path as a reader of the repository writes it."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def read_pages(folder: Path = DOCS) -> list[Page]:
    """Return the pages of a folder in reading order. BookError names the file and line of what is wrong."""
    paths = sorted(folder.glob("[0-9][0-9]-*.md"))
    if not paths:
        raise BookError(shown(folder), "has no pages NN-name.md")
    pages = [read_page(path) for path in paths]
    names = [page.name for page in pages]
    for page in pages:
        if names.count(page.name) > 1:
            raise BookError(page.shown, f"another page is named {page.name} too")
    return pages


def read_page(path: Path) -> Page:
    """Read one page."""
    text = path.read_text(encoding="utf-8")
    if not text.startswith("# "):
        raise BookError(f"{shown(path)}:1", "a page begins with '# Title'")
    parser = need("markdown_it", "book").MarkdownIt("commonmark").enable("table")
    fences = [read_fence(token, path) for token in parser.parse(text) if is_fence(token)]
    return Page(path, path.stem[3:], text.partition("\n")[0][2:].strip(), text, fences)


def is_fence(token: Any) -> bool:
    """Return whether a token is one of this book's fences."""
    return token.type == "fence" and token.info.startswith("{")


def read_fence(token: Any, path: Path) -> Fence:
    """Return what a token of markdown-it says."""
    line = token.map[0] + 1
    place = f"{shown(path)}:{line}"
    match = re.fullmatch(r"\{(\w+)\}\s*(.*)", token.info.strip())
    if not match or match[1] not in FENCES:
        raise BookError(place, f"unknown fence {token.info.strip()!r}: there are {', '.join(FENCES)}")
    kind, argument = match[1], match[2]
    head, answer, answer_line, mutation = token.content, "", line + 1, None
    if kind in ("question", "exercise"):
        lines = token.content.split("\n")
        at = [i for i, text in enumerate(lines) if text.rstrip() == "---"]
        if not at:
            raise BookError(place, f"the {kind} has no line --- before its answer")
        head, answer = "\n".join(lines[: at[0]]).strip(), "\n".join(lines[at[0] + 1 :])
        answer_line = line + 2 + at[0]
        if not head or not answer.strip():
            raise BookError(place, f"the {kind} has no {'text' if answer.strip() else 'answer'}")
    if kind == "exercise" and argument:
        head, _, change = head.partition("\n--- ")
        mutation = read_mutation(argument, change, place)
    if kind in ("question", "derivation", "equation", "figure") and not argument:
        raise BookError(place, f"the {kind} needs a name behind {{{kind}}}")
    if kind == "derivation" and argument not in read_package():
        raise BookError(place, f"unknown object {argument}: it must be a module, class or function of the package")
    if kind == "check" and not any(isinstance(n, ast.Assert) for n in ast.walk(parsed(token.content, place))):
        raise BookError(place, "the check has no assert, so it can't fail")
    return Fence(kind, argument, head, answer, place, line, answer_line, mutation)


def parsed(code: str, place: str) -> ast.Module:
    """Return the tree of a snippet."""
    try:
        return ast.parse(code)
    except SyntaxError as error:
        raise BookError(place, f"the check is no Python: {error}") from error


def read_mutation(argument: str, change: str, place: str) -> Mutation:
    """Return the mutation that an exercise names; its line must stand once in the file, or in the class named."""
    names = argument.split()
    if len(names) != 2 or not change:
        raise BookError(place, "an exercise with a file needs its tests as well, and a line '--- code' to break")
    file, tests = (ROOT / name for name in names)
    for path in (file, tests):
        if not path.is_file():
            raise BookError(place, f"{shown(path)} isn't there")
    old, _, new = (part.strip() for part in change.strip().partition(" => "))
    text = file.read_text(encoding="utf-8")
    inside = range(1, text.count("\n") + 2)
    match = re.fullmatch(r"([A-Z]\w*): (.*)", old)
    if match:
        places = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
        if match[1] not in places:
            raise BookError(place, f"{names[0]} has no class {match[1]}")
        inside, old = range(places[match[1]].lineno, (places[match[1]].end_lineno or 0) + 1), match[2]
    numbers = [n for n, line in enumerate(text.split("\n"), 1) if n in inside and line.strip() == old]
    if len(numbers) != 1:
        raise BookError(place, f"the line {old!r} stands {len(numbers)} times in {names[0]}, not once")
    around = [name for name, node in definitions(ast.parse(text)) if numbers[0] in extent(node)]
    if not around:
        raise BookError(place, f"the line {old!r} is in no function: the test breaks functions only")
    return Mutation(file, tests, around[-1], numbers[0], old, new, place)
