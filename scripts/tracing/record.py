"""Run a model forward and backward, and copy every array that its lines make."""

import contextlib
import sys
import zlib
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from numpygpt.array import Array
from numpygpt.device import mover
from numpygpt.layers import CrossEntropy, MultiHeadAttention, ScaledDotProductAttention
from numpygpt.model import TransformerLM
from numpygpt.module import Module, Parameter
from tracing.picture import Snapshot, snapshot
from tracing.source import Statement, watched

MAPS = ("scores", "e", "e / z", "da")  # of attention: queries and keys are their axes


class Place(NamedTuple):
    """A line of a module."""

    path: str  # of the module, such as "layers.0.ln1"
    function: str  # qualified name, such as "RMSNorm.forward"
    statement: Statement


class Step:
    """An array at one moment: a line has just made or changed it. Or a parameter, which no line makes."""

    def __init__(self, number: int, name: str, call: "Call", place: Place | None, seen: Snapshot, mark: int):
        self.number, self.name, self.call, self.place, self.seen, self.mark = number, name, call, place, seen, mark
        self.also: list[Place] = []  # numbered lines that hand it on

    @property
    def backward(self) -> bool:
        """Whether it was made on the way back."""
        return self.call.backward


class Binding(NamedTuple):
    """A name that an array had in a call."""

    name: str
    step: Step
    shape: tuple[int, ...]


class Call:
    """One call of a module's forward or backward."""

    def __init__(self, path: str, module: Module, backward: bool):
        self.path, self.module, self.backward = path, module, backward
        self.items: list[Step | Call] = []  # in order
        self.parameters: dict[str, Step] = {}
        self.arguments: list[Binding] = []
        self.returned: list[Binding] = []
        self.bindings: list[Binding] = []
        self.now: Place | None = None  # the line under way

    def bind(self, made: list[Binding], statement: Statement) -> None:
        """Note the names of what a line made. An array that is changed in place keeps its name, in its new state."""
        if statement.returns and made:  # or else what a function made that it calls
            self.returned = made
        for binding in made:
            same = [i for i, older in enumerate(self.bindings) if older.name == binding.name]
            if statement.in_place and same:
                del self.bindings[same[-1]]
            self.bindings.append(binding)
            if statement.gradient is not None:
                self.bindings.append(binding._replace(name=statement.gradient))


class Recorder:
    """Copies the arrays of calls to the given modules, each under its path.

    Python itself tells when a line has been run (sys.settrace), so the layers run as they are, and no copy of their
    code has to be kept in step with it. Wrapping forward and backward would be simpler, but see no array between the
    first line of a layer and its last. sys.monitoring is quicker, but came with Python 3.12 and shows no frame, in
    which the arrays are.
    """

    def __init__(self, modules: dict[str, Module]):
        self.paths = {id(module): path for path, module in modules.items()}
        self.groups = {
            id(module.attention): module.group for module in modules.values() if isinstance(module, MultiHeadAttention)
        }
        self.steps: list[Step] = []
        self.calls: dict[tuple[str, bool], Call] = {}  # by path, forward and backward
        self._open: list[Call] = []
        self._latest: dict[tuple[int, int, str], Step] = {}  # by the memory that the array lies in
        self._held: list[Array] = []  # so that no memory is used again

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record while the block runs."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, _: Any) -> "Watch | None":
        """Watch a call of a module, or of a function that it calls and that has numbered lines."""
        lines = watched(frame.f_code)
        if not lines:
            return None
        if frame.f_code.co_name not in ("forward", "backward"):
            return Watch(self, self._open[-1], lines, own=False) if self._open else None
        module = frame.f_locals.get("self")
        if not isinstance(module, Module) or id(module) not in self.paths:
            return None
        call = Call(self.paths[id(module)], module, frame.f_code.co_name == "backward")
        caller = self._open[-1] if self._open else None
        self.calls[call.path, call.backward] = call
        if caller is not None:
            caller.items.append(call)
        self._open.append(call)
        self._receive(call, frame, caller)
        return Watch(self, call, lines, own=True)

    def _receive(self, call: Call, frame: FrameType, caller: Call | None) -> None:
        """Note the parameters and arguments of a call. An argument that is new was made by the line of the caller."""
        for name, item in vars(call.module).items():
            if isinstance(item, Parameter) and not call.backward:
                call.parameters[name] = Step(0, name, call, None, snapshot(to_host(item.value)), 0)
        place = caller.now if caller is not None else None
        code = frame.f_code
        for name in code.co_varnames[1 : code.co_argcount]:
            value = frame.f_locals[name]
            if isinstance(value, float):
                value = np.array(value)
            if is_array(value) and value.dtype.kind == "f":
                call.arguments.append(Binding(name, self._step(call, name, value, place), value.shape))

    def leave(self, call: Call) -> None:
        """Close a call."""
        self._open.remove(call)

    def finish(self, call: Call, place: Place, frame: FrameType, returned: Any = None) -> None:
        """Note what a line has made. One that makes nothing new only hands on what a call in it has made last."""
        statement = place.statement
        if statement.makes_room:
            return
        found = []
        if statement.returns:
            values = returned if isinstance(returned, tuple) else (returned,)
            names = [target.name for target in statement.targets] or ["returned"] * len(values)
            found = [(name, name, value) for name, value in zip(names, values, strict=True)]
        for target in statement.targets if not statement.returns else ():
            name, part, whole = target.name, *(eval(get, frame.f_globals, frame.f_locals) for get in target.code)
            if is_array(part) and not np.may_share_memory(part, whole):
                name, part = target.whole_name, whole  # rows picked by index are a copy
            found.append((name, target.whole_name, part))
        if isinstance(call.module, ScaledDotProductAttention) and [name for name, *_ in found] == ["e", "z"]:
            found.append(("e / z", "e / z", found[0][2] / found[1][2]))  # the weights, which no line computes
        bindings = []
        for name, whole_name, value in found:
            if isinstance(value, float) and statement.numbers:
                value = np.array(value)
            if is_array(value) and (value.dtype.kind in "fc" or statement.numbers):
                step = self._step(call, name, value, place, statement)
                bindings.append(Binding(whole_name, step, value.shape))
        call.bind(bindings, statement)
        if statement.numbers and not bindings and self.steps:
            self.steps[-1].also.append(place)

    def _step(
        self, call: Call, name: str, value: Array, place: Place | None, just_run: Statement | None = None
    ) -> Step:
        """Return the step that an array is: a new one, unless a line has just handed it on as it was."""
        key, numbers = (address(value), value.size, value.dtype.str), to_host(value)
        mark = zlib.crc32(np.ascontiguousarray(numbers).data)
        step = self._latest.get(key)
        numbered = just_run is not None and bool(just_run.numbers)
        in_place = just_run is not None and just_run.in_place
        if step is None or step.mark != mark or in_place or (numbered and step.seen.shape != value.shape):
            group = self.groups.get(id(call.module), 1) if name in MAPS else 1
            seen = snapshot(by_head(numbers, group))._replace(shape=value.shape)
            step = Step(len(self.steps) + 1, name, call, place, seen, mark)
            self.steps.append(step)
            call.items.append(step)
            self._latest[key] = step
            self._held.append(value)
        elif numbered and place is not None and place not in (step.place, *step.also):
            step.also.append(place)
        return step


