"""Change every backward, one small mistake at a time, and see that the tests notice each.

A mutant is the package with one change: a term dropped, a sign flipped, two letters of an einsum swapped, a line
skipped. The tests of its module are run on it. If they fail, the mutant is killed; if they pass, they would have passed
on that mistake too, and it is reported: `file:line kind: old line -> new line`. A change that makes no difference is no
mistake; each one stands in tests/equivalent_mutants.toml with the reason, and isn't run.

    python scripts/mutate_gradients.py                  every backward, and the optimiser
    python scripts/mutate_gradients.py --forward        every forward
    python scripts/mutate_gradients.py --only norm      of one module

Why no tool that exists: mutmut 3.8 has a fixed list of operators, none of which drops a term or reads an einsum. Cosmic
Ray 8.7 takes one's own, but chooses by file and line, not by function, and starts Python anew for every mutant: 2 to
3 s of imports, where a fork of a process that has collected the tests needs a fraction of one. (Both read, not timed.)
"""

import argparse
import ast
import collections
import contextlib
import dataclasses
import gc
import importlib
import inspect
import itertools
import operator
import os
import signal
import string
import sys
import textwrap
import time
import tomllib
import types
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from numpygpt.cli import fail, run

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.toml"
MODULES = {path.stem: path for path in sorted((ROOT / "numpygpt" / "layers").glob("[a-z]*.py"))}
MODULES |= {name: ROOT / "numpygpt" / f"{name}.py" for name in ("model", "special", "optim", "einsum")}

# The functions that are changed: those of one name, and in some modules what they compute with.
BACKWARD = {name: {"backward"} for name in MODULES} | {
    "attention": {"backward", "split_heads", "merge_heads", "fold", "unfold"},
    "position": {"backward", "rotate", "pairs"},
    "special": {"normal_pdf", "normal_cdf"},
    "optim": {"step", "update", "pieces", "clip_grad_norm", "finite_squared_norm", "cosine_schedule"},
}
FORWARD = {name: {"forward"} for name in MODULES} | {
    "activation": {"forward", "sigmoid"},
    "attention": {"forward", "check_mask"},
    "position": {"forward", "check_positions"},
    "einsum": {"spell_out", "lower", "einsum"},
}

# The tests run: tests/test_<module>.py, and of layers test_refusals, or instead these.
MORE_TESTS = {"special": ["activation"], "optim": [], "einsum": []}
MORE_TESTS |= {name: ["refusals", "device"] for name in ("cross_entropy", "dropout")}  # what NumPy alone lets pass
# But not these, which try many models: what they kill dies by a smaller one beside them.
SLOW = {"model": ["every_combination", "parameter_by_parameter", "dtype_of"]}
SLOW |= {name: ["device.py::test_training"] for name in ("cross_entropy", "dropout")}


# The kinds of mistakes. Each is shown every node of a function's syntax tree, and yields what to put in whose place.

Change = tuple[ast.AST, ast.AST]
KINDS: dict[str, Callable[[ast.AST], Iterator[Change]]] = {}


def kind(function: Callable[[ast.AST], Iterator[Change]]) -> Callable[[ast.AST], Iterator[Change]]:
    """Add a kind, under its function's name."""
    KINDS[function.__name__.replace("_", " ")] = function
    return function


def negative(x: ast.expr) -> ast.expr:
    """Return the tree of -x."""
    return ast.UnaryOp(ast.USub(), x)


