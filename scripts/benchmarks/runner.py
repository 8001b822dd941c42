"""Every contender alone in a process of its own, in rounds, there and back; what they compute must agree."""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sizes import Size, save_weights
from benchmarks.timing import CONTENDERS, EAGER
from numpygpt.progress import progress_bar

SCRIPTS = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-4  # between two contenders' losses


class Void(Exception):
    """What was timed is not the same computation."""


class ChildFailed(Exception):
    """A contender ended without a result."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long to measure, and on how many cores."""

    rounds: int
    threads: int
    seconds: float  # for each contender in each round


@dataclasses.dataclass(frozen=True)
class Timing:
    """What one contender took in one round."""

    size: str
    contender: str
    round: int
    results: list[Any]  # what must agree: the losses of the first steps, or the texts written
    first_s: float  # of the first step, with any compiling
    times_s: list[float]  # of the steps that count
    peak_mb: float  # of the whole process: libraries, weights, gradients, moments, activations
    imports_mb: float  # of it with nothing but the libraries

    @property
    def step_s(self) -> float:
        """The time of a step."""
        return statistics.median(self.times_s)


def installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def versions() -> list[str]:
    """Return the packages that are timed, with their versions."""
    return [f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "torch", "jax") if installed(name)]


def available(names: Iterable[str], say: Callable[[str], None]) -> list[str]:
    """Return the contenders whose packages are installed; say which aren't."""
    there = []
    for name in names:
        missing = [package for package in CONTENDERS[name].needs if not installed(package)]
        if missing:
            say(f'{name} is skipped, as there is no {missing[0]}: pip install -e ".[bench]"')
        else:
            there.append(name)
    return there


def run_child(function: str, folder: Path, threads: int, **arguments: Any) -> Any:
    """Run `module.function` of this package in a process that keeps to so many cores; return its result."""
    environment = environment_of(threads)
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"JAX_PLATFORMS": "cpu", "TORCHINDUCTOR_CACHE_DIR": str(folder)}  # nothing compiled by earlier runs
    job = {"function": function, "threads": threads, "arguments": arguments | {"threads": threads}}
    command = [sys.executable, "-m", "benchmarks.child", json.dumps(job)]
    return json.loads(output_of(command, environment).splitlines()[-1])


def environment_of(threads: int) -> dict[str, str]:
    """Return the environment of a process whose libraries use so many threads."""
    variables = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    return os.environ | dict.fromkeys(variables, str(threads))


def output_of(command: Sequence[str], environment: dict[str, str]) -> str:
    """Run a program to its end; return what it printed. Raises ChildFailed, with its last complaint, if it fails."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        *_, reason = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        raise ChildFailed(reason)
    return done.stdout


def there_and_back(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield rounds and names, every other round backwards, so that a machine that drifts favours no one."""
    for i in range(rounds):
        for name in names if i % 2 == 0 else reversed(names):
            yield i, name


@contextlib.contextmanager
def weights_of(size: Size) -> Iterator[Path]:
    """Write a model's starting weights to a file, in a folder of its own, for a while."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.npz"
        save_weights(size, path)
        yield path


def run_rounds(
    function: str, sizes: list[Size], contenders: list[str], plan: Plan, check: Callable[[list[Timing]], None]
) -> Iterator[Timing]:
    """Yield what every contender took at every size in every round; `check` may raise Void after each."""
    with progress_bar(len(sizes) * plan.rounds * len(contenders), unit="run") as bar:
        for size in sizes:
            timings: list[Timing] = []
            with weights_of(size) as weights:
                arguments = {"size": dataclasses.asdict(size), "weights": str(weights), "seconds": plan.seconds}
                for i, contender in there_and_back(contenders, plan.rounds):
                    try:
                        result = run_child(function, weights.parent, plan.threads, contender=contender, **arguments)
                    except ChildFailed as error:
                        raise ChildFailed(f"{contender} failed at {size.name}: {error}") from None
                    timings.append(Timing(size.name, contender, i, **result))
                    check(timings)
                    bar.update()
                    yield timings[-1]


def check_losses(timings: list[Timing]) -> None:
    """Raise Void unless the first losses of all are those of eager PyTorch (or of the first, without it)."""
    with_losses = [t for t in timings if t.results]
    for timing in with_losses:
        reference = next((t for t in with_losses if t.contender == EAGER), with_losses[0])
        for i, (loss, expected) in enumerate(zip(timing.results, reference.results, strict=True)):
            if not abs(loss - expected) <= TOLERANCE:
                raise Void(
                    f"the run is void: at {timing.size} loss {i + 1} of {timing.contender} is {loss:.6f} and "
                    f"{reference.contender}'s {expected:.6f}, so they don't compute the same"
                )
