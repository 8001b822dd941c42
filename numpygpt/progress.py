"""What a run shows while it goes on, and how it is stopped."""

import contextlib
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

from tqdm import tqdm


def progress_bar(total: int, **options: Any) -> Any:
    """Return a tqdm bar with tqdm's options; where the output is no terminal, a line now and then."""
    bar = tqdm(total=total, dynamic_ncols=True, **options)
    if not bar.disable and not bar.fp.isatty():
        bar.mininterval = 10
    return bar


def note(line: str) -> None:
    """Write a line to the error stream, above any bar that is shown there."""
    tqdm.write(line, file=sys.stderr)


class Progress:
    """A bar over the steps, with the time left."""

    def __init__(self, steps: int, initial: int, disable: bool = False):
        self.bar = progress_bar(steps, initial=initial, unit="step", disable=disable)
        self.loss, self.seconds_per_token = Smoothed(), Smoothed()

    def show(self, metrics: dict[str, Any]) -> None:
        """Move on by a step that had these metrics; an evaluation gets a line of its own, which stays."""
        if self.bar.disable:
            return
        self.loss.add(metrics["loss"])
        self.seconds_per_token.add(1 / metrics["tokens_per_s"])
        self.bar.set_postfix(
            loss=f"{metrics['loss']:.3f}",
            smoothed=f"{self.loss.value:.3f}",
            lr=f"{metrics['lr']:.1e}",
            grad_norm=f"{metrics['grad_norm']:.2f}",
            tokens_per_s=f"{1 / self.seconds_per_token.value:,.0f}",
            refresh=False,
        )
        self.bar.update()
        if "validation_loss" in metrics:
            losses = f"training loss {self.loss.value:.3f}, validation loss {metrics['validation_loss']:.3f}"
            self.bar.write(f"step {metrics['step']}: {losses}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()


class Smoothed:
    """A running average of the latest twenty or so numbers; of all, while they are fewer."""

    value = math.nan

    def __init__(self) -> None:
        self.total = self.weight = 0.0

    def add(self, number: float) -> None:
        """Take one more number into the average."""
        self.total, self.weight = 0.95 * self.total + number, 0.95 * self.weight + 1
        self.value = self.total / self.weight


@contextlib.contextmanager
def stop_between_steps(quietly: bool = False) -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C and requests to terminate into a flag: yields a function that says whether there was one.

    A second Ctrl-C interrupts at once, as the first says unless `quietly`.
    """
    requested = False

    def request(signum: int, frame: object) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True
        if quietly:
            return
        with contextlib.suppress(OSError):
            os.write(2, b"\nStopping after this step; Ctrl-C again gives up what came after the last save.\n")

    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield lambda: False
        return
    previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: requested
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
