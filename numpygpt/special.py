r"""The standard normal distribution, which GELU needs and NumPy lacks.

$\Phi(x) = \tfrac12 \operatorname{erfc}(-x/\sqrt2)$. For $z = |x|$ the tail is written as

$$\Phi(-z) = e^{-z^2/2}\, R(z) \tag{1}$$

where $R$ falls gently from $\tfrac12$ like $1/(z\sqrt{2\pi})$ (it is Mills' ratio over $\sqrt{2\pi}$), so that a
polynomial in $t = (z - 5)/(z + 5)$, which maps $[0, \infty)$ to $[-1, 1)$, follows it everywhere (the mapping
of Shepherd & Laframboise, 1981, doi:10.1090/S0025-5718-1981-0595058-X). Its coefficients are no table to believe:
they are fitted when first needed, to Python's `math.erfc`. Measured against it: at most 1e-15 off in float64 with
degree 20, at most 3e-9 off in float32 with degree 10, before rounding.
"""

import functools
import math

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial

from numpygpt.array import Array

CENTRE = 5.0
FIT_MAX = 37.0  # Python's math.erfc(z/√2) leaves the normal numbers beyond
Z_MAX = 40.0  # exp(-z²/2) is 0 here, and z² far from overflow


@functools.cache
def tail_coefficients(degree: int) -> tuple[float, ...]:
    """Return R of (1) as a polynomial in t, highest power first."""
    t = np.cos(np.pi * (np.arange(1000) + 0.5) / 1000)
    z = CENTRE * (1 + t) / np.maximum(1 - t, 1e-9)
    z = np.round(z[z < FIT_MAX] * 2**20) / 2**20  # of few bits, so that z²/2 is exact
    ratio = [0.5 * math.erfc(a / math.sqrt(2)) * math.exp(a * a / 2) for a in z]
    fit = Chebyshev.fit((z - CENTRE) / (z + CENTRE), ratio, degree, domain=[-1, 1])
    return tuple(map(float, fit.convert(kind=Polynomial).coef[::-1]))


def normal_pdf(x: Array) -> Array:
    r"""Return $e^{-x^2/2}/\sqrt{2\pi}$."""
    z = np.minimum(np.abs(x), Z_MAX)
    return np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def normal_cdf(x: Array) -> Array:
    r"""Return $\Phi(x)$, in float64 with a relative error below 3e-13 down to $x = -37$."""
    z = np.minimum(np.abs(x), Z_MAX)
    t = (z - CENTRE) / (z + CENTRE)
    coefficients = tail_coefficients(20 if x.dtype.itemsize > 4 else 10)
    ratio = np.full_like(t, coefficients[0])
    for c in coefficients[1:]:  # Horner's rule
        ratio *= t
        ratio += c
    tail = np.exp(-0.5 * z * z) * ratio  # (1)
    return np.where(x > 0, 1 - tail, tail)