def children_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes just below a node: no statement, no annotation, no f-string."""
    for name, field in ast.iter_fields(node):
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.stmt | ast.JoinedStr) and name != "annotation":
                yield child


def name_of(node: ast.AST) -> str:
    """Return the last part of a dotted name, or of the name of what is called: "sum" for `np.sum(x)`."""
    match node:
        case ast.Call(func=function):
            return name_of(function)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


@kind
def drop_term(node: ast.AST) -> Iterator[Change]:
    """a + b: a, b. a - b: a, -b."""
    match node:
        case ast.BinOp(left, ast.Add(), right):
            yield from ((node, left), (node, right))
        case ast.BinOp(left, ast.Sub(), right):
            yield from ((node, left), (node, negative(right)))
        case ast.Call(args=[left, right]) if name_of(node) in ("add", "subtract"):
            yield from ((left, ast.Constant(0.0)), (right, ast.Constant(0.0)))


@kind
def drop_factor(node: ast.AST) -> Iterator[Change]:
    """a * b: a, b. a / b: a, 1 / b. a ** b: a."""
    match node:
        case ast.BinOp(left, ast.Mult(), right):
            yield from ((node, left), (node, right))
        case ast.BinOp(left, ast.Div() | ast.FloorDiv() as op, right):
            yield from ((node, left), (node, ast.BinOp(ast.Constant(1), op, right)))
        case ast.BinOp(left, ast.Pow(), _):
            yield node, left


@kind
def flip_sign(node: ast.AST) -> Iterator[Change]:
    """a + b: a - b. a += b: a -= b. -a: a. A whole product, contraction or result x: -x."""
    opposite = {ast.Add: ast.Sub(), ast.Sub: ast.Add()}
    match node:
        case ast.BinOp(left, ast.Add() | ast.Sub() as op, right):
            yield node, ast.BinOp(left, opposite[type(op)], right)
        case ast.AugAssign(target, ast.Add() | ast.Sub() as op, value):
            yield node, ast.AugAssign(target, opposite[type(op)], value)
        case ast.AugAssign(_, ast.Mult() | ast.Div(), value):
            yield value, negative(value)
        case ast.UnaryOp(ast.USub(), operand):
            yield node, operand
        case ast.Constant(int() | float() as value) if value < 0:
            yield node, ast.Constant(-value)
        case ast.Call(ast.Attribute(np, "add" | "subtract" as name, ctx), args, keywords):
            yield node, ast.Call(ast.Attribute(np, "subtract" if name == "add" else "add", ctx), args, keywords)
    # A factor of a product, or a term of a sum, needs no negation of its own: it would repeat another's.
    if isinstance(node, ast.Assign | ast.Return | ast.Tuple | ast.Call | ast.keyword | ast.IfExp | ast.Attribute):
        for child in children_of(node):
            match child:
                case ast.BinOp(_, ast.Mult() | ast.Div(), _):
                    yield child, negative(child)
                case ast.Call() if name_of(child) in ("einsum", "exp", "sum", "mean", "backward", "forward", "rotate"):
                    yield child, negative(child)
                case ast.Name() if isinstance(node, ast.Return | ast.IfExp):
                    yield child, negative(child)


@kind
def swap_operands(node: ast.AST) -> Iterator[Change]:
    """a - b: b - a. a / b: b / a."""
    match node:
        case ast.BinOp(left, ast.Sub() | ast.Div() | ast.FloorDiv() | ast.Mod() | ast.Pow() as op, right):
            yield node, ast.BinOp(right, op, left)
        case ast.AugAssign(target, ast.Sub() | ast.Div() as op, value):
            yield node, ast.Assign([target], ast.BinOp(value, op, target), lineno=node.lineno)
        case ast.Call(function, [left, right], keywords) if name_of(node) == "subtract":
            yield node, ast.Call(function, [right, left], keywords)


def canonical(notation: str) -> str:
    """Rename the letters of an einsum in the order in which they come: two that differ in names alone are the same."""
    order = dict.fromkeys(filter(str.isalpha, notation))
    return notation.translate(str.maketrans("".join(order), string.ascii_lowercase[: len(order)]))


def notations(notation: str) -> Iterator[str]:
    """Yield an einsum with two letters of a term swapped, one replaced by another, or its operands exchanged."""
    terms = notation.replace("->", ",").split(",")
    letters = sorted(set(filter(str.isalpha, notation)))
    for i, term in enumerate(terms):
        own = [x for x in letters if x in term]
        swaps = [str.maketrans(a + b, b + a) for a, b in itertools.combinations(own, 2)]
        renames = [str.maketrans(a, b) for a in own for b in letters if b not in own]
        for table in (*swaps, *renames):
            changed = [*terms[:i], term.translate(table), *terms[i + 1 :]]
            inputs, output = ",".join(changed[:-1]), changed[-1]
            if all(x in inputs for x in output):
                yield f"{inputs}->{output}"
    if len(terms) == 3:
        yield f"{terms[1]},{terms[0]}->{terms[2]}"


@kind
def change_einsum(node: ast.AST) -> Iterator[Change]:
    """Swap or replace letters, transpose the output, exchange the operands."""
    match node:
        case ast.Call(args=[ast.Constant(str(notation)) as constant, *_]) if name_of(node) == "einsum":
            different = {canonical(new): new for new in notations(notation)}
            different.pop(canonical(notation), None)
            yield from ((constant, ast.Constant(new)) for new in different.values())


@kind
def assign_instead_of_adding(node: ast.AST) -> Iterator[Change]:
    """a += b: a = b."""
    match node:
        case ast.AugAssign(target, _, value):
            yield node, ast.Assign([target], value, lineno=node.lineno)


@kind
def change_constant(node: ast.AST) -> Iterator[Change]:
    """2: 3. 0.5: 0.505. True: False."""
    match node:
        case ast.Constant(bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(int(value)):
            yield node, ast.Constant(value + 1)
        case ast.Constant(float(value)):
            yield node, ast.Constant(value * 1.01 if value else 0.01)


@kind
def skip_line(node: ast.AST) -> Iterator[Change]:
    """Any statement but a return, an if and a docstring: pass."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr | ast.For | ast.While):
        yield node, ast.Pass()


