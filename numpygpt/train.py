"""The training loop."""

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tqdm import tqdm

from numpygpt.data import Ids, random_batch, sequential_batches
from numpygpt.layers.cross_entropy import CrossEntropy
from numpygpt.model import TransformerLM
from numpygpt.module import Array, check_not_negative
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
        for name, least in (("steps", 1), ("batch_size", 1), ("eval_interval", 1), ("seed", 0), ("warmup_steps", 0)):
            number = getattr(self, name)
            if number is not None and number < least:
                raise ValueError(f"{name} must be at least {least}, not {number}")
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

    def evaluate(self) -> float:
        """Return the mean loss over the whole validation part, each token counted once."""
        model, total, count = self.model, 0.0, 0
        was_training = model.training
        model.eval()
        length = model.config.context_length
        try:
            for batch in sequential_batches(self.validation_tokens, 4 * self.config.batch_size, length):
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

    def run(self) -> float | None:
        """Train to the end, with a progress bar; return the validation loss.

        Ctrl-C ends the run after the step under way; then None is returned. A loss or gradient that isn't finite
        raises FloatingPointError, with the model as it was before that step.
        """
        config = self.config
        tokens_per_step = config.batch_size * self.model.config.context_length
        smoothed = None
        self.model.train()
        validation_loss = None
        with stop_between_steps() as stop, progress_bar(config.steps, self.step) as bar:
            while self.step < config.steps and not stop():
                start = time.perf_counter()
                loss = self.train_step()
                rate = tokens_per_step / (time.perf_counter() - start)
                smoothed = loss if smoothed is None else 0.95 * smoothed + 0.05 * loss
                bar.set_postfix(
                    loss=f"{smoothed:.3f}", lr=f"{self.optimizer.lr:.1e}", tokens_per_s=f"{rate:,.0f}", refresh=False
                )
                bar.update()
                if self.step % config.eval_interval == 0 or self.step == config.steps:
                    validation_loss = self.evaluate()
                    bar.write(f"step {self.step}: training loss {smoothed:.3f}, validation loss {validation_loss:.3f}")
            return validation_loss if self.step == config.steps else None


def progress_bar(steps: int, initial: int) -> Any:
    """Return a tqdm bar over the steps; where the output is no terminal, a line now and then."""
    bar = tqdm(total=steps, initial=initial, unit="step", dynamic_ncols=True)
    if not bar.fp.isatty():
        bar.mininterval = 10
    return bar


@contextlib.contextmanager
def stop_between_steps() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C into a request: yields a function that says whether there was one. A second Ctrl-C interrupts."""
    requested = False

    def request(signum: int, frame: object) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True

    try:
        previous = signal.signal(signal.SIGINT, request)
    except ValueError:  # not the main thread, which alone gets signals
        yield lambda: False
        return
    try:
        yield lambda: requested
    finally:
        signal.signal(signal.SIGINT, previous)
