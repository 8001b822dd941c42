"""Derivation, proof and code agree: SymPy derives every equation of the docstrings, and the layers compute them."""

import inspect
import re

import equations
import pytest
from symbolic import all_zero, cases, claims, differences, quantities, remainder
from sympy import Symbol, simplify, summation

from numpygpt import layers, optim

CLASSES = [c for c in vars(equations).values() if inspect.isclass(c) and hasattr(c, "of")]
CLAIMS = [
    pytest.param(c, name, known, id=" ".join(filter(None, (f"{c.__name__}.{name}", case))))
    for c in CLASSES
    for name in claims(c)
    for case, known in cases(c).items()
]


@pytest.mark.parametrize(("c", "name", "known"), CLAIMS)
def test_what_is_claimed_is_what_sympy_derives(c, name, known):
    assert all_zero(remainder(c, name, known))


def test_adams_sum_holds_at_every_step_and_not_only_at_the_first_three():
    i, t = Symbol("i", integer=True), Symbol("t", integer=True, positive=True)
    odds = Symbol("odds", positive=True)
    beta = odds / (1 + odds)  # between 0 and 1

    def factor(t, i):
        return beta ** (t - i)

    # (5): from one step to the next, as (1) says, every term is multiplied by beta, and g_t comes in
    assert simplify(beta * factor(t - 1, i) - factor(t, i)) == 0
    assert factor(t, t) == 1
    # (6)
    assert simplify((1 - beta) * summation(factor(t, i), (i, 1, t)) - (1 - beta**t)) == 0


# The LaTeX


def equations_in(text):
    """Return the numbered equations of a docstring, each from its first letter to its number."""
    displayed = re.findall(r"\$\$(.*?)\$\$", text or "", re.DOTALL)
    return one_by_one(" ".join(latex for latex in displayed if r"\tag" in latex))


def one_by_one(latex):
    """Return equations in a row, one by one; how they are broken into lines is no matter."""
    return [equation.strip() for equation in re.findall(r".+?\\tag\{\w+\}|.+", " ".join(latex.split()))]


DOCUMENTED = {
    item.__name__: item
    for item in [*vars(layers).values(), optim.Adam, optim.AdamW, *(c.of for c in CLASSES)]
    if inspect.isclass(item) or inspect.ismodule(item)
}


@pytest.mark.parametrize("documented", DOCUMENTED.values(), ids=DOCUMENTED)
def test_the_equations_here_are_those_of_the_docstring(documented):
    own = [f for c in CLASSES if c.of is documented for f in vars(c).values() if inspect.isfunction(f)]
    latex = " ".join(f.__doc__ for f in own if f.__doc__ and f.__name__ != "code")
    assert one_by_one(latex) == equations_in(documented.__doc__)


@pytest.mark.parametrize("c", CLASSES, ids=lambda c: c.__name__)
def test_equations_stand_in_a_file_named_like_the_source(c):
    source = c.of.__name__ if inspect.ismodule(c.of) else c.of.__module__
    assert c.__module__.split(".")[-1] == source.split(".")[-1]


@pytest.mark.parametrize("c", CLASSES, ids=lambda c: c.__name__)
def test_every_definition_is_used_by_some_claim_or_asked_of_the_code(c):
    functions = quantities(c)
    used = {name for f in functions.values() for name in inspect.signature(f).parameters}
    used |= {name for f in functions.values() for name in getattr(f, "mentions", ())}
    assert set(functions) - used - set(claims(c)) <= {getattr(c, "output", None)}


# The code

WITH_CODE = [
    pytest.param(c, known, id=" ".join(filter(None, (c.__name__, case))))
    for c in CLASSES
    if c is not equations.Activation  # the rule of them all, which each of them uses
    for case, known in cases(c).items()
]


@pytest.mark.parametrize(("c", "known"), WITH_CODE)
def test_the_code_computes_what_the_equations_say(c, known):
    assert differences(c, known) == []
