"""What is checked: a layer with its inputs and parameters, as arrays to be moved and functions to be called."""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np

from numpygpt.array import Array
from numpygpt.gradcheck.complex_step import complexified, undressed
from numpygpt.module import FlatBuffer, Parameter


def is_float(x: Any) -> bool:
    """Whether `x` is an array that has a gradient."""
    return x is not None and x.dtype.kind == "f"


class BrokenRuleError(Exception):
    """A layer breaks a rule of forward and backward, and nothing further can be said about it."""


def can_be_set(x: Any) -> bool:
    """Whether `x` is an array to be written to: no number, not even NumPy's."""
    return hasattr(x, "__setitem__") and getattr(getattr(x, "flags", None), "writeable", True)


ABSENT: Any = object()  # nothing, where None may be something


class Slot:
    """Where a parameter is kept: an object, its attribute for the value and the one for the gradient.

    If the two hold dicts or lists of arrays, `key` is the parameter's place in both.
    """

    def __init__(self, holder: Any, value: str = "value", grad: str = "grad", key: Any = None):
        self.holder, self.value_name, self.grad_name, self.key = holder, value, grad, key
        if not hasattr(self.value, "dtype") or isinstance(self.value, np.generic):
            raise TypeError(f"{type(holder).__name__}.{value} must be an array, not {type(self.value).__name__}")
        if not can_be_set(self.value):
            raise TypeError(f"{type(holder).__name__}.{value} is read-only, but has to be moved")

    def get(self, name: str) -> Any:
        """Return what is there, or ABSENT."""
        found: Any = getattr(self.holder, name, ABSENT)
        if self.key is None or found is ABSENT or found is None:
            return found
        there = self.key in found if isinstance(found, dict) else self.key < len(found)
        return found[self.key] if there else ABSENT

    def set(self, name: str, x: Any) -> None:
        """Put something there; ABSENT takes away what is."""
        if self.key is not None:
            container = getattr(self.holder, name)
            if x is ABSENT:
                del container[self.key]
            else:
                container[self.key] = x
        elif x is ABSENT:
            delattr(self.holder, name)
        else:
            setattr(self.holder, name, x)

    @property
    def value(self) -> Array:
        """The weights."""
        return self.get(self.value_name)

    @property
    def grad(self) -> Array:
        """Their gradient."""
        return self.get(self.grad_name)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Restore at the end what was there: the same arrays and numbers, or no gradient if there was none."""
        before = [(name, x, copy.copy(x)) for name in (self.value_name, self.grad_name) for x in [self.get(name)]]
        try:
            yield
        finally:
            for name, x, numbers in before:
                if can_be_set(x):
                    x[...] = numbers
                if self.get(name) is not x:
                    self.set(name, x)

    def start_from(self, grad: Array) -> None:
        """Put `grad` where backward will add."""
        now = self.get(self.grad_name)
        if can_be_set(now) and np.shape(now) == grad.shape:
            now[...] = grad
        else:
            self.set(self.grad_name, grad.astype(self.value.dtype))

    def complexify(self) -> None:
        """Replace the value by a complex array in its guise."""
        if isinstance(self.holder, Parameter | FlatBuffer):
            buffer = self.holder.buffer if isinstance(self.holder, Parameter) else self.holder
            if undressed(buffer.value).dtype.kind != "c":
                buffer.convert(complexified)
        else:
            self.set(self.value_name, complexified(self.value))


def slots_of(layer: Any, parameters: Mapping[str, Any] | None) -> dict[str, Slot]:
    """Return where each parameter is kept, by name: objects of two arrays, or attributes of the layer."""
    if parameters is None:
        named = layer.named_parameters() if hasattr(layer, "named_parameters") else ()
        parameters = {name: p for name, p in named if getattr(p, "trainable", True)}
    slots: dict[str, Slot] = {}
    for name, p in parameters.items():
        held = getattr(layer, name, None) if isinstance(p, str) else None
        if isinstance(held, dict | list):
            keys = held if isinstance(held, dict) else range(len(held))
            slots |= {f"{name}.{key}": Slot(layer, name, p, key) for key in keys}
        else:
            slots[name] = Slot(layer, name, p) if isinstance(p, str) else Slot(p)
    return slots


class Subject:
    """A layer, its inputs (copies), and its parameters by name."""

    def __init__(
        self, layer: Any, inputs: tuple[Array, ...], parameters: Mapping[str, Any] | None, kwargs: dict[str, Any]
    ):
        self.layer, self.given, self.kwargs = layer, parameters, copy.deepcopy(kwargs)
        self.inputs: list[Any] = [None if x is None else np.array(x) for x in inputs]  # None: an option left out
        self.slots = slots_of(layer, parameters)
        self.numbers: list[bool] = []  # which outputs are Python's numbers

    def floats(self) -> dict[str, Array]:
        """Return the inputs that have gradients, by name."""
        return {f"input {i}": x for i, x in enumerate(self.inputs) if is_float(x)}

    def places(self) -> dict[str, Array]:
        """Return all arrays that have gradients, by name: to be changed in place."""
        return self.floats() | {name: slot.value for name, slot in self.slots.items()}

    def dtype(self) -> np.dtype:
        """Return the dtype of all places: TypeError unless there are any and it is one, float64 or float32."""
        dtypes = {name: z.dtype for name, z in self.places().items()}
        if not dtypes:
            raise TypeError("there is nothing to check: no input holds floats, and no parameters are known")
        if len(set(dtypes.values())) > 1 or not all(dtype in (np.float64, np.float32) for dtype in dtypes.values()):
            listed = ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
            raise TypeError(f"inputs and parameters must be all float64 or all float32, but {listed}")
        return next(iter(dtypes.values()))

    def forward(self) -> tuple[Any, ...]:
        """Return the outputs; one alone in a tuple."""
        y = self.layer.forward(*self.inputs, **self.kwargs)
        outputs = tuple(y) if isinstance(y, tuple | list) else (y,)
        strange = [type(y).__name__ for y in outputs if not (hasattr(y, "dtype") or isinstance(y, int | float))]
        if strange:
            raise TypeError(f"forward must return an array, a number or a tuple of these, not {strange[0]}")
        self.numbers = [not hasattr(y, "dtype") for y in outputs]
        return outputs

    def vector(self) -> Array:
        """Return all outputs as one vector, in float64 or complex128."""
        parts = [np.asarray(getattr(y, "number", undressed(y))).reshape(-1) for y in self.forward()]
        return np.concatenate([part.astype(np.result_type(part, np.float64)) for part in parts])

    def backward(self, dy: list[Array], start: Mapping[str, Array]) -> dict[str, Array]:
        """Run backward with the parameters' gradients beginning at `start`.

        Return a copy of what it says for each input, and of what is then the gradient of each parameter.
        """
        for name, slot in self.slots.items():
            slot.start_from(start[name])
        given = (c if c.ndim else c.item() if number else c[()] for c, number in zip(dy, self.numbers, strict=True))
        result = self.layer.backward(*given)
        dx = list(result) if isinstance(result, tuple | list) else [] if result is None else [result]
        floats = self.floats()
        if len(dx) == len(self.inputs):  # with something, None maybe, for those that are no floats
            dx = [g for g, x in zip(dx, self.inputs, strict=True) if is_float(x)]
        if len(dx) != len(floats):
            raise BrokenRuleError(f"backward returns {len(dx)} gradients for {len(floats)} float inputs")
        claims = dict(zip(floats, dx, strict=True)) | {name: slot.grad for name, slot in self.slots.items()}
        return {name: np.array(dz) for name, dz in claims.items()}

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Restore all parameters and their gradients at the end."""
        with contextlib.ExitStack() as stack:
            for slot in self.slots.values():
                stack.enter_context(slot.put_back())
            yield

    def no_gradients(self) -> dict[str, Array]:
        """Return zeros for each parameter, for backward to start from."""
        return {name: np.zeros_like(slot.value) for name, slot in self.slots.items()}

    def twin(self) -> Self:
        """Return a copy of it all, in which floats are complex arrays in the guise of real ones."""
        layer, given, kwargs = copy.deepcopy((self.layer, self.given, self.kwargs))
        twin = type(self)(layer, tuple(self.inputs), given, kwargs)
        twin.inputs = [complexified(x) if is_float(x) else x for x in twin.inputs]
        for slot in twin.slots.values():
            slot.complexify()
        return twin
