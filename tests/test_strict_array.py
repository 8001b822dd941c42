"""The stand-in refuses what CuPy 14.2.0 refuses, and takes what it takes."""

import copy
import math
import operator

import numpy as np
import pytest
from strict_array import StrictArray, to_device, to_host

HOST = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def x() -> StrictArray:
    return to_device(HOST)


def ids(*values: int) -> StrictArray:
    return to_device(np.array(values))


REFUSED = {
    "conversion": lambda x: np.asarray(x),
    "conversion in a list": lambda x: np.array([x, x]),
    "conversion by a host array": lambda x: HOST.copy().__setitem__(0, x[0]),
    "host operand": lambda x: x + HOST,
    "host operand on the left": lambda x: HOST + x,
    "host operand in place": lambda x: operator.iadd(x, HOST),
    "device operand into host": lambda x: operator.iadd(HOST.copy(), x),
    "0-d host operand": lambda x: x * np.array(2.0),
    "list operand": lambda x: x * [1, 2, 3],
    "host out": lambda x: np.add(x, x, out=HOST.copy()),
    "host out of a function": lambda x: np.sum(x, axis=0, out=np.empty(3, np.float32)),
    "host argument": lambda x: np.where(x > 1, x, HOST),
    "host argument in a list": lambda x: np.concatenate([x, HOST]),
    "ufunc where": lambda x: np.add(x, x, where=x > 1),
    "ufunc order": lambda x: np.add(x, x, order="C"),
    "two outs": lambda x: np.divmod(x, x, out=(x, x)),
    "ufunc CuPy lacks": lambda x: np.vecdot(x, x),
    "reduce of another ufunc": lambda x: np.maximum.reduce(x),
    "at with a slice": lambda x: np.add.at(x, slice(1), 1.0),
    "at with a tuple": lambda x: np.add.at(x, (ids(0), ids(0)), 1.0),
    "subtract.at of floats": lambda x: np.subtract.at(x, ids(0), 1.0),
    "function CuPy lacks": lambda x: np.insert(x, 0, 1.0),
    "einsum_path": lambda x: np.einsum_path("ij,ij", x, x),
    "linalg.vector_norm": lambda x: np.linalg.vector_norm(x),
    "as_strided is not dispatched": lambda x: np.lib.stride_tricks.as_strided(x, (2,)),
    "sum where": lambda x: np.sum(x, where=x > 1),
    "max initial": lambda x: np.max(x, initial=0.0),
    "einsum out": lambda x: np.einsum("ij->i", x, out=x[:, 0]),
    "clip min=": lambda x: np.clip(x, min=0.0, max=1.0),
    "reshape shape=": lambda x: np.reshape(x, shape=(3, 2)),
    "take mode": lambda x: np.take(x, ids(0), mode="clip"),
    "take_along_axis without axis": lambda x: np.take_along_axis(x, ids(0, 1)[:, None]),
    "argsort kind": lambda x: np.argsort(x, kind="quicksort"),
    "sort stable=": lambda x: np.sort(x, stable=True),
    "unique sorted=": lambda x: np.unique(x, sorted=False),
    "like with subok": lambda x: np.zeros_like(x, subok=False),
    "astype casting": lambda x: x.astype(np.int32, casting="unsafe"),
    "dot by a scalar": lambda x: np.dot(x, 2.0),
    "dot into a strided out": lambda x: np.dot(x, x.T, out=to_device(np.empty((2, 4), np.float32))[:, ::2]),
    "where of a host condition": lambda x: np.where(True, x, x),
    "copyto from a list": lambda x: np.copyto(x, [1, 2, 3]),
    "concatenate of a scalar": lambda x: np.stack([x[0, 0], 1.0]),
    "ones like=, for NumPy passes device=": lambda x: np.ones(3, like=x),
    "full like=": lambda x: np.full(3, 1.0, like=x),
    "eye like=": lambda x: np.eye(3, like=x),
    "host to a slice": lambda x: x.__setitem__(0, HOST[0]),
    "list to a slice": lambda x: x.__setitem__(0, [1, 2, 3]),
    "index out of range": lambda x: x[2],
    "float index array": lambda x: x[to_device(np.zeros(2))],
    "index of a list": lambda x: [1, 2][ids(0)[0]],
    "range": lambda x: range(ids(3)[0]),
    "truth of many": lambda x: bool(x),
    "iteration of a scalar": lambda x: list(np.sum(x)),
    "hash": lambda x: hash(x),
    "object array": lambda x: to_device(np.array([None])),
    "longdouble": lambda x: x * np.longdouble(2),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED.keys())
