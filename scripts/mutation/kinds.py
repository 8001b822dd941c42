"""The kinds of mistakes.

Each is a function that is shown every node of a syntax tree (Python's ast) and yields the mistakes that can be made
there, as pairs: a node, and what to put in its place. Its docstring says which: "a + b: a, b" is a sum replaced by one
of its terms.
"""

import ast
import itertools
import string
from collections.abc import Callable, Iterator

Change = tuple[ast.AST, ast.AST]
Kind = Callable[[ast.AST], Iterator[Change]]
KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    """Add a function to the kinds, under its name: `drop_term` as "drop term"."""
    KINDS[function.__name__.replace("_", " ")] = function
    return function


def negative(x: ast.expr) -> ast.expr:
    """Return -x."""
    return ast.UnaryOp(ast.USub(), x)


def children_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes just below a node that may be changed: no statement, no annotation, no f-string."""
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
    """Name the letters of an einsum a, b, c, ... as they come, so that "ij,j->i" and "xy,y->x" are the same."""
    order = dict.fromkeys(filter(str.isalpha, notation))
    return notation.translate(str.maketrans("".join(order), string.ascii_lowercase[: len(order)]))


def notations(notation: str) -> Iterator[str]:
    """Yield an einsum with two letters of a term swapped, with one replaced by another, with its operands exchanged."""
    terms = notation.replace("->", ",").split(",")
    letters = sorted(set(filter(str.isalpha, notation)))
    for i, term in enumerate(terms):
        own = [x for x in letters if x in term]
        swaps = [str.maketrans(a + b, b + a) for a, b in itertools.combinations(own, 2)]
        renames = [str.maketrans(a, b) for a in own for b in letters if b not in own]
        for table in (*swaps, *renames):
            changed = [*terms[:i], term.translate(table), *terms[i + 1 :]]
            inputs, output = ",".join(changed[:-1]), changed[-1]
            if all(x in inputs for x in output):  # else einsum would refuse it
                yield f"{inputs}->{output}"
    if len(terms) == 3:
        yield f"{terms[1]},{terms[0]}->{terms[2]}"


@kind
def change_einsum(node: ast.AST) -> Iterator[Change]:
    """ "ij,j->i": "ji,j->i", "ii,j->i", ..., "j,ij->i"; but none that only renames the letters."""
    match node:
        case ast.Call(args=[ast.Constant(str(notation)) as constant, *_]) if name_of(node) == "einsum":
            different = {canonical(new): new for new in notations(notation)}
            different.pop(canonical(notation), None)
            yield from ((constant, ast.Constant(new)) for new in different.values())


@kind
def assign_instead_of_adding(node: ast.AST) -> Iterator[Change]:
    """a += b: a = b. Any other such operator too."""
    match node:
        case ast.AugAssign(target, _, value):
            yield node, ast.Assign([target], value, lineno=node.lineno)


@kind
def change_constant(node: ast.AST) -> Iterator[Change]:
    """2: 3. 0.5: 0.505. 0.0: 0.01. True: False."""
    match node:
        case ast.Constant(bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(int(value)):
            yield node, ast.Constant(value + 1)
        case ast.Constant(float(value)):
            yield node, ast.Constant(value * 1.01 if value else 0.01)


@kind
def skip_line(node: ast.AST) -> Iterator[Change]:
    """An assignment, a call, a whole loop: pass."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr | ast.For | ast.While):
        yield node, ast.Pass()


@kind
def drop_mask(node: ast.AST) -> Iterator[Change]:
    """np.where(m, a, b): a, b. a & b: a, b. a | b: a, b."""
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
    """np.f(x): x. np.maximum(x, y): x, y. x.reshape(...): x. layer.backward(x): x. with a: if True."""
    if isinstance(node, ast.With):
        yield node, ast.If(ast.Constant(True), node.body, [])
    for call in children_of(node):
        match call:
            case ast.Call() if isinstance(node, ast.Expr):
                pass  # a call whose result isn't used: skip_line's
            case ast.Call(ast.Attribute(x, "reshape" | "astype" | "transpose")):
                yield call, x
            case ast.Call(args=[x, y]) if name_of(call) in ("maximum", "minimum", "max", "min"):
                yield from ((call, x), (call, y))
            case ast.Call(args=[ast.Constant(), x, *_] | [x, *_]) if not isinstance(x, ast.Starred):
                yield call, x


@kind
def swap_elements(node: ast.AST) -> Iterator[Change]:
    """dq, dk, dv: (dk, dq, dv), (dq, dv, dk)."""
    match node:
        case ast.Tuple(elements, ast.Load() as ctx) | ast.Assign([ast.Tuple(elements, ctx)], ast.Attribute()):
            tuple_ = node if isinstance(node, ast.Tuple) else node.targets[0]
            for i in range(len(elements) - 1):
                swapped = [*elements[:i], elements[i + 1], elements[i], *elements[i + 2 :]]
                yield tuple_, ast.Tuple(swapped, ctx)


@kind
def force_condition(node: ast.AST) -> Iterator[Change]:
    """if a: if True, if False. a and b: b, a."""
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
