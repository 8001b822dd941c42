"""A strict stand-in for a CuPy array, over NumPy: it shows without a GPU that layers would run on one.

It answers NumPy's dispatch protocols (NEP 13, 18, 35) as CuPy 14.2.0 does, and refuses what CuPy refuses.
What was decisive is cited by the file and function of CuPy's sources; the functions CuPy has, with their
parameters, are listed beside this file in cupy14_functions.txt.

Stricter than CuPy in one point: a NumPy array among the arguments of a *function* is always refused, though
CuPy copies some to the device in silence (`einsum`, `take`, `isclose`). Looser in three: results keep NumPy's
memory order where CuPy's ufuncs return C order; a kernel's rounding is NumPy's; and two writes to one place
(`x[[0, 0]] = 1, 2`) keep the last, where on a GPU it is undefined which is kept.
"""

import collections
import inspect
from pathlib import Path
from types import SimpleNamespace

import numpy as np

_LIST = [
    line.partition("(")
    for line in Path(__file__).with_name("cupy14_functions.txt").read_text().splitlines()
    if not line.startswith("#")
]
UFUNCS = {name for name, paren, _ in _LIST if not paren}
FUNCTIONS = {
    name: inspect.signature(eval(f"lambda {parameters[:-1]}: None")) for name, paren, parameters in _LIST if paren
}

# How often the host looked at a number, for which it waits for a GPU, by what it called; and under "" how many pieces
# of work it gave to the device. Two functions look by themselves: bincount at the sign and at the size of its numbers
# (_statistics/histogram.py), unique at how many there are (_manipulation/add_remove.py).
COUNTS: collections.Counter[str] = collections.Counter()
_LOOKING = {"bincount": 2, "unique": 1}

# Which arguments must be device arrays: all elements of the first, the first two, none, or else the first.
_SEQUENCE = {"column_stack", "concatenate", "dstack", "hstack", "stack", "vstack"}
_ALL_ARRAYS = {"dot", "inner", "linalg.matmul", "outer", "put_along_axis"}
_ALL_ARRAYS |= {"take_along_axis", "vdot"}
_CREATION = {
    "arange",
    "array",
    "asanyarray",
    "asarray",
    "empty",
    "eye",
    "frombuffer",
    "fromfunction",
    "fromiter",
}
_CREATION |= {
    "full",
    "identity",
    "linspace",
    "ones",
    "tri",
    "zeros",
}  # and these take host arrays: a transfer
_CONVERTING = {"allclose", "broadcast_arrays", "can_cast", "common_type", "cross", "einsum", "isclose"}
_CONVERTING |= {"meshgrid", "ndim", "result_type", "shape", "size"}
_DEVICE_RESULT = {
    "allclose",
    "array_equal",
    "array_equiv",
    "count_nonzero",
}  # NumPy: bool, int. CuPy: 0-d array
_COMPARISONS = {"equal", "greater", "greater_equal", "less", "less_equal", "not_equal"}
_SCALARS = {bool, int, float, complex} | {np.dtype(c).type for c in "?bBhHiIlLqQefdFD"}  # _core/_scalar.pyx

# ufunc.at, .reduce, .accumulate and .reduceat exist for these only (_core/_kernel.pyx, class ufunc), and `at`
# for the dtypes that have atomics (_core/_routines_indexing.pyx, _scatter_op_single).
_AT = {
    "add": "iIlLqQefd",
    "subtract": "iI",
    "maximum": "iIlLqQfd",
    "minimum": "iIlLqQfd",
    "bitwise_and": "iIlLqQ",
    "bitwise_or": "iIlLqQ",
    "bitwise_xor": "iIlLqQ",
}
_METHODS = {
    "reduce": ({"add", "multiply"}, {"axis", "dtype", "out", "keepdims"}),
    "accumulate": ({"add", "multiply"}, {"axis", "dtype", "out"}),
    "reduceat": ({"add"}, {"axis", "dtype", "out"}),
}


def to_device(x) -> "StrictArray":
    """A copy of a NumPy array (or of anything np.array takes) as a StrictArray."""
    return StrictArray(np.array(x))


def to_host(x: "StrictArray") -> np.ndarray:
    """A copy of a StrictArray as a NumPy array."""
    return x.get()


def _unwrap(x, seen: dict):
    """`x` with every StrictArray, also within sequences, replaced by its array; `seen` maps those back."""
    if isinstance(x, StrictArray):
        seen[id(x._a)] = x
        return x._a
    if type(x) in (list, tuple):
        return type(x)(_unwrap(y, seen) for y in x)
    return x


