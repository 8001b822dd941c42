"""Copies of a model, one for each thread, that share its weights and add into its gradient.

A replica keeps what its own backward needs, and so runs beside the others. All add into one gradient, each parameter's
in turn: replica 0, then 1, and so on. So the sums are formed in the same order, to the same bits, however the threads
run; nobody waits long, since all do the same work; and there is no second gradient, nor a pass to sum it up.
"""

import copy
import threading
from collections.abc import Callable, Iterable
from typing import Any, Self

import numpy as np

from numpygpt.array import Array
from numpygpt.layers.dropout import Dropout
from numpygpt.model import TransformerLM
from numpygpt.threads import BrokenOff, Team


class Turns:
    """Whose turn it is to add to a parameter's gradient."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.begin(1)

    def begin(self, replicas: int) -> None:
        """Begin a round of so many replicas; of 0, nobody has to wait."""
        self.replicas, self.next, self.broken = replicas, 0, False

    def wait(self, number: int) -> None:
        """Return when it is replica `number`'s turn; BrokenOff if the round was broken off."""
        with self.changed:
            self.changed.wait_for(lambda: self.next == number or self.broken or not self.replicas)
            if self.broken:
                raise BrokenOff

    def end(self) -> None:
        """Let the next replica have its turn."""
        with self.changed:
            self.next = (self.next + 1) % max(self.replicas, 1)
            self.changed.notify_all()

    def break_off(self) -> None:
        """Let nobody wait any longer: one that had its turn to come has failed."""
        with self.changed:
            self.broken = True
            self.changed.notify_all()


class SharedGradient:
    """What a layer of a replica finds in `parameter.grad`: `+=` waits for its turn and adds to the model's gradient."""

    def __init__(self, grad: Array, turns: Turns, number: int):
        self.grad, self.turns, self.number = grad, turns, number

    def __iadd__(self, summand: Array) -> Self:
        self.turns.wait(self.number)
        self.grad += summand
        self.turns.end()
        return self

    def __getitem__(self, rows: Array) -> "SharedRows":
        return SharedRows(self, rows)

    def __setitem__(self, rows: Array, value: "SharedRows") -> None:
        """Do nothing: `grad[rows] += x` has added to the rows before it assigns them."""


class SharedRows:
    """Some rows of a SharedGradient: `grad[rows] += x`, with no row twice, adds to them in turn."""

    def __init__(self, shared: SharedGradient, rows: Array):
        self.shared, self.rows = shared, rows

    def __iadd__(self, summand: Array) -> Self:
        self.shared.turns.wait(self.shared.number)
        self.shared.grad[self.rows] += summand
        self.shared.turns.end()
        return self


class Replicas:
    """So many replicas of a model, each run in a thread of its own. Of one, the model itself is the replica."""

    def __init__(self, model: TransformerLM, count: int):
        self.team = Team(count)
        self.turns = [Turns() for _ in model.parameters()]
        self.models = [model] if count == 1 else [self._copy(model, number) for number in range(count)]
        if count > 1:
            dropouts = [[m for m in replica.modules() if isinstance(m, Dropout)] for replica in [model, *self.models]]
            for original, *copies in zip(*dropouts, strict=True):
                for dropout, rng in zip(copies, original.rng.spawn(count), strict=True):
                    dropout.rng = rng

    def _copy(self, model: TransformerLM, number: int) -> TransformerLM:
        shared = [model.flat.value, model.flat.grad]
        for module in model.modules():
            shared += [item for item in vars(module).values() if isinstance(item, np.ndarray)]  # tables
        replica = copy.deepcopy(model, {id(array): array for array in shared})
        for p, turns in zip(replica.parameters(), self.turns, strict=True):
            p._grad = SharedGradient(p.grad, turns, number)
        for module in replica.modules():
            del module.saved
        return replica

    def run(self, function: Callable[..., Any], parts: Iterable[tuple], at_once: bool = True) -> list[Any]:
        """Return [function(replica, *part) for replica, part in zip(replicas, parts)], for at most as many parts.

        Each in a thread, or one after the other. An error is raised when all have ended. Each call that runs a backward
        runs one, or all run as many.
        """
        parts = list(parts)
        for turns in self.turns:
            turns.begin(len(parts) if at_once else 0)
        if not at_once:
            return [function(model, *part) for model, part in zip(self.models, parts, strict=False)]

        def call(model: TransformerLM, part: tuple) -> Any:
            try:
                return function(model, *part)
            except BaseException:
                for turns in self.turns:
                    turns.break_off()
                raise

        return self.team.map(call, self.models[: len(parts)], parts)
