r"""A complex array in the guise of a real one, so that any layer can take the complex step (see oracles.py)."""

from typing import Any, Self

import numpy as np

from numpygpt.array import Array


class ComplexFloat(float):
    """The float that a complex number stands for, through sums, products, quotients and powers."""

    number: complex

    def __new__(cls, number: complex) -> Self:
        """Make the float of the real part."""
        self = super().__new__(cls, number.real)
        self.number = number
        return self

    def __neg__(self) -> "ComplexFloat":
        return ComplexFloat(-self.number)

    def __add__(self, other: Any) -> "ComplexFloat":
        return ComplexFloat(self.number + getattr(other, "number", other))

    def __sub__(self, other: Any) -> "ComplexFloat":
        return self + -other

    def __rsub__(self, other: Any) -> "ComplexFloat":
        return -self + other

    def __mul__(self, other: Any) -> "ComplexFloat":
        return ComplexFloat(self.number * getattr(other, "number", other))

    def __truediv__(self, other: Any) -> "ComplexFloat":
        return ComplexFloat(self.number / getattr(other, "number", other))

    def __rtruediv__(self, other: Any) -> "ComplexFloat":
        return ComplexFloat(other / self.number)

    def __pow__(self, other: Any) -> "ComplexFloat":  # type: ignore[override]
        return ComplexFloat(self.number ** getattr(other, "number", other))

    __radd__, __rmul__ = __add__, __mul__


NEW_ARRAYS = {np.zeros, np.ones, np.empty, np.full, np.arange, np.array, np.asarray}  # made with like=
ANALYTIC: dict[np.ufunc, Any] = {  # what NumPy takes for the modulus, or lacks, of complex numbers
    np.absolute: lambda z: np.where(z.real < 0, -z, z),
    np.fabs: lambda z: np.where(z.real < 0, -z, z),
    np.hypot: lambda a, b: np.sqrt(a * a + b * b),
    np.logaddexp: lambda a, b: np.maximum(a, b) + np.log1p(np.exp(np.minimum(a, b) - np.maximum(a, b))),
}
REAL_PARTS_DECIDE = {np.greater, np.greater_equal, np.less, np.less_equal, np.equal, np.not_equal, np.sign}


class ComplexStep(np.ndarray):
    r"""A complex array in the place of a real one.

    It shows the dtype of the real array, so that a layer that asks for floats takes it. Comparisons look at real
    parts, and $|z|$ is $z$ or $-z$, as it would be on the real line. What leaves the complex numbers raises
    TypeError, or ComplexWarning where NumPy says so.
    """

    real_dtype = np.dtype(np.float64)

    def __array_finalize__(self, other: Any) -> None:
        self.real_dtype = getattr(other, "real_dtype", self.real_dtype)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the real array that this stands for (what isn't complex stands for itself)."""
        own = self.view(np.ndarray).dtype
        return self.real_dtype if own.kind == "c" else own

    def view(self, *args: Any) -> Any:  # type: ignore[override]
        """Return another view; as complex numbers, neighbours on the last axis are Pairs."""
        if args and args[0] in (np.complex64, np.complex128):
            return Pairs(self[..., 0::2], self[..., 1::2])
        return super().view(*args)

    def astype(self, dtype: np.typing.DTypeLike, copy: bool = True) -> Array:  # type: ignore[override]
        """Return a copy that shows another float dtype (its own numbers stay complex128)."""
        if np.dtype(dtype).kind != "f":
            raise TypeError(f"a complex number can't become {np.dtype(dtype)}")
        return dressed(self.copy() if copy else self, np.dtype(dtype))

    def item(self, *index: Any) -> Any:
        """Return an element as a float that remembers its complex number."""
        return ComplexFloat(self.view(np.ndarray).item(*index))

    def __float__(self) -> float:
        raise TypeError("float() forgets the imaginary part; let forward return the array, or its .item()")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: tuple = (), **kwargs: Any) -> Any:
        plain = [undressed(x) for x in inputs]
        if ufunc in REAL_PARTS_DECIDE:
            return getattr(ufunc, method)(*map(np.real, plain), **kwargs)
        if ufunc in ANALYTIC and method == "__call__" and not out:
            return dressed(ANALYTIC[ufunc](*plain), self.real_dtype)
        if out:
            kwargs["out"] = tuple(map(undressed, out))
        result = getattr(ufunc, method)(*plain, **kwargs)
        return out[0] if out else dressed(result, self.real_dtype)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = super().__array_function__(function, types, args, kwargs)
        if function in NEW_ARRAYS and result.dtype.kind == "f":
            return complexified(result)
        if getattr(result, "dtype", np.dtype(bool)).kind == "f" and not isinstance(result, ComplexStep):
            raise TypeError(f"np.{function.__name__} leaves the complex numbers")
        return dressed(result, self.real_dtype)


class Pairs:
    """Real numbers by twos, seen as complex numbers x + jy; x and y have the step's own imaginary unit in them."""

    def __init__(self, x: Array, y: Array):
        self.x, self.y = x, y

    def __mul__(self, factor: Array) -> "Pairs":
        return Pairs(self.x * factor.real - self.y * factor.imag, self.x * factor.imag + self.y * factor.real)

    def view(self, dtype: np.typing.DTypeLike) -> Array:
        """Return them as neighbours on the last axis again."""
        return np.stack([self.x, self.y], axis=-1).reshape(*self.x.shape[:-1], -1)


def dressed(x: Any, real_dtype: np.dtype) -> Any:
    """Return what is complex as a ComplexStep that shows `real_dtype`, anything else as it is."""
    if not (isinstance(x, np.ndarray | np.generic) and undressed(x).dtype.kind == "c"):
        return x
    view = np.asanyarray(x).view(ComplexStep)
    view.real_dtype = real_dtype
    return view


def undressed(x: Any) -> Any:
    """Return a ComplexStep as the complex array that it is, anything else as it is."""
    return x.view(np.ndarray) if isinstance(x, ComplexStep) else x


def complexified(x: Array) -> ComplexStep:
    """Return a copy of a real array as a ComplexStep."""
    return dressed(np.asarray(x, np.complex128).copy(), x.dtype)
