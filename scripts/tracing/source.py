"""What a line of a layer says of itself: its equations' numbers, and the arrays that it makes or changes."""

import ast
import functools
import inspect
import re
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from book.source import PACKAGE, Equation, by_name

NUMBER = re.compile(r"\((\d+|A)\)")


class Target(NamedTuple):
    """An array that a statement makes or changes: `dv[..., keys, :]` is a part of `dv`."""

    name: str
    whole_name: str
    code: tuple[CodeType, CodeType]  # evaluate both in the function's frame


class Statement:
    """A statement without a body."""

    def __init__(self, path: Path, node: ast.stmt, lines: list[str]):
        self.path, self.line, self.last_line = path, node.lineno, node.end_lineno or node.lineno
        text = lines[self.line - 1 : self.last_line]
        comment = text[-1].partition("  # ")[2]
        self.code = inspect.cleandoc("\n".join(text))
        self.numbers = tuple(NUMBER.findall(comment))
        self.gradient = found[1] if (found := re.search(r"\), (d[a-z])$", comment)) else None  # "(5), dh": this is dh
        self.returns = isinstance(node, ast.Return)
        self.in_place = isinstance(node, ast.AugAssign | ast.Expr)
        called = {call.func.attr for call in ast.walk(node) if is_numpy(call)}  # type: ignore[attr-defined]
        self.makes_room = bool(called & {"empty_like", "zeros_like"})  # which is filled by the statements that follow
        self.targets = tuple(map(target, changed(node)))


def changed(node: ast.stmt) -> list[ast.expr]:
    """Return what a statement assigns or changes, or returns, if that has names."""
    if isinstance(node, ast.Assign):
        found = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        found = [node.target]
    elif isinstance(node, ast.Return) and node.value is not None:
        found = [node.value]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and is_numpy(node.value):
        outs = [keyword.value for keyword in node.value.keywords if keyword.arg == "out"]
        found = outs or [e.value if isinstance(e, ast.Subscript) else e for e in node.value.args[:1]]  # as np.copyto's
    else:
        found = []
    parts = [part for e in found for part in (e.elts if isinstance(e, ast.Tuple) else [e])]
    if isinstance(node, ast.Return) and not all(isinstance(e, ast.Name) for e in parts):
        return []
    return [e for e in parts if isinstance(e, ast.Name | ast.Attribute | ast.Subscript)]


def is_numpy(node: ast.AST) -> bool:
    """Whether this is a call of a function of NumPy."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith("np.")


def target(node: ast.expr) -> Target:
    """Return the target that an expression is."""
    whole = node.value if isinstance(node, ast.Subscript) else node
    name, whole_name = ast.unparse(node), ast.unparse(whole)
    code = compile(name, "<target>", "eval"), compile(whole_name, "<target>", "eval")
    return Target(name.removeprefix("self."), whole_name.removeprefix("self."), code)


@functools.cache
def statements(path: Path) -> dict[int, Statement]:
    """Return the statement that stands on each line of a file."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    simple = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.stmt) and not hasattr(n, "body")]
    found = [Statement(path, node, lines) for node in simple]
    return {line: statement for statement in found for line in range(statement.line, statement.last_line + 1)}


@functools.cache
def watched(code: CodeType) -> dict[int, Statement]:
    """Return the statements of the file of a function: a module's forward or backward, or one with numbered lines.

    Of any other function, and outside of the package, there are none.
    """
    if not code.co_filename.startswith(str(PACKAGE)):
        return {}
    found = statements(Path(code.co_filename))
    has_a_name = "<" not in code.co_qualname  # no comprehension or lambda, which is part of a line
    own = {line for _, _, line in code.co_lines() if line in found}
    if code.co_name in ("forward", "backward") or (has_a_name and any(found[line].numbers for line in own)):
        return found
    return {}


@functools.cache
def equation_of(number: str, path: Path, function: str) -> Equation | None:
    """Return the equation that a line carries in a function of a file, given its qualified name.

    It is the class's own; if that has none of this number, its module's, and then that of any class of the file.
    """
    here = {name: one for name, one in by_name().items() if one.path == path}
    order = [function.partition(".")[0], path.stem, *here]
    return next(
        (here[name].equations[number] for name in order if name in here and number in here[name].equations), None
    )
