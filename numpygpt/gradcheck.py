r"""Gradients checked by finite differences, for our layers and for yours.

A layer computes $y = f(z)$ and, given a cotangent $\bar y$, claims a gradient $\bar z$ for each input and parameter
$z$. The claim is that for every direction $v$, the number $F(z) = \langle \bar y, f(z) \rangle$ changes at the rate
$\langle \bar z, v \rangle$. The rate is measured by a central difference, whose error in $h$ begins with $h^2$, and
a Richardson step, which takes the $h^2$ away:

$$D(h) = \frac{F(z + hv) - F(z - hv)}{2h}, \qquad
  \tfrac13\,\big(4 D(h/2) - D(h)\big) = \langle \bar z, v\rangle + O(h^4) \tag{1}$$

$\bar y$ and $v$ are random, and several $v$ are tried: a wrong $\bar z$ differs from the right one by some vector,
which a random direction is almost never orthogonal to. (Ones in place of $\bar y$ would pass a softmax with
gradient 0.)

The bound follows from the arithmetic. The difference of two rounded values of $F$ carries about
$\epsilon\,|\bar y||y|/h$, whatever the size of the gradient; the rest is relative:

$$|\text{error}| \le 10^{-6}\,|\bar z||v| + 10\,\epsilon\,|\bar y||y|/h \tag{2}$$

It takes for granted that nothing inside the layer is much larger than $y$: a layer that subtracts large numbers to
get a small $y$ has more rounding than (2) allows, and should be checked at inputs where it doesn't.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from numpygpt.array import Array

H = 1e-5


class GradientError(AssertionError):
    """A gradient is wrong, or a layer breaks the rules of forward and backward. The message holds the report."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The worst direction of one input or parameter: what was measured, what backward claims, and the bound (2)."""

    name: str
    error: float
    bound: float
    measured: float
    claimed: float

    @property
    def ok(self) -> bool:
        """Whether the error is within the bound (NaN is not)."""
        return self.error <= self.bound


@dataclasses.dataclass(frozen=True)
class Report:
    """The rows of one check; as a string, a table."""

    rows: list[Row]

    @property
    def ok(self) -> bool:
        """Whether every row is."""
        return all(row.ok for row in self.rows)

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.rows), default=4)
        lines = [f"{'':{width}}  {'error':>9}  {'bound':>9}  {'measured':>13}  {'claimed':>13}"]
        for row in self.rows:
            lines.append(
                f"{row.name:{width}}  {row.error:9.2e}  {row.bound:9.2e}  {row.measured:13.6e}  {row.claimed:13.6e}"
                f"  {'ok' if row.ok else 'WRONG'}"
            )
        return "\n".join(lines)


