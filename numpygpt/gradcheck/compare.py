r"""What backward claims, held against what the oracles measure.

With the Jacobian $J = \partial y/\partial z$, the claim is $\bar z = J^\top \bar y$: for every direction $v$,

$$\langle \bar z, v \rangle = \langle \bar y, Jv \rangle \tag{1}$$

Of a small $z$ every element is moved by itself ($v$ a unit vector), which gives all of $J$, and if $y$ is small too,
backward is asked for every row of it ($\bar y$ a unit vector). A large $z$ is moved in a few random directions: a wrong
$\bar z$ differs from the right one by some vector, which a random direction is almost never orthogonal to.

The bound follows from the arithmetic. Numbers of the size of $|Jv|$, of $|\bar z|$, and (per unit of $z$) of $|y|$
are computed in some steps, each of them rounded to a relative precision $\rho$: that of the dtype, $\epsilon$, by the
complex step and in backward, $\epsilon|z|/h$ in a difference. Room is left for a hundred roundings, and

- a tenth for numbers near 1 that cancel on the way (as $1 + \tanh u$ in GELU's tail),
- $\sigma = |\Delta \bar z|/\epsilon$ for what rounding the inputs does to the gradient, which is measured by moving
  each by one unit in its last place (LayerNorm of nearly equal features magnifies it),
- $\kappa$ for what a difference says of its own error in $h$ (where $f$ bends sharply, it knows less).

With $|z|$ the size of an element,

$$|\text{error}| \le \kappa + 100\, \rho\, \big(|Jv| + |\bar z| + |y|/|z| + \sigma + \tfrac1{10}\big) \tag{2}$$

It takes for granted that nothing inside the layer is much larger than that: a layer that subtracts large numbers to
get a small $y$ has more rounding, and should be checked at inputs where it doesn't.
"""

import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from numpygpt.array import Array
from numpygpt.gradcheck.diagnosis import name_the_fault, wrong_shape
from numpygpt.gradcheck.directions import Directions, Elements, Random, at
from numpygpt.gradcheck.oracles import ROUNDINGS, by_complex_step, by_differences, element_size, has_kink
from numpygpt.gradcheck.report import KINK, Row
from numpygpt.gradcheck.subject import Subject

LOOK_CLOSER = 24  # elements of a large gradient that is wrong


class Measurements(NamedTuple):
    """J v for some directions v."""

    v: Directions
    j: Array  # (directions, elements of y)
    bend: Array  # (directions,): what the oracle itself says of its error in h
    rho: Array  # (directions,): and of its rounding


