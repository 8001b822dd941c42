r"""The derivative of a function along a direction, measured in two ways that have nothing in common.

$f$ takes an array $z$ to a vector; wanted is $Jv$, the rate at which $f(z + tv)$ changes at $t = 0$.

**The central difference**, whose error in $h$ begins with $h^2$, and a Richardson step, which takes the $h^2$ away:

$$D(h) = \frac{f(z + hv) - f(z - hv)}{2h} \tag{1}$$
$$Jv = \tfrac13\,\big(4 D(h/2) - D(h)\big) + O(h^4) \tag{2}$$

It works for anything that can be evaluated. Its error is rounding: two values of $f$, each off by about
$\epsilon |f|$, are subtracted and divided by $h$, which leaves, in units of $|z|$, the size of the elements of $z$,

$$\rho = \epsilon\,|z|/h \tag{3}$$

$h$ begins at $\epsilon^{1/3}|z|$. There $\rho$ is $\epsilon^{2/3}$ (4e-11 in float64, 2e-5 in float32), and for most
functions the $h^4$ is far below. Where $f$ bends within such a step (a logarithm near 0, a kink near by), (2) takes
away more than rounding can leave, and $h$ is made shorter until it doesn't.

**The complex step.** A function made of sums, products, exponentials and the like is a power series, and a power
series takes complex numbers: $f(z + ihv) = f(z) + ih\,Jv - \tfrac12 h^2(\dots) - \dots$, so

$$Jv = \operatorname{Im} f(z + ihv)/h + O(h^2) \tag{4}$$

Nothing is subtracted, so nothing cancels: $h$ can be 1e-20, and the result has all digits ($\rho = \epsilon$).

Sources: Richardson (1911), doi:10.1098/rsta.1911.0009; Squire & Trapp (1998), doi:10.1137/S003614459631241X; Martins,
Sturdza & Alonso (2003), doi:10.1145/838250.838251, section 3.1 (comparing by real parts, and $|z| = \pm z$).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from numpygpt.array import Array
from numpygpt.gradcheck.complex_step import ComplexStep

ROUNDINGS = 100
KINKS = 3  # what is left after (2), in units of |D(h/2) - D(h)|, if the step crosses kinks (if not: far less)


class Measured(NamedTuple):
    """J v for a direction v."""

    j: Array
    bend: float  # a bound of the error in h that is left
    rho: float  # the relative precision, (3)


def element_size(z: Array) -> float:
    """Return the root mean square of the elements, or 1 if all are 0 (or there are none)."""
    norm = float(np.linalg.norm(np.asarray(z, np.float64)))
    return norm / z.size**0.5 if norm > 0 else 1.0


def difference(f: Callable[[], Array], z: Array, v: Array, h: float) -> Array:
    """Return D(h) by (1), moving `z` in place and putting it back."""
    old = z.copy()
    try:
        z[...] = old + h * v
        above = f()
        z[...] = old - h * v
        return (above - f()) / (2 * h)  # (1)
    finally:
        z[...] = old


def by_differences(f: Callable[[], Array], z: Array, v: Array) -> Measured:
    """Return J v by (2)."""
    eps, size, here = float(np.finfo(z.dtype).eps), element_size(z), float(np.linalg.norm(f()))
    h = eps ** (1 / 3) * size
    while True:
        with np.errstate(all="ignore"):  # a step may leave the domain of f; a shorter one won't
            coarse, fine = difference(f, z, v, h), difference(f, z, v, h / 2)
            bend, rho = KINKS * float(np.linalg.norm(fine - coarse)), eps * size / h  # (3)
        if bend <= ROUNDINGS * rho * (np.linalg.norm(fine) + here / size) or h < eps ** (2 / 3) * size:
            return Measured((4 * fine - coarse) / 3, bend, rho)  # (2)
        h /= 8


def by_complex_step(f: Callable[[], Array], z: ComplexStep, v: Array) -> Measured:
    """Return J v by (4). TypeError if no complex number comes out."""
    old = z.copy()
    h = 1e-20 * element_size(old.view(np.ndarray).real)
    try:
        z[...] = old + 1j * h * v
        y = f()
    finally:
        z[...] = old
    if y.dtype.kind != "c":
        raise TypeError("forward doesn't return what it computes from the complex input")
    return Measured(y.imag / h, 0.0, float(np.finfo(z.dtype).eps))  # (4)


def has_kink(f: Callable[[], Array], z: Array, v: Array) -> bool:
    """Whether the slopes on the two sides of z differ, as no smooth function's do over so short a step."""
    old, h = z.copy(), float(np.finfo(z.dtype).eps) ** (1 / 3) * element_size(z)
    try:
        with np.errstate(all="ignore"):
            here = f()
            z[...] = old + h * v
            right = f() - here
            z[...] = old - h * v
            left = here - f()
    finally:
        z[...] = old
    return not np.linalg.norm(right - left) <= 0.01 * (np.linalg.norm(right) + np.linalg.norm(left))  # maybe NaN