def gradcheck(
    layer: Any,
    *inputs: Array,
    seed: int = 0,
    directions: int = 3,
    raise_on_failure: bool = False,
    **kwargs: Any,
) -> Report:
    """Check `layer.backward` against differences of `layer.forward(*inputs, **kwargs)`, in float64.

    Every float input and every parameter is checked (found through `layer.named_parameters()`, if it has that:
    objects with arrays `.value` and `.grad`). `forward` returns an array, a number or a tuple of arrays; `backward`
    takes as many cotangents and returns the gradient of the float input, a tuple for several, or None if there is
    none. Gradients of parameters must be *added*: they are checked on top of random numbers.

    Returns a Report with the largest error for each. Raises GradientError if a rule is broken (an input or a
    cotangent changed, a gradient of another shape, a forward that isn't deterministic), and if `raise_on_failure`,
    also if a gradient is wrong. TypeError unless all is float64: in float32 differences drown in rounding.
    """
    if directions < 1:
        raise ValueError(f"directions must be at least 1, not {directions}")
    rng = np.random.default_rng(seed)
    inputs = tuple(np.array(x) for x in inputs)  # copies: each is moved by itself, and put back
    parameters = dict(layer.named_parameters()) if hasattr(layer, "named_parameters") else {}
    places = {f"input {i}": x for i, x in enumerate(inputs) if x.dtype.kind == "f"}
    number_of_inputs = len(places)
    places |= {name: p.value for name, p in parameters.items()}
    for name, z in places.items():
        if z.dtype != np.float64:
            raise TypeError(f"gradcheck works in float64, but {name} is {z.dtype}")

    def forward() -> tuple[Array, ...]:
        y = layer.forward(*inputs, **kwargs)
        return y if isinstance(y, tuple) else (np.asarray(y),)

    before = [x.copy() for x in inputs]
    first, y = forward(), forward()
    if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, y, strict=True)):
        raise GradientError("forward gives another result when called again; make it deterministic to check it")
    dy = tuple(rng.standard_normal(a.shape) for a in y)

    def projected() -> float:
        return float(sum(np.vdot(c, a) for c, a in zip(dy, forward(), strict=True)))

    claims = claimed_gradients(layer, parameters, dy, rng, number_of_inputs)
    for x, old in zip(inputs, before, strict=True):
        if not np.array_equal(x, old, equal_nan=x.dtype.kind == "f"):
            raise GradientError("forward or backward changed an input")
    size = float(np.sqrt(sum(np.vdot(c, c) for c in dy)) * np.sqrt(sum(np.vdot(a, a) for a in y)))
    rows = []
    for (name, z), dz in zip(places.items(), claims, strict=True):
        if dz.shape != z.shape:
            raise GradientError(f"{name} has shape {z.shape}, but its gradient has shape {dz.shape}")
        tries = [check_direction(name, projected, z, dz, rng.standard_normal(z.shape), size) for _ in range(directions)]
        rows.append(max(tries, key=lambda row: np.nan_to_num(row.error - row.bound, nan=np.inf)))
    report = Report(rows)
    if raise_on_failure and not report.ok:
        raise GradientError(f"{type(layer).__name__}: a gradient is wrong\n{report}")
    return report


def claimed_gradients(
    layer: Any, parameters: dict[str, Any], dy: tuple[Array, ...], rng: np.random.Generator, number_of_inputs: int
) -> list[Array]:
    """Run backward once; return the gradients of the inputs and what was added to those of the parameters."""
    noise = {name: rng.standard_normal(p.value.shape) for name, p in parameters.items()}
    before = {name: p.grad.copy() for name, p in parameters.items()}
    for name, p in parameters.items():
        p.grad[...] = noise[name]
    given = tuple(c.copy() for c in dy)
    result = layer.backward(*(c if c.ndim else float(c) for c in given))
    if not all(np.array_equal(a, b) for a, b in zip(given, dy, strict=True)):
        raise GradientError("backward changed its cotangent")
    dx = () if result is None else tuple(result) if isinstance(result, tuple | list) else (result,)
    if len(dx) != number_of_inputs:
        raise GradientError(f"backward returned {len(dx)} gradients for {number_of_inputs} float inputs")
    added = [p.grad - noise[name] for name, p in parameters.items()]
    for name, p in parameters.items():
        p.grad[...] = before[name]
    return [*dx, *added]


def check_direction(name: str, projected: Callable[[], float], z: Array, dz: Array, v: Array, size: float) -> Row:
    """Compare <dz, v> with (1), moving `z` in place and putting it back."""
    old = z.copy()

    def difference(h: float) -> float:
        z[...] = old + h * v
        above = projected()
        z[...] = old - h * v
        below = projected()
        z[...] = old
        return (above - below) / (2 * h)

    measured = (4 * difference(H / 2) - difference(H)) / 3  # (1)
    claimed = float(np.vdot(dz, v))
    bound = 1e-6 * float(np.linalg.norm(dz) * np.linalg.norm(v)) + 10 * float(np.finfo(z.dtype).eps) * size / H  # (2)
    return Row(name, abs(measured - claimed), bound, measured, claimed)
