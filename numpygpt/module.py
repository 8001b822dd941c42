"""Parameters and the tree of modules that holds them.

Every parameter is a view into a flat buffer: one vector of values and one of gradients. A layer made alone
has a small buffer for each of its parameters; a model lays all of them into one. Whatever treats all weights
alike (optimiser, clipping, moving to a device) then works on whole vectors and never needs to know a layer.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from numpygpt.array import Array
from numpygpt.device import mover

BLOCK = 2**18  # elements of a gradient that are computed and then added while they are in the cache


class Parameter:
    """A learned array: `.value`, and `.grad` of the same shape, into which every backward adds.

    Both are views into `buffer`. Assigning to either copies into the view (shapes must match), so a parameter
    never leaves its buffer unnoticed. A contiguous array given to the constructor is not copied.
    """

    def __init__(self, value: Array):
        if value.dtype.kind != "f":
            raise TypeError(f"parameters are floating-point numbers, not {value.dtype}")
        self.name = ""  # its first name in the model; only messages use it
        self.shape: tuple[int, ...] = value.shape
        self.size = int(value.size)
        self.buffer: FlatBuffer
        self.offset: int
        FlatBuffer([self], value.reshape(-1))

    @property
    def value(self) -> Array:
        """The weights."""
        return self._value

    @value.setter
    def value(self, value: Array) -> None:
        self._copy(self._value, value)

    @property
    def grad(self) -> Array:
        """The gradient of the loss with respect to the weights, summed over backward calls."""
        return self._grad

    @grad.setter
    def grad(self, grad: Array) -> None:
        self._copy(self._grad, grad)

    @property
    def trainable(self) -> bool:
        """Whether it learns. If not, it is frozen: what a backward adds to its gradient is forgotten."""
        return self.buffer.grad is not None

    def _copy(self, view: Array, array: Array) -> None:
        if array is view:  # `p.grad += g` added in place, then assigns the same view back
            return
        if array.shape != self.shape:
            raise ValueError(f"parameter {self.name!r} has shape {self.shape}, not {array.shape}")
        view[...] = array

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices (linear and embedding weights), not to gains and biases."""
        return len(self.shape) >= 2

    def blocks(self) -> list[slice]:
        """Cut the rows into blocks of about BLOCK elements: a gradient added block by block is never held twice.

        On another device than the CPU there is one block.
        """
        rows = self.shape[0]
        at_once = max(1, BLOCK * rows // self.size) if isinstance(self.buffer.value, np.ndarray) else rows
        return [slice(start, min(start + at_once, rows)) for start in range(0, rows, at_once)]

    def place(self, buffer: "FlatBuffer", offset: int) -> None:
        """Become a view into `buffer`, from element `offset` on."""
        self.buffer, self.offset = buffer, offset
        here = slice(offset, offset + self.size)
        self._value = buffer.value[here].reshape(self.shape)
        self._grad = NO_GRADIENT if buffer.grad is None else buffer.grad[here].reshape(self.shape)

    def __getstate__(self) -> dict[str, Any]:
        # A copied or unpickled view would be an array of its own: leave the views out and make them anew.
        return {k: v for k, v in vars(self).items() if k not in ("_value", "_grad")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Copying follows a circle (buffer, its parameters, their buffer): whichever is whole last makes the views.
        vars(self).update(state)
        if hasattr(self.buffer, "grad"):
            self.place(self.buffer, self.offset)

    def __repr__(self) -> str:
        return f"Parameter({self.name!r}, shape={self.shape}, dtype={self.value.dtype})"


class NoGradient:
    """What a layer finds in `grad` of a frozen parameter: `grad += x` and `grad[rows] += x` do nothing."""

    def __iadd__(self, summand: Array) -> Self:
        return self

    def __getitem__(self, rows: Array) -> Self:
        return self

    def __setitem__(self, rows: Array, value: Self) -> None:
        """Do nothing."""


NO_GRADIENT = NoGradient()


class FlatBuffer:
    """A vector of values and a vector of gradients, and the parameters that are views into them.

    If it is frozen, there are no gradients (`grad` is None), and nothing takes their memory.
    """

    grad: Array

    def __init__(self, parameters: Iterable[Parameter], value: Array | None = None):
        """Lay `parameters` end to end, in the order given, keeping their values (or taking `value`)."""
        self.parameters = list(parameters)
        if value is None:
            dtypes = {str(p.value.dtype) for p in self.parameters}
            if len(dtypes) > 1:
                raise TypeError(f"one flat buffer holds one dtype, but these parameters have {sorted(dtypes)}")
            value = np.concatenate([p.value.reshape(-1) for p in self.parameters])
        self.value = value
        self.freeze(False)

    def _place(self) -> None:
        offset = 0
        for p in self.parameters:
            p.place(self, offset)
            offset += p.size

    def convert(self, function: Callable[[Array], Array]) -> None:
        """Replace both vectors by `function` of them (a move to another device); parameters follow."""
        self.value, self.grad = function(self.value), None if self.grad is None else function(self.grad)
        self._place()

    def freeze(self, frozen: bool = True) -> None:
        """Give up the gradients: the parameters learn no more. Or let them learn, from gradients of zero."""
        # Unlike those of zeros_like, these zeros take no memory until they are used.
        self.grad = None if frozen else np.zeros(self.value.shape, self.value.dtype, like=self.value)
        self._place()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for p in self.parameters:
            if hasattr(p, "offset"):
                p.place(self, p.offset)


class Span(NamedTuple):
    """Elements start..stop-1 of a buffer: a whole vector for those who need no shapes."""

    buffer: FlatBuffer
    start: int
    stop: int
    decays: bool

    @property
    def value(self) -> Array:
        """The weights, a view."""
        return self.buffer.value[self.start : self.stop]

    @property
    def grad(self) -> Array:
        """Their gradients, a view."""
        return self.buffer.grad[self.start : self.stop]


def spans(parameters: Iterable[Parameter]) -> list[Span]:
    """Return the fewest vectors that cover those of `parameters` that learn, each once: neighbours are joined.

    A vector holds either matrices or gains and biases, so that weight decay is a property of the whole of it.
    A model, whose matrices lie before its gains, gives two.
    """
    unique = {id(p): p for p in parameters if p.trainable}.values()
    rank: dict[int, int] = {}
    for p in unique:
        rank.setdefault(id(p.buffer), len(rank))
    joined: list[Span] = []
    for p in sorted(unique, key=lambda p: (rank[id(p.buffer)], p.offset)):
        last = joined[-1] if joined else None
        if last and last.buffer is p.buffer and last.stop == p.offset and last.decays == p.decays:
            joined[-1] = last._replace(stop=p.offset + p.size)
        else:
            joined.append(Span(p.buffer, p.offset, p.offset + p.size, p.decays))
    return joined


class Module:
    """A layer, or a tree of layers.

    A layer has `forward`, which keeps in `self.saved` what `backward` will need, and `backward`, which takes the
    gradient of the loss with respect to forward's output (the cotangent), *adds* the gradients of its parameters
    to their `.grad`, and returns the gradient with respect to forward's input. `backward` belongs to the latest
    `forward`; called twice, it adds twice. Neither changes an array that it was given.

    What forward keeps may be its input or its output itself, not a copy: change neither in place before backward.
    """

    training = True
    keeping = True  # what backward needs; not so while evaluating

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward."""
        return self.forward(*args, **kwargs)

    forward: Callable[..., Any]
    backward: Callable[..., Any]

    @property
    def saved(self) -> Any:
        """What the latest forward kept for backward. AttributeError if there is nothing."""
        if "saved" not in vars(self):
            raise AttributeError(f"{type(self).__name__}: backward needs a forward before it, and one without a cache")
        return vars(self)["saved"]

    @saved.setter
    def saved(self, arrays: Any) -> None:
        if self.keeping:
            vars(self)["saved"] = arrays

    @saved.deleter
    def saved(self) -> None:
        if self.keeping:
            vars(self).pop("saved", None)

    def children(self) -> Iterator[tuple[str, "Module"]]:
        """Yield the modules held as attributes, or in lists, tuples and dicts that are, with their names."""
        for name, item in self._items():
            if isinstance(item, Module):
                yield name, item

    def _items(self) -> Iterator[tuple[str, Any]]:
        """Yield all attributes, and instead of a list, tuple or dict what it holds."""
        stack = list(vars(self).items())[::-1]
        while stack:
            name, item = stack.pop()
            if isinstance(item, list | tuple):
                stack += [(f"{name}.{i}", element) for i, element in enumerate(item)][::-1]
            elif isinstance(item, dict):
                stack += [(f"{name}.{key}", element) for key, element in item.items()][::-1]
            else:
                yield name, item

    def modules(self) -> Iterator["Module"]:
        """Yield this module and all below it (one that is shared comes more than once)."""
        for _, module in self.named_modules():
            yield module

    def named_modules(self, name: str = "") -> Iterator[tuple[str, "Module"]]:
        """Yield this module under `name`, and all below it with their dotted names (one that is shared under each)."""
        yield name, self
        for child_name, child in self.children():
            yield from child.named_modules(f"{name}.{child_name}" if name else child_name)

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Yield each parameter once, with its dotted name; a tied one under the first of its names."""
        seen: set[int] = set()
        for name, p in self._all_named_parameters(prefix):
            if id(p) not in seen:
                seen.add(id(p))
                yield name, p

    def _all_named_parameters(self, prefix: str) -> Iterator[tuple[str, Parameter]]:
        for name, item in self._items():
            if isinstance(item, Parameter):
                yield prefix + name, item
        for name, child in self.children():
            yield from child._all_named_parameters(f"{prefix}{name}.")

    def parameters(self) -> list[Parameter]:
        """Return each parameter once."""
        return [p for _, p in self.named_parameters()]

    def buffers(self) -> list[FlatBuffer]:
        """Return each buffer that holds parameters of this module, once."""
        return list({id(p.buffer): p.buffer for p in self.parameters()}.values())

    def state_dict(self) -> dict[str, Array]:
        """Return a copy of every parameter's value, by name."""
        return {name: p.value.copy() for name, p in self.named_parameters()}

    def load_state_dict(self, state: dict[str, Array]) -> None:
        """Copy values from `state`. Names and shapes must match both ways; nothing is changed if they don't.

        A second name of a tied parameter may be present, if it holds the same values.
        """
        own = dict(self.named_parameters())
        names = {id(p): name for name, p in own.items()}
        tied = {name: names[id(p)] for name, p in self._all_named_parameters("") if name not in own}
        missing = sorted(own.keys() - state.keys())
        unknown = sorted(state.keys() - own.keys() - tied.keys())
        if missing or unknown:
            raise ValueError(f"state does not fit this module: missing {missing}, unknown {unknown}")
        for name, p in own.items():
            if state[name].shape != p.shape:
                raise ValueError(f"{name} has shape {p.shape} here and {state[name].shape} in the given state")
            if state[name].dtype.kind != "f":
                raise ValueError(f"{name} must hold floating-point numbers, not {state[name].dtype}")
        for name, first in tied.items():
            if name in state and not np.array_equal(state[name], state[first]):
                raise ValueError(f"{name} is tied to {first} here, but the given state holds different values")
        for name, p in own.items():
            p.value = state[name]

    def zero_grad(self) -> None:
        """Set every gradient to zero."""
        for span in spans(self.parameters()):
            span.grad[...] = 0

    def train(self, mode: bool = True) -> Self:
        """Switch to training (dropout acts), here and below."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        """Switch to evaluation (dropout is the identity), here and below."""
        return self.train(False)

    def to(self, device: str | Callable[[Array], Array]) -> Self:
        """Move parameters and tables to `device`: "cpu", "cuda" (through CuPy), or a function of an array.

        A layer of a model can't be moved by itself: ValueError.
        """
        move = mover(device) if isinstance(device, str) else device
        own = {id(p) for p in self.parameters()}
        if any(id(p) not in own for buffer in self.buffers() for p in buffer.parameters):
            raise ValueError("this layer shares its buffer with a whole model: move the model")
        for buffer in self.buffers():
            buffer.convert(move)
        for module in self.modules():
            vars(module).pop("saved", None)
            for name, item in vars(module).items():
                if hasattr(item, "__array_function__"):
                    setattr(module, name, move(item))
        return self


@contextlib.contextmanager
def evaluating(modules: Sequence[Module]) -> Iterator[None]:
    """Let modules evaluate, and keep nothing for a backward; then give each back its mode.

    So an evaluation needs the memory of one layer, not of all, and a backward that is pending stays possible.
    """
    before = [(module, module.training, module.keeping) for module in modules]
    for module in modules:
        module.training = module.keeping = False
    try:
        yield
    finally:
        for module, training, keeping in before:
            module.training, module.keeping = training, keeping