def test_refused(x, call):
    with pytest.raises((TypeError, ValueError, IndexError, NotImplementedError)):
        call(x)


# The same expression of host and of device arrays, bit for bit; `i` is an index array.
ACCEPTED = {
    "softmax": lambda a, i: np.exp(a - np.max(a, axis=-1, keepdims=True)) / np.sum(np.exp(a), axis=-1)[:, None],
    "rms": lambda a, i: a * (np.einsum("...c,...c->...", a, a) / a.shape[-1] + 1e-5)[..., None] ** -0.5,
    "gelu": lambda a, i: 0.5 * a * (1 + np.tanh(0.8 * (a + 0.04 * a**3))),
    "matmul": lambda a, i: a @ a.T - np.matmul(a, np.swapaxes(a, 0, 1)) * np.float32(2),
    "products": lambda a, i: np.dot(a, a.T) * np.vdot(a, a) + np.einsum("ij,kj->ik", a, a),
    "mask": lambda a, i: np.where(np.tril(a) > 1, a, -np.inf),
    "logic": lambda a, i: np.logical_and(a > 1, np.isfinite(a)) | ~(a == 2),
    "any and all": lambda a, i: np.stack([np.any(a > 4), np.all(a >= 0), (a > 9).any()]),
    "unary": lambda a, i: np.sqrt(np.abs(-a)) + np.sign(a) * np.square(a) + np.reciprocal(a + 1) + np.log(a + 1),
    "clip": lambda a, i: np.clip(a, 1.0, None) + np.maximum(a, 2.0) + np.nan_to_num(a / 0),
    "gather": lambda a, i: a[i] + a[i, 1][:, None] + np.take(a, i, axis=0),
    "along": lambda a, i: np.take_along_axis(a, np.argsort(a, axis=-1)[:, :1], axis=-1),
    "shapes": lambda a, i: np.moveaxis(np.expand_dims(a, 0), 0, 1).reshape(-1) + np.ravel(np.broadcast_to(a, (2, 3))),
    "scan": lambda a, i: np.cumsum(a, axis=-1) + np.mean(a, axis=(0, 1)) + np.concatenate([a, a])[:2],
    "bincount": lambda a, i: np.bincount(i, weights=a[0], minlength=5),
    "unique": lambda a, i: np.concatenate(np.unique(i, return_inverse=True)),
    "searchsorted": lambda a, i: np.searchsorted(np.cumsum(a[0]), a[1]),
    "windows": lambda a, i: np.lib.stride_tricks.sliding_window_view(a, 2, axis=1),
    "complex view": lambda a, i: (a[:, :2].copy().view(np.complex64) * 1j).view(np.float32),
    "creation": lambda a, i: np.zeros_like(a, shape=(3,)) + np.arange(3, dtype=a.dtype, like=a),
    "reductions by ufunc": lambda a, i: np.add.reduce(a, axis=0) + np.multiply.accumulate(a)[1],
    "outer": lambda a, i: np.subtract.outer(a[0], a[1]),
    "promotion": lambda a, i: np.sum(a, axis=0) * 2 + a[0] / np.sqrt(64),
}