class Comparison:
    """The claims of one subject, and two oracles to hold them against."""

    def __init__(
        self,
        subject: Subject,
        dy: list[Array],
        claims: dict[str, Array],
        rng: np.random.Generator,
        directions: int,
        elements: int,
    ):
        self.subject, self.claims, self.rng, self.directions, self.elements = subject, claims, rng, directions, elements
        self.shapes = [c.shape for c in dy]
        self.dy = np.concatenate([c.reshape(-1) for c in dy]).astype(np.float64)
        self.output_norm = float(np.linalg.norm(subject.vector()))
        self.eps = float(np.finfo(subject.dtype()).eps)
        self.sensitivity = self.measure_sensitivity(dy)
        self.jacobians: list[dict[str, Array]] = []
        self.skipped = ""
        try:
            self.twin = subject.twin()
        except Exception as error:  # whatever the copying of somebody's layer may raise
            self.skip(error)

    def rows(self) -> list[Row]:
        """Return a row for each gradient and oracle."""
        return [row for name, z in self.subject.places().items() for row in self.rows_of(name, z)]

    def rows_of(self, name: str, z: Array) -> Iterator[Row]:
        """Yield the rows of one gradient."""
        if self.claims[name].shape != z.shape:
            fault = wrong_shape(self.claims[name].shape, z.shape)
            yield Row(name, "shape", "", math.inf, 0.0, "", math.nan, math.nan, fault)
        elif z.size:
            every = Elements(z.shape, np.arange(z.size)) if z.size <= self.elements else None
            differences = self.measure("differences", name, every or Random(z.shape, self.directions, self.rng))
            yield self.row("differences", name, differences)
            exact = self.complex_step(name, differences)
            if exact is not None:
                yield self.row("complex step", name, exact)

    # Measuring

    def measure(self, oracle: str, name: str, v: Directions) -> Measurements:
        """Return J v for each direction."""
        exact = oracle == "complex step"
        subject, method = (self.twin, by_complex_step) if exact else (self.subject, by_differences)
        z = subject.places()[name]
        with warnings.catch_warnings(action="error", category=np.exceptions.ComplexWarning):
            rows = [method(subject.vector, z, direction) for direction in v]
        return Measurements(v, *(np.array(column) for column in zip(*rows, strict=True)))

    def measure_sensitivity(self, dy: list[Array]) -> dict[str, float]:
        """Return by how much each gradient changes if all inputs and parameters are rounded, in units of rounding."""
        places = self.subject.places()
        before = {name: z.copy() for name, z in places.items()}
        for z in places.values():
            z *= 1 + self.eps * np.asarray(self.rng.choice([-1, 1], z.shape), z.dtype)
        try:
            self.subject.forward()
            rounded = self.subject.backward(dy, self.subject.no_gradients())
        finally:
            for name, z in places.items():
                z[...] = before[name]
        return {
            name: float(np.linalg.norm((rounded[name] - dz).astype(np.float64))) / self.eps
            for name, dz in self.claims.items()
        }

    def complex_step(self, name: str, differences: Measurements) -> Measurements | None:
        """Return J v by the complex step, or None, from here on, if the layer can't take it."""
        if self.skipped:
            return None
        try:
            exact = self.measure("complex step", name, differences.v)
        except Exception as error:  # whatever somebody's layer may raise when it meets complex numbers
            self.skip(error)
            return None
        bound = self.bound(name, differences, norms(exact.j))
        if not np.all(norms(exact.j - differences.j) <= bound):
            self.skip(f"it disagrees with the differences of {name}: not analytic, or the step crosses a kink")
            return None
        return exact

    def skip(self, reason: object) -> None:
        """Give up the complex step."""
        line = str(reason).partition("\n")[0]
        self.skipped = f"{type(self.subject.layer).__name__}: {line if len(line) <= 200 else line[:200] + ' ...'}"

    # Comparing

    def row(self, oracle: str, name: str, measured: Measurements) -> Row:
        """Compare the claim with J v in each direction, and show the worst place."""
        z, dz = self.subject.places()[name], self.claims[name].astype(np.float64)
        v, j, _, _ = measured
        expected, actual = j @ self.dy, v.along(dz)  # (1)
        bound = self.bound(name, measured, np.linalg.norm(dz))
        if v.complete and 0 < self.dy.size <= self.elements:
            claims = self.jacobian_of(name)
            expected, actual = np.append(expected, j.T), np.append(actual, claims)
            bound = np.append(bound, self.bound(name, measured, norms(claims)[:, None]))
        error = np.abs(expected - actual)
        worst = int(np.argmax(np.nan_to_num(error / bound, nan=np.inf)))
        output, k = divmod(worst, len(j))  # output 0: the random cotangent; after it, each row of the Jacobian
        where = v.where(k) + (f" of {self.output_at(output - 1)}" if output else "")
        numbers = float(error[worst]), float(bound[worst]), where, float(expected[worst]), float(actual[worst])
        row = Row(name, oracle, v.moved, *numbers, tells=bool(np.any(np.abs(expected) > bound)))
        if row.ok:
            return row
        if isinstance(v, Random) and not (closer := self.look_closer(oracle, name, dz)).ok:
            return closer
        fault = name_the_fault(dz, v, j, self.dy, self.shapes_by_name())
        if oracle == "differences" and has_kink(self.subject.vector, z, next(itertools.islice(v, k, None))):
            fault = KINK
        return dataclasses.replace(row, fault=fault)

    def look_closer(self, oracle: str, name: str, dz: Array) -> Row:
        """Compare single elements of a large gradient that is wrong: those where most is claimed, and others."""
        number = min(LOOK_CLOSER, dz.size) // 2
        largest = np.argsort(-np.abs(dz.reshape(-1)))[:number]
        elements = np.union1d(largest, self.rng.choice(dz.size, number, replace=False))
        return self.row(oracle, name, self.measure(oracle, name, Elements(dz.shape, elements)))

    def jacobian_of(self, name: str) -> Array:
        """Return what backward claims for each unit cotangent, as rows: each row of the Jacobian."""
        if not self.jacobians:
            for unit in np.eye(self.dy.size, dtype=self.subject.dtype()):
                self.subject.forward()
                parts = np.split(unit, np.cumsum([math.prod(shape) for shape in self.shapes])[:-1])
                dy = [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]
                self.jacobians.append(self.subject.backward(dy, self.subject.no_gradients()))
        return np.array([claims[name].reshape(-1) for claims in self.jacobians], np.float64)

    def names_of_outputs(self) -> list[str]:
        """Return "y", or "y0", "y1" and so on."""
        return ["y"] if len(self.shapes) == 1 else [f"y{i}" for i in range(len(self.shapes))]

    def output_at(self, element: int) -> str:
        """Return the name of an element of all outputs together."""
        which = 0
        while element >= math.prod(self.shapes[which]):
            element -= math.prod(self.shapes[which])
            which += 1
        return self.names_of_outputs()[which] + (at(element, self.shapes[which]) if self.shapes[which] else "")

    def shapes_by_name(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all outputs and float inputs."""
        outputs = dict(zip(self.names_of_outputs(), self.shapes, strict=True))
        return outputs | {name: x.shape for name, x in self.subject.floats().items()}

    def bound(self, name: str, measured: Measurements, claim: Array) -> Array:
        """Return (2) in each direction, given the size of what is claimed."""
        per_unit = self.output_norm / element_size(self.subject.places()[name])
        sizes = norms(measured.j) + claim + per_unit + self.sensitivity[name] + 0.1
        return measured.bend + ROUNDINGS * measured.rho * sizes  # (2)


def norms(rows: Array) -> Array:
    """Return the norm of each row."""
    return np.linalg.norm(rows, axis=1)
