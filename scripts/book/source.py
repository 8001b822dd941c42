"""The package as the book reads it: objects, their docstrings and equations, their lines and the numbers on these."""

import ast
import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "numpygpt"
TAG = re.compile(r"\\tag\{(\w+)\}")
DISPLAY = re.compile(r"\$\$(.*?)\$\$", re.DOTALL)
# Adam's (1) to (3); AdamW (1); (Softmax, eq. 4); equations (1) to (8) there; (7)
REFERENCE = re.compile(
    r"(?:\b(?P<foreign>equations) |\b(?P<owner>\w+)(?:'s)? )?"
    r"\((?P<first>\d+|A)\)(?:(?P<join> (?:to|and) |, )\((?P<last>\d+|A)\))?"
    r"|\b(?P<named>\w+), eq\. (?P<of>\d+)"
)
Definition = ast.ClassDef | ast.FunctionDef
Node = ast.Module | Definition


@dataclasses.dataclass(frozen=True)
class Equation:
    """A numbered equation; `key` is its anchor, such as RMSNorm-8."""

    key: str
    name: str
    number: str
    latex: str

    @property
    def title(self) -> str:
        """What it is called in links: RMSNorm (8)."""
        return f"{self.name} ({self.number})"


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of code."""

    number: int
    text: str
    way: str  # "back" inside a backward, else "forth"


@dataclasses.dataclass(frozen=True, eq=False)
class Object:
    """A module, class, function or method. Its `name` is that of its anchors: RMSNorm, Trainer.add_gradients."""

    dotted: str
    name: str
    path: Path
    docstring: str
    docline: int  # of the file, where the docstring begins
    equations: dict[str, Equation]
    lines: tuple[Line, ...]  # without the docstring, and without what has a derivation of its own
    module: str  # dotted

    @property
    def file(self) -> str:
        """The path as a reader of the repository writes it."""
        return self.path.relative_to(ROOT).as_posix()


def equations_of(name: str, docstring: str) -> dict[str, Equation]:
    """Return the numbered equations of a docstring by their numbers."""
    found = {}
    for match in DISPLAY.finditer(docstring):
        if tag := TAG.search(match[1]):
            latex = TAG.sub("", match[1]).strip()
            found[tag[1]] = Equation(f"{name}-{tag[1]}", name, tag[1], latex)
    return found


def definitions(node: Node, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Yield the classes and functions of a module with their names, and the methods of its classes."""
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield prefix + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from definitions(child, f"{child.name}.")


def extent(node: Definition) -> range:
    """Return the numbers of a definition's lines, its decorators among them."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return range(first, (node.end_lineno or first) + 1)


def docstring_of(node: Node) -> tuple[str, range]:
    """Return a docstring and the numbers of its lines."""
    text = ast.get_docstring(node, clean=False)
    if text is None:
        return "", range(0)
    place = node.body[0]
    return inspect.cleandoc(text), range(place.lineno, (place.end_lineno or place.lineno) + 1)


def read_module(path: Path) -> Iterator[Object]:
    """Yield a module and all that it defines."""
    source = path.read_text(encoding="utf-8")
    text = ["", *source.split("\n")]
    tree = ast.parse(source)
    parts = path.relative_to(ROOT).with_suffix("").parts
    dotted = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    found = dict(definitions(tree))
    back = {n for name, node in found.items() if name.split(".")[-1] == "backward" for n in extent(node)}

    def lines(numbers: list[int]) -> tuple[Line, ...]:
        kept = [Line(n, text[n], "back" if n in back else "forth") for n in numbers]
        while kept and not kept[0].text.strip():
            kept.pop(0)
        while kept and not kept[-1].text.strip():
            kept.pop()
        return tuple(kept)

    equations = {name: equations_of(name, docstring_of(node)[0]) for name, node in found.items()}
    stem = dotted.rpartition(".")[2]
    own = equations_of(stem, docstring_of(tree)[0])
    helpers = {
        name: node
        for name, node in found.items()
        if "." not in name and not equations[name] and not own and numbers_in(text, extent(node))
    }
    for name, node in found.items():
        docstring, place = docstring_of(node)
        body = [n for n in extent(node) if n not in place]
        if equations[name] and "." not in name:
            before = [n for helper in helpers.values() if uses(node, helper.name) for n in extent(helper)]
            body = before + body
        yield Object(f"{dotted}.{name}", name, path, docstring, place.start, equations[name], lines(body), dotted)
    docstring, place = docstring_of(tree)
    elsewhere = {n for name, node in found.items() if equations[name] and "." not in name for n in extent(node)}
    elsewhere |= {n for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for n in statement(node)}
    rest = [n for n in range(1, len(text)) if n not in place and n not in elsewhere]
    yield Object(dotted, stem, path, docstring, place.start, own, lines(rest), dotted)


def statement(node: ast.stmt) -> range:
    """Return the numbers of a statement's lines."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def uses(node: ast.AST, name: str) -> bool:
    """Return whether a name stands in a piece of code."""
    return any(isinstance(inner, ast.Name) and inner.id == name for inner in ast.walk(node))


