"""Equations as functions, their values, and the claims among them that SymPy proves.

A class of equations (the package `equations` has them all) is a namespace, not something to make objects of. Each of
its functions is one quantity. It takes the quantities it is computed from by their names, its docstring is the LaTeX
it stands for, and its body is the same in Python, for symbols and numbers alike. One without a docstring is what the
text says between two equations. A decorator makes a claim: this quantity is a gradient, a derivative, or equal to
another one. The rest are definitions.
"""

import inspect
import math
from collections import defaultdict

import numpy as np
from sympy import (
    Add,
    Dummy,
    Expr,
    Float,
    Function,
    Mul,
    Pow,
    Symbol,
    exp,
    expand,
    numer,
    oo,
    ordered,
    rem,
    sympify,
    together,
)


def table(formula, *sizes):
    """Return the array of formula(i, j, ...), the indices counted from 0."""
    array = np.empty(sizes, object)
    for index in np.ndindex(*sizes):
        array[index] = formula(*index)
    return array


def delta(i, j):
    return int(i == j)


def quantities(equations):
    """Return the functions that are quantities, by name, those inherited first, in the order they are written in."""
    functions = {name: f for c in reversed(equations.__mro__) for name, f in vars(c).items() if inspect.isfunction(f)}
    functions.pop("code", None)
    return functions


def claims(equations):
    """Return the names of the quantities that claim something."""
    return [name for name, formula in quantities(equations).items() if hasattr(formula, "expected_from")]


def cases(equations):
    """Return what the equations take as given, in each case."""
    return {name: {**equations.given, **case} for name, case in getattr(equations, "cases", {"": {}}).items()}


def value(equations, name, known):
    """Return a quantity: a known one, or computed from those that its function names, which become known."""
    if name not in known:
        formula = getattr(equations, name)
        known[name] = formula(*[value(equations, given, known) for given in inspect.signature(formula).parameters])
    return known[name]


def claim(expected_from, *mentions):
    """Return a decorator that notes how to derive what a function states, and which quantities that mentions."""

    def note(formula):
        formula.expected_from, formula.mentions = expected_from, mentions
        return formula

    return note


def gradient(name, of=None, beside=()):
    r"""Claim $\partial L/\partial z$ for the named $z$, where $L = \langle\bar y, y\rangle$ with $\bar y$ of symbols.

    $z$ is made of symbols too: what lies before it has no part in its gradient. To prove one step out of many, `of`
    names the $y$ it ends with in place of the output, and `beside` what else it begins with; the chain rule does the
    rest.
    """

    def expected_from(equations, known):
        for start in (name, *beside):
            known[start] = symbols_for(start, equations, known)
        z, loss = known[name], 0
        for y in of or [equations.output]:
            if of:
                known["d" + y] = symbols_for(y, equations, known)
            loss += np.sum(known["d" + y] * value(equations, y, known))
        return derivatives(loss, z)

    return claim(expected_from, name, *beside, *(of or []))


def derivative(of, by, same=0):
    """Claim the derivatives of a quantity by another: all, or those whose elements share the first `same` indices."""

    def expected_from(equations, known):
        z = known[by] = symbols_for(by, equations, known)
        y, z = np.asarray(value(equations, of, known), object), np.asarray(z, object)
        rows = [derivatives(y[i], z[i[:same]]) for i in np.ndindex(*y.shape)]
        return np.stack(rows).reshape(y.shape + z.shape[same:])

    return claim(expected_from, of, by)


def same_as(name):
    """Claim that this is the named quantity, written differently."""
    return claim(lambda equations, known: value(equations, name, known), name)


def symbols_for(name, equations, known):
    """Return a quantity as independent symbols. Minus infinity stays: it is a constant."""
    if name in known:
        return known[name]
    like = np.asarray(value(equations, name, dict(known)), object)
    symbols = table(lambda *i: -oo if like[i] == -oo else Dummy(name, real=True), *like.shape)
    return symbols[()]


def derivatives(y, z):
    """Return the derivatives of the expression y by each element of z; by a constant it is 0."""
    z = np.asarray(z, object)
    return table(lambda *i: sympify(y).diff(z[i]) if z[i].is_Symbol else 0, *z.shape)