class Watch:
    """What Python calls at each line of one function that is running."""

    def __init__(self, recorder: Recorder, call: Call, lines: dict[int, Statement], own: bool):
        self.recorder, self.call, self.lines, self.own = recorder, call, lines, own
        self.place: Place | None = None

    def __call__(self, frame: FrameType, event: str, value: Any) -> "Watch":
        """Finish the line before this one."""
        if event == "exception":
            self.place = None
        elif event == "line":
            statement = self.lines.get(frame.f_lineno)
            if self.place is None or statement is not self.place.statement:
                self._finish(frame, None)
                path, function = self.call.path, frame.f_code.co_qualname
                self.place = Place(path, function, statement) if statement is not None else None
                if self.own:
                    self.call.now = self.place
        elif event == "return":
            self._finish(frame, value)
            if self.own:
                self.recorder.leave(self.call)
        return self

    def _finish(self, frame: FrameType, returned: Any) -> None:
        if self.place is not None and (self.own or self.place.statement.numbers):
            self.recorder.finish(self.call, self.place, frame, returned)


def is_array(value: Any) -> bool:
    """Whether it is an array, of any device."""
    return hasattr(value, "__array_function__") and not isinstance(value, np.generic)


def address(array: Array) -> int:
    """Return where the numbers of an array begin, in the memory of its device."""
    return array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr


to_host = mover("cpu")


def by_head(array: np.ndarray, group: int) -> np.ndarray:
    """Return a map of attention as (head, query, key); in the code, the heads of a group are rows of one array."""
    if group == 1:
        return array
    rows, keys = array.shape[-2:]
    return array.reshape(-1, rows // group, group, keys).swapaxes(1, 2).reshape(-1, rows // group, keys)


class Run(NamedTuple):
    """What one forward and one backward left."""

    recorder: Recorder
    ids: np.ndarray
    loss: float
    logits: np.ndarray


def trace(model: TransformerLM, ids: np.ndarray, layers: list[int] | None = None) -> Run:
    """Run a model and the loss forward and backward, and record all blocks, or those given.

    All ids but the last are read, and all but the first are targets.
    """
    loss = CrossEntropy()
    inputs, targets = (np.asarray(x, like=model.flat.value) for x in (ids[:-1], ids[1:]))
    hidden = tuple(f"layers.{i}." for i in range(len(model.layers)) if layers is not None and i not in layers)
    modules = {path: m for path, m in model.named_modules() if not f"{path}.".startswith(hidden)}
    recorder = Recorder({**modules, "loss": loss})
    model.zero_grad()
    with recorder.recording():
        logits = model.forward(inputs)
        value = loss.forward(logits, targets)
        model.backward(loss.backward())
    return Run(recorder, ids, value, to_host(logits))
