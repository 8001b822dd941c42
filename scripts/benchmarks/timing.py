"""One contender, timed in this process."""

import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.sizes import Size, load_weights

WARM_UP, LEAST = 3, 3  # steps before those that count, and the least number of these


class Contender(NamedTuple):
    """Where a contender's step is made, and what must be installed for it."""

    module: str
    function: str
    needs: tuple[str, ...] = ()


CONTENDERS = {
    "numpygpt": Contender("ours", "make_step"),
    "torch": Contender("pytorch", "make_step", ("torch",)),
    "compile": Contender("pytorch", "make_compiled_step", ("torch",)),
    "jax": Contender("jaxed", "make_step", ("jax",)),
    "bound": Contender("bound", "make_step"),
}
OURS, EAGER, BOUND = "numpygpt", "torch", "bound"


def measure_training(
    contender: str, size: dict[str, Any], weights: str, threads: int, seconds: float
) -> dict[str, Any]:
    """Train for so many seconds; return the fields of a Timing."""
    make_step = maker(contender)
    imports_mb = peak_mb()
    step = make_step(Size.from_dict(size), load_weights(weights), threads)
    return {"imports_mb": imports_mb} | measure(step, WARM_UP, LEAST, seconds)


def train_on(
    device: str, contender: str, size: dict[str, Any], weights: str, threads: int, steps: int
) -> dict[str, list[float]]:
    """Make so many steps on a device; return their losses, and the seconds that each took."""
    step = maker(contender)(Size.from_dict(size), load_weights(weights), threads, device)
    made = [timed(step) for _ in range(steps)]
    return {"losses": [loss for _, loss in made], "times_s": [seconds for seconds, _ in made]}


def maker(contender: str) -> Callable[..., Callable[[], Any]]:
    """Import the function that makes a contender's step, and with it all that the contender needs."""
    module, function, _ = CONTENDERS[contender]
    return getattr(importlib.import_module(f"benchmarks.{module}"), function)


def measure(step: Callable[[], Any], warm_up: int, least: int, seconds: float) -> dict[str, Any]:
    """Warm up, then go on for so many seconds, or the least number of steps; return what a Timing holds of that."""
    first = [timed(step) for _ in range(warm_up)]
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < deadline:
        times.append(timed(step)[0])
    results = [result for _, result in first if result is not None]
    return {"results": results, "first_s": first[0][0], "times_s": times, "peak_mb": peak_mb()}


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Call a function; return the seconds it took and its result."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def peak_mb() -> float:
    """Return the most memory that this process has had so far, with those it started that still run.

    What they share with it (memory made to be shared, and libraries) counts once.
    """
    if sys.platform == "linux":  # what getrusage says there begins with the parent's
        own, *others = [memory_mb(pid) for pid in ["self", *children()]]
        return own["VmHWM"] + sum(other["VmHWM"] - other["RssShmem"] - other["RssFile"] for other in others)
    if sys.platform == "win32":
        return float("nan")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def memory_mb(pid: str) -> dict[str, float]:
    """Return what Linux says of a process's memory: its peak, and of what it has now the shared and the files'."""
    lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()]
    return {line[0][:-1]: int(line[1]) / 1024 for line in lines if line[0] in ("VmHWM:", "RssShmem:", "RssFile:")}


def children() -> list[str]:
    """Return the numbers of the processes that this one has started."""
    parents = {path.parent.name: path.read_text(encoding="utf-8") for path in Path("/proc").glob("[0-9]*/stat")}
    return [pid for pid, stat in parents.items() if stat.rpartition(")")[2].split()[1] == str(os.getpid())]