def remainder(equations, name, known):
    """Return what the named quantity states less what SymPy derives: zeros, if its claim is right."""
    known = {**known, **getattr(equations, "held", {})}
    derived = getattr(equations, name).expected_from(equations, known)
    stated = value(equations, name, known)
    assert np.shape(stated) == np.shape(derived), f"{name} has shape {np.shape(stated)}, not {np.shape(derived)}"
    return np.asarray(stated - derived, object)


def all_zero(expressions):
    """Whether every expression is identically 0: a proof."""
    return all(is_zero(sympify(e)) for e in expressions.flat)


def some_nonzero(expressions):
    """Whether one isn't 0 at random numbers: a disproof, which is more than a proof that isn't found."""
    return any(differs_from_zero(sympify(e)) for e in expressions.flat)


def is_zero(e):
    """Whether e is 0: exponentials and square roots become symbols, and the numerator must vanish.

    Of an exponential only e^(a + b) = e^a e^b and e^(na) = (e^a)^n are used, of a root g only g^2 = its base. So True
    is a proof; False could be a proof not found.
    """
    terms = {power: [t.as_coeff_Mul() for t in Add.make_args(expand(power.exp))] for power in e.atoms(exp)}
    denominator = math.lcm(*(factor.q for products in terms.values() for factor, _ in products))
    symbol = defaultdict(lambda: Dummy(positive=True))  # for e^(rest / denominator)
    e = e.xreplace({power: Mul(*[symbol[rest] ** (n * denominator) for n, rest in terms[power]]) for power in terms})
    bases = {p.base for p in e.atoms(Pow) if p.exp.is_Rational and not p.exp.is_Integer and not p.base.is_number}
    roots = {base: Dummy(positive=True) for base in bases}
    e = e.replace(lambda p: p.is_Pow and p.base in roots, lambda p: roots[p.base] ** (2 * p.exp))
    e = numer(together(e))
    for base, root in roots.items():
        e = rem(e, root**2 - base, root)
    return expand(e) == 0


def differs_from_zero(e):
    rng = np.random.default_rng(0)
    e = e.xreplace({symbol: drawn(symbol, rng) for symbol in ordered(e.free_symbols)})
    unknown = {f: Float(rng.uniform(0.1, 0.9)) for f in ordered(e.atoms(Function)) if not f.evalf().is_Number}
    return abs(e.xreplace(unknown).evalf()) > 1e-6


def drawn(symbol, rng):
    """Return a random number for a symbol, to 30 digits: those that are positive are below 1."""
    x = rng.uniform(0.1, 0.9)
    return Float(x if symbol.is_positive else -x if symbol.is_negative else rng.standard_normal(), 30)


def differences(equations, known):
    """Return the names of the quantities in which the layer differs from its equations, at random numbers."""
    known = numbers(known, np.random.default_rng(0))
    arguments = {name: as_floats(known[name]) for name in inspect.signature(equations.code).parameters}
    pairs = {
        name: (answer, as_floats(np.asarray(value(equations, name, known), object)))
        for name, answer in equations.code(**arguments).items()
    }
    return [name for name, pair in pairs.items() if not agree(*pair)]


def agree(a, b):
    return np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=1e-12, atol=1e-12)


def numbers(known, rng):
    """Return what is known as numbers of 30 digits, random ones for symbols."""
    values = {}

    def number(z):
        if isinstance(z, Symbol):
            return values[z] if z in values else values.setdefault(z, drawn(z, rng))
        return z.evalf(30) if isinstance(z, Expr) else z

    def all_numbers(z):
        symbolic = isinstance(z, np.ndarray) and z.dtype == object
        return table(lambda *i: number(z[i]), *z.shape) if symbolic else number(z)

    return {name: all_numbers(z) for name, z in known.items()}


def as_floats(z):
    """Return SymPy's numbers as floats."""
    if isinstance(z, np.ndarray):
        return z.astype(np.float64) if z.dtype == object else z
    return float(z) if isinstance(z, Expr) else z