@pytest.mark.parametrize("call", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted_and_equal_to_numpy(x, call):
    index = np.array([1, 0, 1])
    with np.errstate(all="ignore"):
        expected = call(HOST, index)
    result = call(x, to_device(index))
    assert isinstance(result, StrictArray) and result.dtype == expected.dtype and result.shape == expected.shape
    assert result.get().tobytes() == expected.tobytes()


def test_every_result_stays_on_the_device(x):
    for result in (np.sum(x), x.max(), x[0, 0], np.array_equal(x, x), np.allclose(x, x), np.count_nonzero(x)):
        assert isinstance(result, StrictArray) and result.shape == ()
    for results in (
        np.nonzero(x),
        np.unique(x, return_counts=True),
        np.split(x, 3, axis=1),
        list(x),
        divmod(x, 2),
    ):
        assert all(isinstance(result, StrictArray) for result in results)


def test_single_elements_reach_the_host(x):
    total = np.sum(x)
    assert float(total) == total.item() == 15 and int(total) == 15 and bool(total > 1)
    assert math.sqrt(total) == math.sqrt(15) and f"{total:.1f}" == "15.0"
    assert len(x) == 2 and x.tolist() == HOST.tolist()


def test_transfers_are_explicit_and_copy(x):
    host = HOST.copy()
    devices = [to_device(host), np.asarray(host, like=x), np.array(host, dtype=np.float64, like=x)]
    host[:] = -1
    for device in devices:
        to_host(device)[:] = -1
        np.testing.assert_array_equal(to_host(device), HOST)
    assert np.asarray(x, like=x) is x


@pytest.mark.parametrize("name", ["zeros", "empty", "tri", "identity", "arange"])
def test_creation_by_like(x, name):
    made = getattr(np, name)(3, dtype=np.float32, like=x)
    assert isinstance(made, StrictArray) and made.dtype == np.float32


def test_like_ignores_an_empty_shape(x):
    # cupy/_creation/basic.py: `shape if shape else a.shape`
    assert np.zeros_like(x, shape=()).shape == (2, 3) and np.ones_like(x, shape=(4,)).shape == (4,)


def test_out(x):
    out = to_device(np.empty((4, 3), np.float32))[::2]
    assert np.multiply(x, 2, out=out) is out and (out == x * 2).all()
    assert np.add(x, x, out) is out and np.sum(x[None], axis=0, out=out) is out and (out == x).all()
    square = to_device(np.empty((2, 4), np.float32))[:, ::2]  # matmul takes a strided out, dot does not
    assert np.matmul(x, x.T, out=square) is square and (square == x @ x.T).all()
    np.copyto(out, 0.0, where=x > 2)
    assert (out == np.where(x > 2, 0.0, x)).all()


def test_views_write_through(x):
    x[0][1:] = 7.0
    x.T[0] += 1.0
    x.reshape(3, 2)[2] = x[0, :2]
    element = x[1, 0]  # a 0-d view, as in CuPy; a copy in NumPy
    element *= 10
    np.testing.assert_array_equal(to_host(x), [[1, 7, 7], [40, 1, 7]])
    square = x[:, :2]
    before = square
    square @= square  # CuPy has no __imatmul__
    assert square is not before


def test_index_arrays_wrap(x):
    assert (x[ids(2, -3)] == x[ids(0, 1)]).all()
    assert (np.take(x, ids(5), axis=1) == x[:, 2:]).all()
    assert (np.take_along_axis(x, ids(3, 4)[:, None], axis=1) == x[ids(0, 1), ids(0, 1)][:, None]).all()
    x[:, ids(3)] = 9.0
    assert (x[:, 0] == 9).all()
    np.add.at(x, ids(2), 1.0)
    assert to_host(x)[0, 0] == 10


def test_indices_of_every_kind(x):
    for key in (
        1,
        -1,
        slice(1),
        None,
        ...,
        (..., 1),
        (0, slice(None, None, -1)),
        [1, 0],
        ([1, 0], 2),
        (..., [0, 2]),
    ):
        np.testing.assert_array_equal(to_host(x[key]), HOST[key])
    mask = HOST > 2
    np.testing.assert_array_equal(to_host(x[to_device(mask)]), HOST[mask])
    np.testing.assert_array_equal(to_host(x[mask]), HOST[mask])  # a host index is transferred in silence
    picked = x[ids(0)]
    picked += 5
    np.testing.assert_array_equal(to_host(x), HOST)  # an advanced index copies


def test_advanced_assignment(x):
    expected = HOST.copy()
    expected[[0, 1], [2, 0]] -= 1
    expected[expected > 3] = 0
    expected[[1]] = HOST[:1]
    x[ids(0, 1), ids(2, 0)] -= 1
    x[x > 3] = 0
    x[ids(1)] = HOST[:1]  # taken by an advanced index, and refused by a slice
    np.testing.assert_array_equal(to_host(x), expected)


def test_scatter(x):
    np.add.at(x, ids(0, 0, 1), x[ids(1, 1, 1)].copy())
    np.put_along_axis(x, ids(1, 2)[:, None], 0.0, axis=1)
    np.testing.assert_array_equal(to_host(x), [[6, 0, 12], [6, 8, 0]])


def test_0d_arrays_are_not_weak():
    one = to_device(np.ones(3, np.float32))
    assert (one * 2.0).dtype == np.float32
    assert (one * np.float64(2)).dtype == (one * to_device(np.float64(2))).dtype == np.float64


def test_errstate_has_no_say(x):
    with np.errstate(all="raise"):
        assert not np.isfinite(x / 0).any()


def test_copies(x):
    for other in (x.copy(), copy.copy(x), copy.deepcopy(x), x.astype(np.float32), np.copy(x)):
        other += 1
    assert x.astype(np.float32, copy=False)._a is x._a
    np.testing.assert_array_equal(to_host(x), HOST)