@kind
def drop_mask(node: ast.AST) -> Iterator[Change]:
    """np.where(m, a, b): a, b. a & b: a, b."""
    match node:
        case ast.Call(args=[_, a, b]) if name_of(node) == "where":
            yield from ((node, a), (node, b))
        case ast.BinOp(a, ast.BitAnd() | ast.BitOr(), b):
            yield from ((node, a), (node, b))


COMPARISONS: dict[type[ast.cmpop], list[type[ast.cmpop]]] = {
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}


@kind
def change_comparison(node: ast.AST) -> Iterator[Change]:
    """a < b: a <= b, a >= b. a == b: a != b. not a: a."""
    match node:
        case ast.Compare(left, ops, comparators):
            for i, op in enumerate(ops):
                for other in COMPARISONS[type(op)]:
                    yield node, ast.Compare(left, [*ops[:i], other(), *ops[i + 1 :]], comparators)
        case ast.UnaryOp(ast.Not(), operand):
            yield node, operand


@kind
def unwrap(node: ast.AST) -> Iterator[Change]:
    """np.f(x): x. np.maximum(x, y): x, y. x.reshape(...): x. layer.backward(x): x. with a: its body."""
    if isinstance(node, ast.With):
        yield node, ast.If(ast.Constant(True), node.body, [])
    for call in children_of(node):
        match call:
            case ast.Call() if isinstance(node, ast.Expr):
                pass  # skip_line's
            case ast.Call(ast.Attribute(x, "reshape" | "astype" | "transpose")):
                yield call, x
            case ast.Call(args=[x, y]) if name_of(call) in ("maximum", "minimum", "max", "min"):
                yield from ((call, x), (call, y))
            case ast.Call(args=[ast.Constant(), x, *_] | [x, *_]) if not isinstance(x, ast.Starred):
                yield call, x


@kind
def swap_elements(node: ast.AST) -> Iterator[Change]:
    """A tuple's neighbours: (dq, dk, dv): (dk, dq, dv), (dq, dv, dk)."""
    match node:
        case ast.Tuple(elements, ast.Load() as ctx) | ast.Assign([ast.Tuple(elements, ctx)], ast.Attribute()):
            tuple_ = node if isinstance(node, ast.Tuple) else node.targets[0]
            for i in range(len(elements) - 1):
                swapped = [*elements[:i], elements[i + 1], elements[i], *elements[i + 2 :]]
                yield tuple_, ast.Tuple(swapped, ctx)


@kind
def force_condition(node: ast.AST) -> Iterator[Change]:
    """if a: if True, if False. a and b: a, b."""
    match node:
        case ast.If(test=test) | ast.IfExp(test=test):
            yield from ((test, ast.Constant(True)), (test, ast.Constant(False)))
        case ast.comprehension(ifs=tests):
            for test in tests:
                yield from ((test, ast.Constant(True)), (test, ast.Constant(False)))
        case ast.BoolOp(op, values):
            for i in range(len(values)):
                rest = [*values[:i], *values[i + 1 :]]
                yield node, rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)


# Making the mutants

