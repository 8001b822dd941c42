"""Equations and code keep step: every number on a line of code stands in the derivation beside it, and back."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "numpygpt"


def tagged(path):
    """Yield (name, the equations of its docstring, the numbers on its lines) for each module, class and function."""
    source = path.read_text(encoding="utf-8")
    lines = source.split("\n")
    tree = ast.parse(source)
    of_the_module = equations_of(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and (equations := equations_of(node)):
            yield node.name, equations, numbers_on(lines[node.lineno - 1 : node.end_lineno]) - set(of_the_module)
    if of_the_module:
        yield path.stem, of_the_module, numbers_on(lines) & set(of_the_module)


def equations_of(node):
    return re.findall(r"\\tag\{(\w+)\}", ast.get_docstring(node) or "")


def numbers_on(lines):
    return {n for line in lines for n in re.findall(r"\((\d+|A)\)", line.partition("  # ")[2])}


CASES = [case for path in sorted(PACKAGE.rglob("*.py")) for case in tagged(path)]


@pytest.mark.parametrize(("name", "equations", "numbers"), CASES, ids=[case[0] for case in CASES])
def test_equations_and_lines_carry_the_same_numbers(name, equations, numbers):
    assert equations == [str(i + 1) for i in range(len(equations))] or equations == ["A"]
    if name != "AdamW":  # whose one line of code stands in Adam
        assert set(equations) == numbers


@pytest.mark.parametrize("path", sorted((PACKAGE / "layers").glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_every_layer_has_a_derivation_a_source_and_a_reading(path):
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        methods = {item.name for item in getattr(node, "body", []) if isinstance(item, ast.FunctionDef)}
        if isinstance(node, ast.ClassDef) and "backward" in methods and node.name != "Identity":
            text = ast.get_docstring(node)
            for part in (r"\tag{", "Source:", "**Reading.**"):
                assert part in text, f"{node.name} lacks {part}"
