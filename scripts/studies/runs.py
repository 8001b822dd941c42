"""Training runs by the dozen: every kind of model with every seed, several at a time.

A run has one thread, so that its sums are rounded in one way however many cores there are, and the cores are shared by
runs. Seed s starts the weights and draws the batches, so that kinds are compared on the same batches.
"""

import contextlib
import dataclasses
import functools
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from numpygpt.config import TransformerConfig
from numpygpt.data import Ids
from numpygpt.model import TransformerLM
from numpygpt.progress import progress_bar
from numpygpt.threads import one_blas_thread
from numpygpt.train import TrainConfig, Trainer
from studies.equal import count_parameters
from studies.setting import Setting
from studies.verdict import Numbers

POINTS = 25  # of a curve


@dataclasses.dataclass(frozen=True)
class Kind:
    """One of the things compared. Functions are named ones of a module: another process must find them."""

    config: TransformerConfig
    train: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields of TrainConfig that differ
    change: Callable[[Trainer], None] | None = None  # done before the first step


@dataclasses.dataclass(frozen=True)
class Watch:
    """What else is measured: a function of the trainer, after each of these steps (0 is before the first)."""

    function: Callable[[Trainer], Any]
    steps: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run ended on: its loss before each step, that on the held-out text at the end, and what was watched."""

    training_losses: list[float]
    loss: float
    watched: list[Any]


@dataclasses.dataclass(frozen=True)
class Job:
    """A run to make."""

    kind: Kind
    train: TrainConfig
    watch: Watch | None


def make_run(training: Ids, validation: Ids, device: str, job: Job) -> Outcome:
    """Train a model."""
    with one_blas_thread():
        model = TransformerLM(job.kind.config, rng=job.train.seed).to(device)
        trainer = Trainer(model, training, validation, job.train, threads=1)
        if job.kind.change is not None:
            job.kind.change(trainer)
        losses, watched = [], []
        for step in range(job.train.steps + 1):
            if step > 0:
                losses.append(trainer.train_step()["loss"])
            if job.watch is not None and step in job.watch.steps:
                watched.append(job.watch.function(trainer))
        loss = trainer.evaluate()
    assert loss is not None  # nobody tells it to stop
    return Outcome(losses, loss, watched)


def ignore_interrupts() -> None:
    """Leave Ctrl-C to the first process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def make_runs(setting: Setting, jobs: Sequence[Job]) -> Iterator[Outcome]:
    """Yield what each run ended on, in order; `setting.jobs` of them run at a time, each in a process of its own."""
    function = functools.partial(make_run, setting.training, setting.validation, setting.device)
    with contextlib.ExitStack() as stack:
        outcomes: Iterator[Outcome]
        if setting.jobs == 1:
            outcomes = map(function, jobs)
        else:
            spawn = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(setting.jobs, spawn, initializer=ignore_interrupts)
            stack.callback(pool.shutdown, cancel_futures=True)
            outcomes = pool.map(function, jobs)
        bar = stack.enter_context(progress_bar(len(jobs), unit="run"))
        for outcome in outcomes:
            bar.update()
            yield outcome


def train_kinds(setting: Setting, kinds: dict[str, Kind], watch: Watch | None = None) -> dict[str, list[Outcome]]:
    """Train every kind with every seed; return the outcomes of each, seed by seed."""
    jobs = [
        Job(kind, setting.train(seed, **kind.train), watch) for kind in kinds.values() for seed in range(setting.seeds)
    ]
    outcomes = make_runs(setting, jobs)
    return {name: [next(outcomes) for _ in range(setting.seeds)] for name in kinds}


def common_numbers(setting: Setting, kinds: dict[str, Kind], outcomes: dict[str, list[Outcome]]) -> Numbers:
    """Return what all studies that train write down: losses, sizes, curves, and the setting in words."""
    first = next(iter(kinds.values()))
    train = setting.train(0, **first.train)
    sizes = {name: count_parameters(kind.config) for name, kind in kinds.items()}
    return {
        "setting": describe(first.config, train, setting.seeds),
        "parameters": sizes,
        "losses": {name: [outcome.loss for outcome in outcomes[name]] for name in kinds},
        "curves": {name: curve([o.training_losses for o in outcomes[name]]) for name in kinds},
    }


def describe(config: TransformerConfig, train: TrainConfig, seeds: int) -> str:
    """Return the setting in words."""
    heads = "1 head" if config.num_heads == 1 else f"{config.num_heads} heads"
    return (
        f"{config.num_layers} layers of width {config.d_model}, {heads}, "
        f"{train.steps:,} steps of {train.batch_size} sequences of {train.context_length or config.context_length} "
        f"characters, rate {train.lr:g} at the peak, {seeds} seeds"
    )


def curve(losses: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return steps and losses of a curve of few points, each the mean over its steps and over the seeds."""
    mean = np.mean(losses, axis=0)
    pieces = np.array_split(np.arange(1, len(mean) + 1), min(POINTS, len(mean)))
    return [[float(np.mean(p)) for p in pieces], [float(np.mean(mean[p - 1])) for p in pieces]]


def spaced(steps: int, points: int = 10) -> tuple[int, ...]:
    """Return some steps from the first to the last, denser at the beginning."""
    return tuple(sorted({1, *np.rint(np.geomspace(1, steps, points)).astype(int).tolist()}))


def less(one: str, other: str) -> Callable[[Numbers], list[float]]:
    """Return the function that takes the losses of another kind from those of one, seed by seed."""
    return lambda numbers: [a - b for a, b in zip(numbers["losses"][one], numbers["losses"][other], strict=True)]
