"""The rules of forward and backward, tried one by one; the gradients that backward claims come out of it.

A layer changes nothing that it is given. The same input gives the same output and the same gradients, whatever was
computed before. A gradient has the shape and the dtype of its array, and that of a parameter is added to what is there.
"""

from typing import Any

import numpy as np

from numpygpt.array import Array
from numpygpt.gradcheck.subject import BrokenRuleError, Subject, is_float

Arrays = dict[str, Array]


def same(a: Arrays, b: Arrays) -> bool:
    """Whether two sets of arrays are equal bit for bit (NaN equals NaN)."""
    return all(np.array_equal(a[name], b[name], equal_nan=a[name].dtype.kind == "f") for name in a)


def copies(arrays: dict[str, Any]) -> Arrays:
    """Return copies."""
    return {name: np.array(x) for name, x in arrays.items()}


class Rules:
    """A subject under observation."""

    def __init__(self, subject: Subject, rng: np.random.Generator, accumulates: bool):
        self.subject, self.rng, self.accumulates = subject, rng, accumulates
        self.faults: list[str] = []

    def try_all(self) -> tuple[list[Array], Arrays]:
        """Return a cotangent for each output and the claimed gradients; `faults` are what was found on the way.

        BrokenRuleError if a fault makes it senseless to go on.
        """
        y = self.forward()
        if not same(y, self.forward()):
            raise BrokenRuleError("forward isn't deterministic; let it draw the same numbers each time, or none")
        for name, a in y.items():
            if not np.isfinite(a).all():
                raise BrokenRuleError(f"{name} isn't finite, so it has no derivative; take other inputs")
        dy = self.random_like(y)
        claims = self.backward(dy, self.subject.no_gradients())
        self.look_at_dtypes(y, claims)
        self.call_with_other_inputs()
        if not same(y, self.forward()):
            raise BrokenRuleError("state leaks: after a call with another input, forward gives another result")
        start = self.random_like(self.subject.no_gradients())
        later = self.backward(dy, start)
        for name in claims:
            self.look_at_addition(name, claims[name], later[name], start.get(name))
        return list(dy.values()), claims

    def note(self, fault: str) -> None:
        """Keep a fault, once."""
        if fault not in self.faults:
            self.faults.append(fault)

    def random_like(self, arrays: Arrays) -> Arrays:
        """Return standard normal numbers of the same shapes and dtypes."""
        return {name: np.asarray(self.rng.standard_normal(x.shape), x.dtype) for name, x in arrays.items()}

    def forward(self) -> Arrays:
        """Return copies of the outputs, by name. Nothing may have changed."""
        before, dtype = self.given(), self.subject.dtype()
        outputs = [y if hasattr(y, "dtype") else np.asarray(y, dtype) for y in self.subject.forward()]
        y = copies({f"output {i}": a for i, a in enumerate(outputs)})
        self.nothing_changed(before, "forward")
        return y

    def backward(self, dy: Arrays, start: Arrays) -> Arrays:
        """Return the gradients, by name. Nothing may have changed, nor the cotangent."""
        before, cotangents = self.given(), copies(dy)
        claims = self.subject.backward(list(cotangents.values()), start)
        self.nothing_changed(before, "backward")
        if not same(dy, cotangents):
            self.note("backward overwrites its cotangent")
        return claims

    def given(self) -> Arrays:
        """Return copies of all inputs, array arguments and parameters."""
        inputs = {f"input {i}": x for i, x in enumerate(self.subject.inputs)}
        options = {f"argument {name}": x for name, x in self.subject.kwargs.items() if hasattr(x, "dtype")}
        return copies(inputs | options | {name: slot.value for name, slot in self.subject.slots.items()})

    def nothing_changed(self, before: Arrays, method: str) -> None:
        """Raise if an input or parameter is no longer what it was."""
        now = self.given()
        for name in before:
            if not same({name: now[name]}, before):
                raise BrokenRuleError(f"{method} changes {name}")

    def call_with_other_inputs(self) -> None:
        """Run forward and backward with the elements of each input in another order, for traces to be left."""
        inputs = self.subject.inputs
        self.subject.inputs = [
            self.rng.permutation(x.reshape(-1)).reshape(x.shape) if is_float(x) else x for x in inputs
        ]
        self.backward(
            self.random_like(self.forward()),
            self.random_like(self.subject.no_gradients()),
        )
        self.subject.inputs = inputs

    def look_at_dtypes(self, y: Arrays, claims: Arrays) -> None:
        """Everything is to be in the dtype of the inputs and parameters."""
        dtype = self.subject.dtype()
        for name, x in (y | {f"the gradient of {name}": dz for name, dz in claims.items()}).items():
            if x.dtype != dtype:
                self.note(f"{name} is {x.dtype}, not {dtype}")

    def look_at_addition(self, name: str, first: Array, later: Array, start: Array | None) -> None:
        """Compare the gradients of two equal calls, those of parameters begun at 0 and at `start`."""
        if first.shape != later.shape or not np.isfinite(first).all():
            return  # of this, the comparison with the oracles will tell
        if start is None or not self.accumulates or first.shape != start.shape:
            start = np.zeros_like(first)
        size = float(np.linalg.norm(first) + np.linalg.norm(start))

        def equal(a: Array, b: Array) -> bool:
            return float(np.linalg.norm(a - b)) <= 100 * float(np.finfo(first.dtype).eps) * size

        if equal(later, start + first):
            return
        if equal(later, first):
            self.note(f"the gradient of {name} is assigned, not added to what was there")
        else:
            self.note(f"state leaks: after a call with another input, the gradient of {name} is another")
