"""Where the time of a step goes, on one thread: by layer, and by kind of work. The package is timed from outside.

Every forward and backward is wrapped, and einsum, np.matmul and the optimiser. A wrapped function's own time is what it
took, less what wrapped functions took inside it. It goes to the layer on top of the stack, and to its own kind.
"""

import collections
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.ours import make_trainer
from benchmarks.report import table
from benchmarks.sizes import Size, batches, load_weights
from benchmarks.timing import WARM_UP
from numpygpt.einsum import einsum
from numpygpt.module import Module
from numpygpt.optim import Adam
from numpygpt.train import Trainer

PRODUCTS, AROUND = "matrix products (np.matmul)", "einsum besides: sums, copies, views"
LAYERS, OPTIMISER = "layers besides: elementwise work, gathering", "optimiser: zero, clip, step"
REST = "between the layers"
DIRECTIONS = {"forward": "forward", "backward": "backward", "mean": "forward"}  # the last is CrossEntropy's

Key = tuple[str, str, str]  # layer, direction, kind
Part = tuple[str, str, str, float]  # and milliseconds


class Stopwatch:
    """Seconds by layer, direction and kind."""

    def __init__(self) -> None:
        self.seconds: collections.defaultdict[Key, float] = collections.defaultdict(float)
        self.stack = [("outside", "")]  # layers and directions under way
        self.inside = [0.0]  # what wrapped functions took inside each one under way

    def wrap(self, function: Callable[..., Any], kind: str, name: str | None = None) -> Callable[..., Any]:
        """Return the function, timed. A layer's is given no name: it has that of the object it is called on."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if kind == LAYERS:
                where = (type(args[0]).__name__, DIRECTIONS[function.__name__])
            else:
                where = self.stack[-1] if name is None else (name, "")
            self.stack.append(where)
            self.inside.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                self.stack.pop()
                self.seconds[*where, kind] += took - self.inside.pop()
                self.inside[-1] += took

        return wrapped

    def wrap_everywhere(self, function: Callable[..., Any], kind: str, name: str | None = None) -> None:
        """Put the timed function in the place of the function in every module of the package that has it."""
        wrapped = self.wrap(function, kind, name)
        for module in [module for name, module in sys.modules.items() if name.startswith("numpygpt")]:
            for key, value in list(vars(module).items()):
                if value is function:
                    setattr(module, key, wrapped)

    def install(self) -> None:
        """Wrap all there is to time, for as long as this process lives."""
        classes = [Module]
        while classes:
            cls = classes.pop()
            classes += cls.__subclasses__()
            for method in DIRECTIONS.keys() & vars(cls).keys():
                setattr(cls, method, self.wrap(vars(cls)[method], LAYERS))
        self.wrap_everywhere(einsum, AROUND)
        np.matmul = self.wrap(np.matmul, PRODUCTS)  # type: ignore[assignment]
        for owner, method, kind, name in (
            (Adam, "step", OPTIMISER, "AdamW"),
            (Module, "zero_grad", OPTIMISER, "zero_grad"),
            (Trainer, "update", REST, "Trainer"),
        ):
            setattr(owner, method, self.wrap(getattr(owner, method), kind, name))


def measure_parts(size: dict[str, Any], weights: str, threads: int, seconds: float) -> list[Part]:
    """Return the parts of the mean step of so many seconds."""
    shape = Size.from_dict(size)
    trainer, data, watch = make_trainer(shape, load_weights(weights), threads=1), batches(shape), Stopwatch()
    watch.install()
    for _ in range(WARM_UP):
        trainer.update(*next(data))
    watch.seconds.clear()
    steps, deadline = 0, time.perf_counter() + seconds
    while not steps or time.perf_counter() < deadline:
        trainer.update(*next(data))
        steps += 1
    return [(*key, 1000 * took / steps) for key, took in watch.seconds.items()]


def tables(parts: list[Part]) -> str:
    """Return two tables: by layer, and by kind."""
    total = sum(ms for *_, ms in parts)

    def share(ms: float) -> list[str]:
        return [f"{ms:.2f}", f"{ms / total:.1%}"]

    def largest_first(column: int) -> list[tuple[str, list[Part]]]:
        names = {str(part[column]) for part in parts}
        groups = [(name, [part for part in parts if part[column] == name]) for name in names]
        return sorted(groups, key=lambda group: -sum(ms for *_, ms in group[1]))

    layers, kinds = [], []
    for layer, own in largest_first(0):
        columns = [(1, "forward"), (1, "backward"), (2, PRODUCTS)]
        cells = [sum(p[3] for p in own if p[column] == value) for column, value in columns]
        layers.append([layer, *(f"{ms:.2f}" if ms else "" for ms in cells), *share(sum(ms for *_, ms in own))])
    for kind, own in largest_first(2):
        kinds.append([kind, *share(sum(ms for *_, ms in own))])
    head = ["by layer, its own work", "forward, ms", "backward, ms", "of these np.matmul", "all, ms", "share"]
    return f"{table(head, layers)}\n\n{table(['by kind', 'ms', 'share'], [*kinds, ['a step', *share(total)]])}"
