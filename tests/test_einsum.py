"""einsum: what np.einsum says, for every notation that the package uses."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import rngs

import numpygpt
from numpygpt.einsum import einsum, lower, spell_out

SOURCES = [path.read_text() for path in Path(numpygpt.__file__).parent.rglob("*.py")]
IN_USE = sorted({n for text in SOURCES for n in re.findall(r'einsum\(\s*"([^"]+)"', text)})
OTHERS = [
    "ab,bc->ca",
    "abc,dcb->ad",
    "ab,cd->acbd",
    "ab,ab->",
    "ba->ab",
    "...a,...b->...ab",
    "a,ab->b",
    "ab,bc->c",
    "aab,bc->ac",
    "ab,bcc->ac",
    "aa,aab->b",
    " ab , b -> a ",
]


def test_the_notations_were_found():
    assert len(IN_USE) >= 10 and "...i,oi->...o" in IN_USE


@pytest.mark.parametrize("notation", [*IN_USE, *OTHERS])
@given(rng=rngs, leading=st.lists(st.integers(1, 3), max_size=3), data=st.data())
def test_every_notation_agrees_with_numpy(notation, rng, leading, data):
    size = {letter: data.draw(st.integers(1, 4), letter) for letter in sorted(set(re.findall("[a-z]", notation)))}
    spelled = notation.replace(" ", "").replace("...", "XYZ"[: len(leading)])
    size |= zip("XYZ", leading, strict=False)
    operands = []
    for term in spelled.split("->")[0].split(","):
        order = rng.permutation(len(term))  # in memory: any order of the axes, and every second element
        memory = rng.standard_normal([2 * size[term[i]] for i in order])[(slice(None, None, 2),) * len(term)]
        operands.append(memory.transpose(np.argsort(order)))
        assert operands[-1].shape == tuple(size[letter] for letter in term)
    before = [x.copy() for x in operands]
    np.testing.assert_allclose(einsum(notation, *operands), np.einsum(spelled, *operands), rtol=1e-12, atol=1e-12)
    assert all(map(np.array_equal, operands, before))


def test_an_ellipsis_in_the_output_alone_stands_for_no_axes():
    assert einsum("ab,b->...a", np.ones((2, 3)), np.ones(3)).tolist() == [3, 3]


def test_float32_stays_float32():
    x = np.ones((2, 3), np.float32)
    assert einsum("...i,oi->...o", x, x).dtype == einsum("...c->c", x).dtype == np.float32


@pytest.mark.parametrize("notation", [n for n in IN_USE if n.count(",") == 1 and n != "...c,...c->..."])
def test_a_contraction_is_one_matrix_product(notation):
    product = lower(spell_out(notation, tuple(3 if "..." in t else len(t) for t in notation.split("->")[0].split(","))))
    batched = re.fullmatch(r"\.\.\.(.),\.\.\.\1->(\.\.\.|\1)", notation)  # a sum of elementwise products
    assert (product is None) == bool(batched)


def test_a_matrix_times_a_vector_is_a_matrix_product_too():
    assert lower("ab,b->a") and lower("a,ab->b")


@pytest.mark.parametrize(
    ("notation", "shapes", "named"),
    [
        ("ij,jk->ik", [(2, 3), (4, 5)], r"\(2, 3\) and \(4, 5\)"),
        ("bij,bjk->bik", [(2, 3, 4), (3, 4, 5)], r"\(2, 3, 4\) and \(3, 4, 5\)"),
        ("...i,oi->...o", [(2, 3), (5, 4)], r"\(2, 3\) and \(5, 4\)"),
        ("ij,jk->ik", [(2, 3), (3,)], "'jk'.*1 axes"),
        ("i,i->", [(2, 2), (2,)], "'i'.*2 axes"),
        ("...ij,jk->...ik", [(3,), (3, 4)], "'...ij'.*1 axes"),
        ("...i,...i->...", [(2, 3), (3,)], "for 1 and for 0 axes"),
        ("ij,jk", [(2, 3), (3, 4)], "'ij,jk' must have an output"),
        ("ij,jk->ik", [(2, 3)], "1 operands"),
        ("ij,jk->ikz", [(2, 3), (3, 4)], "'z' which never appeared"),
        ("ij,jk->iik", [(2, 3), (3, 4)], "'i'.*(more than once|multiple times)"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(notation, shapes, named):
    with pytest.raises(ValueError, match=named):
        einsum(notation, *map(np.ones, shapes))
