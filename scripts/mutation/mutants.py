"""The mutants: copies of a file in which one function has one mistake.

A function's syntax tree is changed, written out as source and changed back, for each mistake of each kind in turn.
"""

import ast
import contextlib
import dataclasses
import textwrap
from collections.abc import Collection, Iterator
from typing import NamedTuple

from mutation.kinds import KINDS, children_of
from mutation.scope import MODULES, ROOT


class Key(NamedTuple):
    """What a mutant is known by in the list of equivalent ones: no line number, no layout."""

    module: str
    function: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.module}, {self.function}: {self.old} -> {self.new}"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One mistake in one function: its line before and after, and the whole file after."""

    module: str
    function: str
    line: int
    kind: str
    old: str
    new: str
    source: str

    @property
    def key(self) -> Key:
        """What it is known by."""
        return Key(self.module, self.function, self.old, self.new)

    def __str__(self) -> str:
        return f"{MODULES[self.module].relative_to(ROOT)}:{self.line} {self.kind}: {self.old} -> {self.new}"


class FoldNegatives(ast.NodeTransformer):
    """Make -1, which is the minus of 1 in a tree, one constant: the next integer is 0 then, not -2."""

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """Fold a minus in front of a number."""
        self.generic_visit(node)
        match node:
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
                return ast.copy_location(ast.Constant(-value), node)
        return node


def parse(source: str) -> ast.Module:
    """Return the tree of a source, with negative numbers as constants."""
    return FoldNegatives().visit(ast.parse(source))


class Swap(ast.NodeTransformer):
    """Put one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        """Return the new node for the old one."""
        return self.new if node is self.old else self.generic_visit(node)


@contextlib.contextmanager
def swapped(tree: ast.AST, old: ast.AST, new: ast.AST) -> Iterator[None]:
    """Have a node of the tree replaced for a while."""
    Swap(old, new).visit(tree)
    yield
    Swap(new, old).visit(tree)


def functions_of(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions and methods of a tree with their dotted names; no function inside another."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions_of(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node


def statements_of(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements in order, with those inside an if, a loop, a with or a try; no docstring and no raise."""
    for statement in body:
        match statement:
            case ast.Expr(ast.Constant()) | ast.Raise():
                continue
        yield statement
        for part in ("body", "orelse"):
            yield from statements_of(getattr(statement, part, []))


def nodes_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it that may be changed, down to the statements inside it, which come on their own."""
    yield node
    for child in children_of(node):
        yield from nodes_of(child)


def header(statement: ast.AST) -> str:
    """Return a statement in one line: of an if or a for, the line that ends in a colon."""
    return ast.unparse(statement).split("\n")[0]


def mutants_of(module: str, source: str, functions: Collection[str]) -> Iterator[Mutant]:
    """Yield all mutants of the functions (and methods) of these names in a module's source."""
    lines = source.split("\n")
    for name, function in functions_of(parse(source)):
        if function.name not in functions:
            continue
        seen = {ast.unparse(function)}  # two mistakes that come to the same are one mutant
        for statement in statements_of(function.body):
            old = header(statement)
            changes = [
                (kind, change)
                for node in nodes_of(statement)
                for kind, changes_of in KINDS.items()
                for change in changes_of(node)
            ]
            for kind, (target, replacement) in changes:
                with swapped(function, target, replacement):
                    text = ast.unparse(function)
                    new = header(replacement if target is statement else statement)
                if text not in seen:
                    seen.add(text)
                    changed = textwrap.indent(text, " " * function.col_offset).split("\n")
                    whole = [*lines[: function.lineno - 1], *changed, *lines[function.end_lineno :]]
                    line = getattr(target, "lineno", statement.lineno)
                    yield Mutant(module, name, line, kind, old, new, "\n".join(whole))


def make_mutants(modules: Collection[str], scope: dict[str, set[str]]) -> dict[str, list[Mutant]]:
    """Return the mutants of each module that has any."""
    every = {name: list(mutants_of(name, MODULES[name].read_text("utf-8"), scope[name])) for name in modules}
    return {name: mutants for name, mutants in every.items() if mutants}