def comment_of(line: str) -> str:
    """Return the comment at the end of a line."""
    return line.partition("  # ")[2]


def numbers_in(text: list[str], numbers: range) -> list[str]:
    """Return the numbers of equations in the comments of some lines."""
    return [match[1] for n in numbers for match in re.finditer(r"\((\d+|A)\)", comment_of(text[n]))]


@functools.cache
def read_package() -> dict[str, Object]:
    """Return all objects of the package by their dotted names."""
    return {found.dotted: found for path in sorted(PACKAGE.rglob("*.py")) for found in read_module(path)}


@functools.cache
def by_name() -> dict[str, Object]:
    """Return the objects that have equations, by name."""
    return {found.name: found for found in read_package().values() if found.equations}


@dataclasses.dataclass(frozen=True)
class Reference:
    """A place in a text, from `start` to `stop`, that names an equation."""

    start: int
    stop: int
    equation: Equation


def references(text: str, owners: list[Object]) -> list[Reference]:
    """Return the equations that a text names: those of `owners`, the first that has the number, unless it says whose.

    "equations (1) to (8) there" are those of the object named last before, if one was.
    """
    found = []
    names = by_name()
    folded = {name.lower(): one for name, one in names.items()}
    for match in REFERENCE.finditer(text):
        whose = owners
        if match["named"]:
            whose = [names[match["named"]]] if match["named"] in names else []
        elif match["owner"] and match["owner"] in names:
            whose = [names[match["owner"]]]
        elif match["owner"] and match[0].startswith(f"{match['owner']}'s ") and match["owner"].lower() in folded:
            whose = [folded[match["owner"].lower()]]
        elif match["foreign"]:
            before = [word for word in re.findall(r"\w+", text[: match.start()]) if word in names]
            whose = [names[before[-1]]] if before else []
        for group in ("first", "last", "of"):
            if match[group] and (one := next((o for o in whose if match[group] in o.equations), None)):
                around = int(group != "of")  # its brackets
                span = match.start(group) - around, match.end(group) + around
                if group == "of":
                    span = match.start("named"), match.end("of")
                found.append(Reference(*span, one.equations[match[group]]))
    return sorted(found, key=lambda r: r.start)


@functools.cache
def owners_of(one: Object) -> list[Object]:
    """Return whose equations a plain number means in an object's text and code: its own, or its module's."""
    everything = read_package()
    parts = one.dotted.split(".")
    outer = [everything.get(".".join(parts[:n])) for n in range(len(parts), 0, -1)]
    return [o for o in outer if o is not None and o.equations and o.dotted.startswith(one.module)]


@functools.cache
def code_references(one: Object, line: Line) -> list[Reference]:
    """Return the equations that the comment of a line names, with their places in the line."""
    comment = comment_of(line.text)
    shift = len(line.text) - len(comment)
    return [Reference(r.start + shift, r.stop + shift, r.equation) for r in references(comment, owners_of(one))]


def loose_numbers(one: Object) -> Iterator[tuple[Line, str]]:
    """Yield the numbers in an object's comments that belong to no equation."""
    for line in one.lines:
        known = {r.equation.number for r in code_references(one, line)}
        for match in re.finditer(r"\((\d+|A)\)", comment_of(line.text)):
            if match[1] not in known:
                yield line, match[1]