Key = tuple[str, str, str, str]  # module, function, line before, line after


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one function: a line before and after, and the whole file after."""

    module: str
    function: str
    line: int
    kind: str
    old: str
    new: str
    source: str

    @property
    def key(self) -> Key:
        """What it is known by in the list of equivalent ones: no line number, no layout."""
        return self.module, self.function, self.old, self.new

    def __str__(self) -> str:
        return f"{MODULES[self.module].relative_to(ROOT)}:{self.line} {self.kind}: {self.old} -> {self.new}"


class FoldNegatives(ast.NodeTransformer):
    """Make the `-1` of a source one constant: it is changed to 0, not to -(1 + 1)."""

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """Fold a minus in front of a number."""
        self.generic_visit(node)
        match node:
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
                return ast.copy_location(ast.Constant(-value), node)
        return node


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
    """Yield the functions and methods of a module, with their dotted names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions_of(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node


def statements_of(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield all statements in order, those inside others too; no docstring, and nothing that is raised."""
    for statement in body:
        match statement:
            case ast.Expr(ast.Constant()) | ast.Raise():
                continue
        yield statement
        for part in ("body", "orelse"):
            yield from statements_of(getattr(statement, part, []))


def nodes_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it, but of a statement nothing that is inside another."""
    yield node
    for child in children_of(node):
        yield from nodes_of(child)


def header(statement: ast.AST) -> str:
    """Return a statement in one line: an if or a for without what is inside it."""
    return ast.unparse(statement).split("\n")[0]


def mutants_of(module: str, source: str, functions: Collection[str]) -> Iterator[Mutant]:
    """Yield all mutants of some functions of a module."""
    lines = source.split("\n")
    for path, function in functions_of(FoldNegatives().visit(ast.parse(source))):
        if function.name not in functions:
            continue
        seen = {ast.unparse(function)}
        for statement in statements_of(function.body):
            old = header(statement)
            changes = [(name, c) for node in nodes_of(statement) for name, kind in KINDS.items() for c in kind(node)]
            for kind_name, (target, replacement) in changes:
                with swapped(function, target, replacement):
                    text = ast.unparse(function)
                    new = header(replacement if target is statement else statement)
                if text not in seen:
                    seen.add(text)
                    changed = textwrap.indent(text, " " * function.col_offset).split("\n")
                    whole = [*lines[: function.lineno - 1], *changed, *lines[function.end_lineno :]]
                    line = getattr(target, "lineno", statement.lineno)
                    yield Mutant(module, path, line, kind_name, old, new, "\n".join(whole))


def make(modules: Collection[str], scope: dict[str, set[str]]) -> dict[str, list[Mutant]]:
    """Return the mutants of each module that has any."""
    every = {name: list(mutants_of(name, MODULES[name].read_text("utf-8"), scope[name])) for name in modules}
    return {name: mutants for name, mutants in every.items() if mutants}


# Those that make no difference


def show(key: Key) -> str:
    """Return the key of a mutant for a message."""
    return "{}, {}: {} -> {}".format(*key)


def normal(line: str) -> str:
    """Return a line as `header` writes it, whatever its quotes and spaces."""
    tree = FoldNegatives().visit(ast.parse(f"{line} pass" if line.endswith(":") else line))
    return header(tree)


def equivalents(path: Path) -> dict[Key, str]:
    """Return the reasons in the list of equivalent mutants, by what each is known by."""
    reasons: dict[Key, str] = {}
    for entry in tomllib.loads(path.read_text("utf-8")).get("mutant", []):
        if missing := {"module", "function", "old", "new", "reason"} - entry.keys():
            raise ValueError(f"an entry has no {min(missing)!r}: {entry}")
        key = entry["module"], entry["function"], normal(entry["old"]), normal(entry["new"])
        if key in reasons:
            raise ValueError(f"an entry stands twice: {show(key)}")
        if not entry["reason"].strip():
            raise ValueError(f"an entry has no reason: {show(key)}")
        reasons[key] = entry["reason"]
    return reasons


def stale(reasons: Collection[Key], mutants: dict[str, list[Mutant]], scope: dict[str, set[str]]) -> list[Key]:
    """Return the entries for these modules and functions that no mutant answers to."""
    made = {m.key for ms in mutants.values() for m in ms}
    return [k for k in reasons if k[0] in mutants and k[1].split(".")[-1] in scope[k[0]] and k not in made]


# Running the tests

FAULT = 3  # exit status of a fork that could not test its mutant


def code_of(source: str, filename: str, function: str) -> types.CodeType:
    """Compile a file, run nothing of it, and return the code of one function."""
    inside = [compile(source, filename, "exec")]
    while inside:
        code = inside.pop()
        if code.co_qualname == function:
            return code
        inside += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    raise LookupError(function)


def apply(mutant: Mutant) -> None:
    """Give the function, wherever it was imported and whatever checks its types, the mutant's code."""
    path = MODULES[mutant.module]
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    function = inspect.unwrap(operator.attrgetter(mutant.function)(importlib.import_module(name)))
    function.__code__ = code_of(mutant.source, str(path), mutant.function)


@dataclasses.dataclass
class Fork:
    """A process that tests a mutant, and the time by which it should have ended."""

    mutant: Mutant
    deadline: float


class Runner:
    """A pytest plugin: when all tests are collected, run them on each mutant in a fork, instead of once here.

    So the tests are imported once for all, and a mutant costs no more than its tests up to the first that fails.
    """

    def __init__(self, mutants: list[Mutant], jobs: int):
        self.mutants, self.jobs = mutants, jobs
        self.failing = ""  # a module whose tests fail without a mutant
        self.fates: list[tuple[Mutant, str]] = []
        self.tests: dict[str, list[Any]] = {}

    def pytest_runtestloop(self, session: Any) -> bool:
        """Find out how long the tests take, then run them on every mutant."""
        quick_first = sorted(session.items, key=lambda test: getattr(test.obj, "is_hypothesis_test", False))
        modules = dict.fromkeys(m.module for m in self.mutants)
        self.tests = {name: [test for test in quick_first if is_test_of(name, test.nodeid)] for name in modules}
        gc.freeze()
        tqdm.monitor_interval = 0  # no thread, as this process forks
        limits: dict[str, float] = {}
        for module in tqdm(modules, "without a mutant", leave=False):
            start = time.monotonic()
            if os.waitpid(self.fork(module), 0)[1]:
                self.failing = module
                return True
            limits[module] = 30 + 10 * (time.monotonic() - start)
        for mutant, fate in tqdm(self.run(limits), "mutants", len(self.mutants)):
            self.fates.append((mutant, fate))
            if fate == "survived":
                tqdm.write(f"survived: {mutant}", sys.stderr)
        return True

    def run(self, limits: dict[str, float]) -> Iterator[tuple[Mutant, str]]:
        """Test some mutants at a time; yield each with its fate."""
        waiting, running = self.mutants[::-1], dict[int, Fork]()
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    mutant = waiting.pop()
                    process = self.fork(mutant.module, mutant)
                    running[process] = Fork(mutant, time.monotonic() + limits[mutant.module])
                for process, fork in list(running.items()):
                    ended, status = os.waitpid(process, os.WNOHANG)
                    if ended:
                        del running[process]
                        yield fork.mutant, self.fate(fork.mutant, os.waitstatus_to_exitcode(status))
                    elif time.monotonic() > fork.deadline:
                        del running[process]
                        end(process)
                        yield fork.mutant, "hung"
                time.sleep(0.005)
        finally:
            for process in running:
                end(process)

    def fate(self, mutant: Mutant, status: int) -> str:
        """Return what became of a mutant whose process has ended (by a signal, if the status is negative)."""
        if status == FAULT:
            raise RuntimeError(f"this tool can't test {mutant}")
        return "killed" if status else "survived"

    def fork(self, module: str, mutant: Mutant | None = None) -> int:
        """Start the tests of a module in a process of their own; return its id."""
        process = os.fork()
        if process:
            return process
        status = FAULT
        try:
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            if mutant:
                apply(mutant)
            tests = self.tests[module]
            for test, following in itertools.pairwise([*tests, None]):
                test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            status = 0 if tests else FAULT
        finally:
            os._exit(status)

    def pytest_exception_interact(self, node: Any) -> None:
        """End this process, a fork, at the first test that fails."""
        if self.tests:  # else it's a file that can't be collected
            os._exit(1)


def end(process: int) -> None:
    """Kill a fork."""
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def test_files(module: str) -> list[str]:
    """Return the files that test a module."""
    return [f"tests/test_{name}.py" for name in (module, *MORE_TESTS.get(module, ["refusals"]))]


def is_test_of(module: str, test: str) -> bool:
    """Return whether a test is one of those run for a module."""
    return test.split("::")[0] in test_files(module) and not any(part in test for part in SLOW.get(module, []))


def fates_of(mutants: list[Mutant], jobs: int) -> list[tuple[Mutant, str]]:
    """Return the fate of each mutant: killed, survived or hung. Raise ValueError if the tests fail without any."""
    files = dict.fromkeys(file for m in mutants for file in test_files(m.module))
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for name in [name for name in sys.modules if name.split(".")[0] == "numpygpt"]:
        del sys.modules[name]  # imported by this script, without the tests' checks of types
    try:
        import pytest
    except ImportError as error:
        raise ValueError('the tests need pytest: pip install -e ".[test]"') from error
    # From Python 3.12 on a fork beside threads is warned of; NumPy's OpenBLAS ends its own before one.
    warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
    plugin = Runner(mutants, jobs)
    quiet = ["--override-ini=addopts=", "-qq", "--tb=native", "--disable-warnings", "--capture=no"]
    status = pytest.main([*quiet, "-p", "no:cacheprovider", *files], plugins=[plugin])
    if plugin.failing:
        raise ValueError(f"tests fail without a mutant: run pytest {' '.join(test_files(plugin.failing))}")
    if status == pytest.ExitCode.INTERRUPTED and plugin.tests:
        raise KeyboardInterrupt
    if len(plugin.fates) < len(mutants):
        raise ValueError(f"the tests can't be run: see pytest {' '.join(files)}")
    return plugin.fates


# The script


def main() -> int:
    """Read the flags, make the mutants and test them; return 1 if one survives."""
    parser = argparse.ArgumentParser(
        description="Change every backward by one small mistake at a time, and see that the tests notice each.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--forward", action="store_true", help="change every forward instead of backward and optimiser")
    add("--only", nargs="+", default=list(MODULES), metavar="MODULE", help=f"some of: {', '.join(MODULES)}")
    add("--list", action="store_true", help="print the mutants and test none")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="tests run at a time (default: one on each processor)")
    args = parser.parse_args()
    if unknown := [name for name in args.only if name not in MODULES]:
        fail(f"there is no module {unknown[0]!r} to change; choose from {', '.join(MODULES)}")
    if args.jobs < 1:
        fail(f"--jobs must be at least 1, not {args.jobs}")
    try:
        reasons = equivalents(EQUIVALENT)
    except (ValueError, SyntaxError) as error:
        fail(f"{EQUIVALENT.name}: {error}")
    scope = FORWARD if args.forward else BACKWARD
    mutants = make(dict.fromkeys(args.only), scope)
    if not mutants:
        fail(f"no function to change in {', '.join(args.only)}")
    if old := stale(reasons, mutants, scope):
        fail(f"{EQUIVALENT.name}: an entry is no mutant any more: {show(old[0])}")
    if args.list:
        for mutant in itertools.chain(*mutants.values()):
            print(f"{mutant}  (equivalent: {reasons[mutant.key]})" if mutant.key in reasons else mutant)
        return 0
    if not hasattr(os, "fork"):
        fail("this platform can't fork a process; run it on Linux or macOS, or use --list")
    try:
        fates = fates_of([m for ms in mutants.values() for m in ms if m.key not in reasons], args.jobs)
    except ValueError as error:
        fail(error)
    report(mutants, reasons, fates)
    return 1 if any(fate == "survived" for _, fate in fates) else 0


def report(mutants: dict[str, list[Mutant]], reasons: Collection[Key], fates: list[tuple[Mutant, str]]) -> None:
    """Print the numbers of each module's mutants and of all, and then the survivors."""
    counts = {name: collections.Counter("equivalent" for m in ms if m.key in reasons) for name, ms in mutants.items()}
    for mutant, fate in fates:
        counts[mutant.module][fate] += 1
    total = sum(counts.values(), collections.Counter[str]())
    print(f"{'':14} {'made':>6} {'killed':>7} {'survived':>9} {'equivalent':>11}")
    for name, n in (*counts.items(), ("all", total)):
        print(f"{name:14} {n.total():6} {n['killed'] + n['hung']:7} {n['survived']:9} {n['equivalent']:11}")
    if total["hung"]:
        print(f"of those killed, {total['hung']} by the time limit")
    for mutant in sorted((m for m, fate in fates if fate == "survived"), key=lambda m: (m.module, m.line)):
        print(mutant)


if __name__ == "__main__":
    run(main)
