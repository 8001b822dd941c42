"""The training loop."""

import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tqdm import tqdm

from numpygpt.array import Array, check_not_negative, check_positive
from numpygpt.data import Ids, random_batch, sequential_batches
from numpygpt.layers.cross_entropy import CrossEntropy
from numpygpt.model import TransformerLM
from numpygpt.optim import AdamW, clip_grad_norm, cosine_schedule


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How to train. Checked when made: ValueError names the field."""

    steps: int = 2000
    batch_size: int = 12
    lr: float = 3e-3  # at the peak
    min_lr: float | None = None  # at the end; a tenth of lr unless given
    warmup_steps: int | None = None  # 100, or a tenth of a shorter run, unless given
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    grad_clip: float = 1.0  # the largest norm of the gradient
    eval_interval: int = 500  # steps
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(steps=self.steps, batch_size=self.batch_size, eval_interval=self.eval_interval)
        for name, number in (("seed", self.seed), ("warmup_steps", self.warmup_steps)):
            if number is not None and not (isinstance(number, int) and number >= 0):
                raise ValueError(f"{name} must be an integer of at least 0, not {number!r}")
        for name in ("lr", "grad_clip"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} must be a positive number, not {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}")
        check_not_negative(weight_decay=self.weight_decay)
        if self.min_lr is not None and not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"min_lr must lie between 0 and lr, not be {self.min_lr}")
        if self.warmup_steps is not None and self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than steps {self.steps}")

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warmup = min(100, self.steps // 10) if self.warmup_steps is None else self.warmup_steps
        min_lr = self.lr / 10 if self.min_lr is None else self.min_lr
        return cosine_schedule(step, max_lr=self.lr, min_lr=min_lr, warmup_steps=warmup, decay_steps=self.steps)


class Trainer:
    """A model on its way: `step` counts the updates made."""

    def __init__(self, model: TransformerLM, train_tokens: Ids, validation_tokens: Ids, config: TrainConfig):
        self.model, self.config = model, config
        self.train_tokens, self.validation_tokens = train_tokens, validation_tokens
        self.loss = CrossEntropy()
        self.optimizer = AdamW(
            model.parameters(), config.lr, (config.beta1, config.beta2), weight_decay=config.weight_decay
        )
        self.rng = np.random.default_rng(config.seed)
        self.step = 0

    def train_step(self) -> float:
        """Draw a batch, update the model once, and return the loss before the update."""
        model, config = self.model, self.config
        inputs, targets = self.to_device(
            random_batch(self.train_tokens, config.batch_size, model.config.context_length, self.rng)
        )
        model.zero_grad()
        loss = self.loss.forward(model.forward(inputs), targets)
        model.backward(self.loss.backward())
        clip_grad_norm(model.parameters(), config.grad_clip)
        self.optimizer.lr = config.learning_rate(self.step)
        self.optimizer.step()
        self.step += 1
        return loss

    def evaluate(self, stop: Callable[[], bool] = lambda: False) -> float | None:
        """Return the mean loss over the whole validation part, each token counted once; None if told to `stop`."""
        model, total, count = self.model, 0.0, 0
        was_training = model.training
        model.eval()
        length = model.config.context_length
        try:
            for batch in sequential_batches(self.validation_tokens, 4 * self.config.batch_size, length):
                if stop():
                    return None
                inputs, targets = self.to_device(batch)
                total += self.loss.forward(model.forward(inputs), targets) * targets.size
                count += targets.size
        finally:
            model.train(was_training)
        return total / count

    def to_device(self, batch: tuple[Array, Array]) -> tuple[Array, Array]:
        """Copy a batch to where the model is."""
        inputs, targets = batch
        here = self.model.flat.value
        return np.asarray(inputs, like=here), np.asarray(targets, like=here)

    def run(self, after_evaluation: Callable[[float], None] = lambda validation_loss: None) -> float | None:
        """Train to the end, with a progress bar; return the validation loss.

        Each evaluation's loss is given to `after_evaluation`, which may save. Ctrl-C (or a request to terminate) ends
        the run after the step under way; then None is returned. A gradient or validation loss that
        isn't finite raises FloatingPointError.
        """
        config = self.config
        tokens_per_step = config.batch_size * self.model.config.context_length
        self.model.train()
        loss, seconds, validation_loss = Smoothed(), Smoothed(), None
        with stop_between_steps() as stop, progress_bar(config.steps, initial=self.step, unit="step") as bar:
            while self.step < config.steps and not stop():
                start = time.perf_counter()
                loss.add(self.train_step())
                seconds.add(time.perf_counter() - start)
                bar.set_postfix(
                    loss=f"{loss.value:.3f}",
                    lr=f"{self.optimizer.lr:.1e}",
                    tokens_per_s=f"{tokens_per_step / seconds.value:,.0f}",
                    refresh=False,
                )
                bar.update()
                if self.step % config.eval_interval == 0 or self.step == config.steps:
                    validation_loss = self.evaluate(stop)
                    if validation_loss is None:
                        break
                    if not math.isfinite(validation_loss):
                        raise FloatingPointError(f"the validation loss is {validation_loss}")
                    after_evaluation(validation_loss)
                    bar.write(
                        f"step {self.step}: training loss {loss.value:.3f}, validation loss {validation_loss:.3f}"
                    )
            return validation_loss if self.step == config.steps else None


class Smoothed:
    """A running average of the latest twenty or so numbers."""

    value = math.nan

    def add(self, number: float) -> None:
        """Take one more number into the average."""
        self.value = number if math.isnan(self.value) else 0.95 * self.value + 0.05 * number


def progress_bar(total: int, **options: Any) -> Any:
    """Return a tqdm bar with tqdm's options; where the output is no terminal, a line now and then."""
    bar = tqdm(total=total, dynamic_ncols=True, **options)
    if not bar.fp.isatty():
        bar.mininterval = 10
    return bar


@contextlib.contextmanager
def stop_between_steps() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C and requests to terminate into a flag: yields a function that says whether there was one.

    A second Ctrl-C interrupts at once.
    """
    requested = False

    def request(signum: int, frame: object) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True
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