def _wrap(x, seen: dict):
    """`x` with every NumPy array or scalar replaced by a StrictArray; an `out=` comes back as itself."""
    if isinstance(x, np.ndarray | np.generic):
        return seen[id(x)] if id(x) in seen else StrictArray(np.asarray(x))
    if isinstance(x, list | tuple):
        items = [_wrap(y, seen) for y in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    return x


def _run(function, args, kwargs):
    """Call NumPy on the arrays within; np.errstate has no say, as on a GPU."""
    seen: dict = {}
    args = _unwrap(tuple(args), seen)
    kwargs = {key: _unwrap(value, seen) for key, value in kwargs.items()}
    with np.errstate(all="ignore"):
        result = function(*args, **kwargs)
    COUNTS[""] += kwargs.get("out") is not None or not _is_view(result, seen)
    return _wrap(result, seen)


def _is_view(result, seen: dict) -> bool:
    """Whether a result, or each of several, lies in the memory of an array that was given: that is no work."""
    if isinstance(result, list | tuple):
        return all(_is_view(x, seen) for x in result)
    return isinstance(result, np.ndarray) and any(np.may_share_memory(result, x._a) for x in seen.values())


def _find(kind, x) -> bool:
    """Whether `x` is a `kind`, or a nested sequence that holds one."""
    return isinstance(x, kind) or (isinstance(x, list | tuple) and any(_find(kind, y) for y in x))


class StrictArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array 'on the device': a NumPy array that NumPy itself cannot get at."""

    __slots__ = ("_a",)
    __hash__ = None  # no __index__ either: range(x), a list's index and a shape need int(x)
    __array_priority__ = 100

    def __init__(self, array: np.ndarray):
        if not isinstance(array, np.ndarray) or array.dtype.type not in _SCALARS:
            raise TypeError(f"CuPy holds no {getattr(array, 'dtype', type(array))}")
        self._a = array

    # The host sees single elements, and copies by get(); each waits for the GPU (_core/core.pyx).

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Implicit conversion to a NumPy array is not allowed; use to_host(x)")

    def get(self) -> np.ndarray:
        COUNTS["get"] += 1
        return self._a.copy()

    def item(self):
        COUNTS["item"] += 1
        if self.size != 1:
            raise ValueError("only an array of size 1 has an item")
        return self._a.item()

    def tolist(self):
        COUNTS["tolist"] += 1
        return self._a.tolist()

    def __bool__(self):
        COUNTS["bool"] += 1
        return bool(self._a)

    def __int__(self):
        COUNTS["int"] += 1
        return int(self._a)

    def __float__(self):
        COUNTS["float"] += 1
        return float(self._a)

    def __complex__(self):
        COUNTS["complex"] += 1
        return complex(self._a)

    def __repr__(self):
        return f"Strict{self._a!r}"

    def __format__(self, spec):
        return format(self._a, spec)

    def __len__(self):
        return len(self._a)

    def __iter__(self):
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    def __copy__(self):
        return self.copy()

    def __deepcopy__(self, memo):
        return self.copy()

    def __pow__(self, exponent):
        # x ** 2, ** 0.5, ** -1.0 go to square, sqrt and reciprocal, in both libraries.
        if type(exponent) in (int, float):
            return _run(lambda a: a**exponent, (self,), {})
        return np.power(self, exponent)

    def __imatmul__(self, other):
        return self @ other  # CuPy has no __imatmul__: x @= y gives x a new array

    # NEP 13 (_core/core.pyx, __array_ufunc__; _core/_kernel.pyx, ufunc; linalg/_product.py, matmul)

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        name, out = ufunc.__name__, kwargs.get("out", ())
        if name not in UFUNCS or getattr(np, name, None) is not ufunc:
            return NotImplemented
        if len(out) > 1:
            raise ValueError("CuPy: 'out' must have exactly one array")
        if any(type(x) not in _SCALARS and not isinstance(x, StrictArray | np.ndarray) for x in inputs + out):
            return NotImplemented  # lists, and for ufunc.at also slices and tuples of indices
        if not all(isinstance(x, StrictArray) for x in out):
            raise TypeError("'out' must be a device array")
        if name in _COMPARISONS:
            inputs = tuple(x.item() if isinstance(x, np.ndarray) and not x.ndim else x for x in inputs)
        if any(isinstance(x, np.ndarray) for x in inputs):
            raise TypeError(f"{name} of a device array and a NumPy array: transfer it first")

        allowed = {"out", "dtype", "casting"}  # no where=, order=, subok=
        if name == "matmul":
            allowed |= {"axes", "axis", "keepdims", "signature", "order"}
        if method == "at":
            target, indices, *values = inputs
            if not isinstance(target, StrictArray) or target.dtype.char not in _AT.get(name, ""):
                raise TypeError(f"CuPy has no {name}.at for this array")
            inputs = (target, target._index(indices)[0], *values)
        elif method in _METHODS:
            names, allowed = _METHODS[method]
            if name not in names:
                raise NotImplementedError(f"CuPy has no {name}.{method}")
        elif method == "outer" and name == "matmul":
            return NotImplemented
        if unknown := kwargs.keys() - allowed:
            raise TypeError(f"CuPy's {name} takes no {', '.join(sorted(unknown))}")
        if name == "matmul" and all(getattr(x, "dtype", None) == np.float16 for x in inputs):
            # cuBLAS adds in float32, and batches are widened (_core/_routines_linalg.pyx, tensordot_core_v11, matmul);
            # NumPy does so too, but without BLAS, and so in another order than the host's product of widened halves.
            wide = [x.astype(np.float32) for x in inputs]
            return _run(lambda *x, **options: np.matmul(*x, **options).astype(np.float16, copy=False), wide, kwargs)
        return _run(getattr(ufunc, method), inputs, kwargs)

    # NEP 18 and 35 (_core/core.pyx, __array_function__: by qualified name, not what CuPy took from NumPy)

    def __array_function__(self, function, types, args, kwargs):
        name = f"{function.__module__}.{function.__name__}".removeprefix("numpy.")
        if name not in FUNCTIONS or not all(issubclass(t, StrictArray | np.ndarray) for t in types):
            return NotImplemented
        try:
            given = FUNCTIONS[name].bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"CuPy's {name}{FUNCTIONS[name]}: {error}") from None
        _check(name, list(given.values()), given)
        if name in _LOOKING:
            COUNTS[name] += _LOOKING[name]
        if name in _CREATION:
            result = _run(function, args, kwargs)
            if any(_find(np.ndarray, x) for x in given.values()):  # a transfer shares no memory with the host
                result = result.copy(order="K")
        elif name.endswith("_like"):
            # cupy/_creation/basic.py: `shape if shape else a.shape`, so that shape=() is no shape.
            kwargs = {k: v for k, v in kwargs.items() if k != "shape" or v}
            result = _run(function, args, kwargs)
        elif name in ("argsort", "sort"):
            result = _run(function, args, kwargs | {"kind": "stable"})
        elif name == "take":
            result = _run(function, args, kwargs | {"mode": "wrap"})
        elif name in ("take_along_axis", "put_along_axis"):
            array, (indices, *rest) = args[0], args[1:]
            axis = given["axis"]
            indices = indices % (array.size if axis is None else array.shape[axis])
            result = _run(function, (array, indices, *rest), kwargs)
        else:
            result = _run(function, args, kwargs)
        return to_device(result) if name in _DEVICE_RESULT and isinstance(result, bool | int) else result

    # Indexing (_core/_routines_indexing.pyx, _prepare_slice_list, _view_getitem, _scatter_op)

    def _index(self, key) -> tuple[tuple, bool]:
        """NumPy's index for `key`, and whether it is advanced. Lists and NumPy arrays may be indices.

        Integer *arrays* wrap around in silence where NumPy raises, so that an id out of range must be
        caught by whoever uses it. A single Python integer is checked.
        """
        keys = []
        for k in key if isinstance(key, tuple) else (key,):
            if isinstance(k, StrictArray):
                k = k._a
            elif isinstance(k, list | tuple | bool | np.bool_):
                k = np.array(_unwrap(k, {}))
                k = k if k.size else k.astype(np.intp)
            keys.append(k)

        def width(k) -> int:
            """How many axes `k` takes."""
            if k is None or k is Ellipsis:
                return 0
            return k.ndim if isinstance(k, np.ndarray) and k.dtype == bool else 1

        COUNTS["mask"] += any(isinstance(k, np.ndarray) and k.dtype == bool for k in keys)  # how much it lets through
        axis, taken = 0, sum(map(width, keys))
        for i, k in enumerate(keys):
            if k is Ellipsis:
                axis += self.ndim - taken
            if isinstance(k, np.ndarray) and k.dtype.kind in "iu" and axis < self.ndim and self.shape[axis]:
                keys[i] = np.asarray(k.astype(np.intp) % self.shape[axis])
            axis += width(k)
        advanced = any(isinstance(k, np.ndarray) for k in keys)
        if not advanced and not any(k is Ellipsis for k in keys):
            keys.append(Ellipsis)  # then one element is a 0-d view, as in CuPy, and no copy
        return tuple(keys), advanced

    def __getitem__(self, key):
        keys, advanced = self._index(key)
        COUNTS[""] += advanced  # a view is no work
        return StrictArray(self._a[keys].copy() if advanced else self._a[keys])

    def __setitem__(self, key, value):
        keys, advanced = self._index(key)
        COUNTS[""] += 1
        if isinstance(value, StrictArray):
            value = value._a
        elif np.ndim(value := _unwrap(value, {})) and not advanced:
            # An advanced index takes them, to transfer (_scatter_op_single); a slice does not (ndarray.fill).
            raise ValueError("a NumPy array or a list cannot be assigned to a slice of a device array")
        with np.errstate(all="ignore"):
            self._a[keys] = value

    # Attributes and methods

    shape = property(lambda self: self._a.shape)
    dtype = property(lambda self: self._a.dtype)
    ndim = property(lambda self: self._a.ndim)
    size = property(lambda self: self._a.size)
    strides = property(lambda self: self._a.strides)
    nbytes = property(lambda self: self._a.nbytes)
    itemsize = property(lambda self: self._a.itemsize)
    data = property(lambda self: SimpleNamespace(ptr=self._a.__array_interface__["data"][0]))
    T = property(lambda self: StrictArray(self._a.T))
    mT = property(lambda self: StrictArray(self._a.mT))
    real = property(lambda self: StrictArray(self._a.real))
    imag = property(lambda self: StrictArray(self._a.imag))

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        if casting is not None or subok is not None:
            raise TypeError("CuPy's astype takes no casting and no subok")
        return _run(np.ndarray.astype, (self, dtype, order), {"copy": copy})

    def fill(self, value):
        self[...] = value


def _check(name: str, values: list, given: dict) -> None:
    """Refuse arguments of the function `name` that CuPy's would refuse by their type or value."""
    if name not in _CREATION and any(_find(np.ndarray, x) for x in values):
        raise TypeError(f"{name} of a device array and a NumPy array: transfer it first")
    if name in _SEQUENCE:
        arrays = values[0]
    elif name in _ALL_ARRAYS:
        arrays = values[:2]
    elif name in _CREATION | _CONVERTING:
        arrays = []
    else:
        arrays = values[0] if isinstance(values[0], tuple) else values[:1]
    if not all(isinstance(x, StrictArray) for x in arrays):
        raise TypeError(f"CuPy's {name} takes device arrays, not {[type(x).__name__ for x in arrays]}")
    if name in ("clip", "copyto", "where") and any(isinstance(x, list | tuple) for x in values):
        raise TypeError(f"CuPy's {name} takes device arrays and scalars, not lists")
    if isinstance(given.get("out"), tuple):
        raise TypeError(f"CuPy's {name} takes an array as 'out'")
    if given.get("subok") not in (None, False) or (name.endswith("_like") and given.get("subok") is not None):
        raise TypeError("CuPy has no subok")
    if name in ("argsort", "sort") and given.get("kind") not in (None, "stable"):
        raise ValueError("CuPy's kind can only be None or 'stable'")
    if name == "dot" and given.get("out") is not None and not given["out"]._a.flags.c_contiguous:
        raise ValueError("CuPy's dot takes a C-contiguous 'out'")


def _method(name: str, parameters: str):
    """A method of CuPy's ndarray, with its parameters (_core/core.pyx)."""
    signature = inspect.signature(eval(f"lambda self, {parameters}: None"))

    def method(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments
        _check(name, list(given.values()), given)
        if name in ("argsort", "sort"):
            kwargs["kind"] = "stable"
        if name == "take":
            kwargs["mode"] = "wrap"
        return _run(getattr(np.ndarray, name), (self, *args), kwargs)

    method.__name__ = name
    return method


_REDUCE = "axis=None, out=None, keepdims=False"
_REDUCE_DTYPE = "axis=None, dtype=None, out=None, keepdims=False"
for _name, _parameters in {
    "all": _REDUCE,
    "any": _REDUCE,
    "argmax": "axis=None, out=None, dtype=None, keepdims=False",
    "argmin": "axis=None, out=None, dtype=None, keepdims=False",
    "argsort": "axis=-1, kind=None",
    "clip": "min=None, max=None, out=None",
    "conj": "",
    "copy": "order='C'",
    "cumsum": "axis=None, dtype=None, out=None",
    "diagonal": "offset=0, axis1=0, axis2=1",
    "dot": "b, out=None",
    "flatten": "order='C'",
    "max": _REDUCE,
    "mean": _REDUCE_DTYPE,
    "min": _REDUCE,
    "nonzero": "",
    "prod": _REDUCE_DTYPE,
    "ravel": "order='C'",
    "repeat": "repeats, axis=None",
    "reshape": "*shape, order='C', copy=None",
    "round": "decimals=0, out=None",
    "searchsorted": "v, side='left', sorter=None",
    "sort": "axis=-1, kind=None",
    "squeeze": "axis=None",
    "std": "axis=None, dtype=None, out=None, ddof=0, keepdims=False",
    "sum": _REDUCE_DTYPE,
    "swapaxes": "axis1, axis2",
    "take": "indices, axis=None, out=None",
    "transpose": "*axes",
    "var": "axis=None, dtype=None, out=None, ddof=0, keepdims=False",
    "view": "dtype=None",
}.items():
    setattr(StrictArray, _name, _method(_name, _parameters))
