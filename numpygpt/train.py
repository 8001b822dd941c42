"""The training loop."""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import math
import operator
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from numpygpt.array import Array, check_not_negative, check_positive
from numpygpt.data import Ids, random_batch, sequential_batches
from numpygpt.device import mover
from numpygpt.finite import first_not_finite
from numpygpt.layers.cross_entropy import CrossEntropy
from numpygpt.model import TransformerLM
from numpygpt.optim import AdamW, NotFinite, cosine_schedule
from numpygpt.precision import LossScale, check_dtype
from numpygpt.progress import Progress, note, stop_between_steps
from numpygpt.ranks import Ranks
from numpygpt.replica import Replicas
from numpygpt.threads import one_blas_thread


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How to train. Checked when made: ValueError names the field."""

    steps: int = 2000
    batch_size: int = 12  # sequences in a step
    context_length: int | None = None  # tokens in a sequence; as many as the model takes unless given
    accumulate: int = 1  # parts that a batch is worked on in, one after the other, to save memory
    lr: float = 3e-3  # at the peak
    min_lr: float | None = None  # at the end; a tenth of lr unless given
    warmup_steps: int | None = None  # 100, or a tenth of a shorter run, unless given
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    grad_clip: float = 1.0  # the largest norm of the gradient
    eval_interval: int = 500  # steps
    seed: int = 0
    dtype: str = "float32"  # of matrix products: or "float16", with all else in float32

    def __post_init__(self) -> None:
        sizes = ("steps", "batch_size", "accumulate", "eval_interval")
        check_positive(**{name: getattr(self, name) for name in sizes})
        if self.accumulate > self.batch_size:
            raise ValueError(f"accumulate {self.accumulate} is more parts than batch_size {self.batch_size} sequences")
        if self.context_length is not None:
            check_positive(context_length=self.context_length)
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
        check_dtype(self.dtype)
        if self.min_lr is not None and not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"min_lr must lie between 0 and lr, not be {self.min_lr}")
        if self.warmup_steps is not None and self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than steps {self.steps}")

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warmup = min(100, self.steps // 10) if self.warmup_steps is None else self.warmup_steps
        min_lr = self.lr / 10 if self.min_lr is None else self.min_lr
        return cosine_schedule(step, max_lr=self.lr, min_lr=min_lr, warmup_steps=warmup, decay_steps=self.steps)


def cut(batch: tuple[Array, Array], parts: int) -> list[tuple[Array, Array]]:
    """Cut inputs and targets (B, T) into so many parts of nearly equal size, or into B if that is fewer."""
    inputs, targets = batch
    parts = min(parts, len(inputs))
    return list(zip(np.array_split(inputs, parts), np.array_split(targets, parts), strict=True))


class Skipped(FloatingPointError):
    """A step was left out, since its gradients overflow float16; the loss scale was halved."""


class Trainer:
    """A model on its way: `step` counts the updates made.

    `best_loss` is the lowest validation loss so far, and `best_step` the step that it came after.
    """

    def __init__(
        self,
        model: TransformerLM,
        train_tokens: Ids,
        validation_tokens: Ids,
        config: TrainConfig,
        threads: int | None = None,
        ranks: Ranks | None = None,
    ):
        """`threads` work on each batch together: as many as there are usable cores, unless given.

        With another number the sums are rounded differently, and dropout draws differently. A model on another device
        is run by one.

        Of several `ranks`, each makes a trainer of the same model and calls the same methods at the same time. A batch
        is shared among them, and then the share of each among its threads.
        """
        self.ranks = ranks or Ranks()
        longest = model.config.context_length
        self.context_length = longest if config.context_length is None else config.context_length
        if self.context_length > longest:
            raise ValueError(f"context_length {self.context_length} is more than the {longest} tokens the model takes")
        if config.batch_size < self.ranks.size:
            raise ValueError(
                f"batch_size {config.batch_size} is less than a sequence for each of {self.ranks.size} ranks"
            )
        self.threads = self.ranks.cores() if threads is None else threads
        check_positive(threads=self.threads)
        if not isinstance(model.flat.value, np.ndarray):
            self.threads = 1
        self.model, self.config = model, config
        self.train_tokens, self.validation_tokens = train_tokens, validation_tokens
        self.loss = CrossEntropy()
        self.optimizer = AdamW(
            model.parameters(), config.lr, (config.beta1, config.beta2), weight_decay=config.weight_decay
        )
        self.rng = np.random.default_rng(config.seed)
        self.loss_scale = LossScale(config.dtype)
        self.replicas = Replicas(model, self.optimizer, self.threads, config.dtype, self.ranks)
        self.step = 0
        self.best_loss, self.best_step = math.inf, 0
        self.unevaluated: dict[str, Any] | None = None  # metrics of a step whose evaluation was broken off

    def run(
        self,
        after_step: Callable[[dict[str, Any]], None] = lambda metrics: None,
        after_evaluation: Callable[[float], None] = lambda validation_loss: None,
        minutes: float = math.inf,
    ) -> float | None:
        """Train to the end, or for some `minutes`, with a progress bar; return the validation loss.

        Each step's metrics are given to `after_step`: step, loss, lr, grad_norm, tokens_per_s and, if it was
        evaluated, validation_loss; in float16 also loss_scale and skipped_steps, which counts those skipped so far.
        Then an evaluation's loss goes to `after_evaluation`, which may save. Ctrl-C (or a request to terminate) ends
        the run after the step under way, or in its evaluation, which is made again when the run goes on; then None is
        returned. A loss or gradient that isn't finite raises FloatingPointError, which names
        the step and the layer or parameter.
        """
        if self.finished and self.unevaluated is None:
            return self.evaluate()
        deadline = time.monotonic() + 60 * minutes
        self.replicas.call("train", [()] * self.threads)
        others = self.ranks.rank > 0
        with (
            one_blas_thread(),
            stop_between_steps(quietly=others) as stop,
            Progress(self.config.steps, self.reported, disable=others) as progress,
        ):
            while not any(self.ranks.gather(stop())):
                metrics, self.unevaluated = self.unevaluated or self.timed_step(), None
                last = self.finished or any(self.ranks.gather(time.monotonic() >= deadline))
                if last or self.step % self.config.eval_interval == 0:
                    validation_loss = self.evaluate(stop)
                    if validation_loss is None:
                        self.unevaluated = metrics
                        break
                    metrics["validation_loss"] = validation_loss
                    if validation_loss < self.best_loss:
                        self.best_loss, self.best_step = validation_loss, self.step
                after_step(metrics)
                if "validation_loss" in metrics:
                    after_evaluation(metrics["validation_loss"])
                progress.show(metrics)
                if last:
                    return metrics["validation_loss"]
        return None

    @property
    def finished(self) -> bool:
        """Whether all steps are made."""
        return self.step >= self.config.steps

    @property
    def reported(self) -> int:
        """The number of steps whose metrics were given out: all, but for one whose evaluation was broken off."""
        return self.step - (self.unevaluated is not None)

    @property
    def tokens_per_step(self) -> int:
        """The number of targets in a batch."""
        return self.config.batch_size * self.context_length

    def timed_step(self) -> dict[str, Any]:
        """Make a step; return its metrics."""
        start = time.perf_counter()
        metrics = self.train_step()
        return {"step": self.step, **metrics, "tokens_per_s": self.tokens_per_step / (time.perf_counter() - start)}

    def train_step(self) -> dict[str, float]:
        """Draw a batch and update the model with it; draw another, and say so, if that step had to be skipped."""
        size, rows = self.config.batch_size, self.ranks.rows(self.config.batch_size)
        while True:
            batch = random_batch(self.train_tokens, size, self.context_length, self.rng, rows)
            try:
                return self.update(*batch)
            except Skipped as skipped:
                note(str(skipped))

    def update(self, inputs: Array, targets: Array) -> dict[str, float]:
        """Update the model once, with inputs and targets: the loss before it, the rate, the gradient's norm.

        Of several ranks, each gives its share of the batch, and gets what is true of the whole. Raises Skipped, with
        weights and optimiser unchanged, if gradients overflow and the loss scale can be lower.
        """
        counted, before = sum(self.ranks.gather(self.counted(targets))), self.generator_states()
        scale = self.loss_scale

        def add(at_once: bool = True) -> float:
            return self.add_gradients(inputs, targets, at_once, counted)

        def add_or_explain() -> float:
            with self.explained(before, add):
                return add()

        self.replicas.zero_grad()
        loss = sum(self.ranks.together(add_or_explain))
        self.ranks.add([buffer.grad for buffer in self.model.buffers() if buffer.grad is not None])
        self.optimizer.lr = self.config.learning_rate(self.step)
        with self.explained(before, add):
            try:
                grad_norm = self.optimizer.step(self.config.grad_clip, self.replicas.deal, scale.inverse())
            except NotFinite as error:
                if scale.value == 1:
                    raise
                overflow = f"step {self.step + 1} skipped: gradients overflow float16 at loss scale {scale.value:.0f}"
                scale.step_skipped()
                raise Skipped(f"{overflow}; now {scale.value:.0f}") from error
        self.step += 1
        metrics = {"loss": loss, "lr": self.optimizer.lr, "grad_norm": grad_norm}
        if scale.used:
            metrics |= {"loss_scale": scale.value, "skipped_steps": scale.skipped_steps}
        scale.step_made()
        return metrics

    @contextlib.contextmanager
    def explained(self, before: dict[str, Any], add: Callable[[bool], float]) -> Iterator[None]:
        """Name the layer of a FloatingPointError: the weights are as before, so do the same again, and watch."""
        try:
            yield
        except Skipped:
            raise
        except FloatingPointError as error:
            self.optimizer.zero_grad()
            for worker in self.replicas.workers:
                worker.set_generator_states(before)
            first = first_not_finite(self.replicas.models, lambda: add(False))
            reason = f"{first} is not finite, the first to be so" if first else error
            raise FloatingPointError(f"in step {self.step + 1} {reason}") from error

    def add_gradients(self, inputs: Array, targets: Array, at_once: bool = True, counted: int | None = None) -> float:
        r"""Forward and backward of a batch, in parts; return its loss. Raises FloatingPointError if that isn't finite.

        The batch is cut in `accumulate` parts, one after the other, and each of these in one for each thread. The loss
        of $N$ counted tokens is a mean over them. Part $i$ has $N_i$ of them and the mean $L_i$, so

        $$L = \sum_i \frac{N_i}{N}\, L_i, \qquad \bar L_i = \frac{N_i}{N} \tag{1}$$

        Dividing by the number of parts instead would be right only for parts of one size. If the batch is a rank's
        share of a larger one, with `counted` tokens in all, that is $N$, and its own terms of the sum are returned. The
        gradients are those of the loss times its scale (LossScale, eq. 1).
        """
        loss, scale = 0.0, self.loss_scale.value
        counted = max(self.counted(targets) if counted is None else counted, 1)
        for part in cut((inputs, targets), self.config.accumulate):
            parts = cut(part, self.threads)
            taking_part = len(parts) if at_once else 0
            losses = self.replicas.call(
                "add_gradients",
                [(taking_part, copy.copy(self.loss), scale * self.counted(y) / counted, x, y) for x, y in parts],  # (1)
                at_once,
            )
            loss += sum(losses)
        return loss / scale

    def counted(self, targets: Array) -> int:
        """Return how many targets count in the loss."""
        ignored = self.loss.ignore_index
        return int(targets.size if ignored is None else np.sum(targets != ignored))

    def evaluate(self, stop: Callable[[], bool] = lambda: False) -> float | None:
        """Return the mean loss over the whole validation part, each token counted once; None if told to `stop`.

        Raises FloatingPointError if it isn't finite, which names the step and the layer.
        """
        parts = self.ranks.together(lambda: self.losses(stop))
        if None in parts:
            return None
        total, count = map(sum, zip(*parts, strict=True))
        return total / max(count, 1)

    def losses(self, stop: Callable[[], bool]) -> tuple[float, int] | None:
        """Return the sum of this rank's losses over the validation part, and their number; None if told to `stop`."""
        total, count = 0.0, 0
        batches = sequential_batches(self.validation_tokens, 4 * self.config.batch_size, self.context_length)
        for batch in itertools.islice(batches, self.ranks.rank, None, self.ranks.size):
            if stop():
                return None
            parts = cut(batch, self.threads)
            run = functools.partial(self.replicas.call, "evaluate", [(copy.copy(self.loss), x, y) for x, y in parts])
            total += sum(loss * self.counted(y) for loss, (_, y) in zip(run(), parts, strict=True))
            count += self.counted(batch[1])
            if not math.isfinite(total):
                first = first_not_finite(self.replicas.models, functools.partial(run, at_once=False))
                reason = f": {first} is not finite, the first to be so" if first else ""
                raise FloatingPointError(f"the validation loss after step {self.step} is {total}{reason}")
        return total, count

    def check_alike(self) -> None:
        """Raise RanksDiffer, on all ranks, unless all have the same weights, to the bit. All call it."""
        if self.ranks.size > 1:
            weights = hashlib.sha256()
            for buffer in self.model.buffers():
                weights.update(mover("cpu")(buffer.value))
            self.ranks.check_alike({f"the hash of the weights after step {self.step}": weights.hexdigest()})

    def state_dict(self) -> dict[str, Any]:
        """Return, as JSON holds it, all that the next step depends on besides the weights and the moments.

        Of several ranks, all call it, and get the generators of all.
        """
        best_loss = self.best_loss if math.isfinite(self.best_loss) else None
        return {
            "step": self.step,
            "best_loss": best_loss,
            "best_step": self.best_step,
            "unevaluated": self.unevaluated,
            "generators": functools.reduce(operator.or_, self.ranks.gather(self.generator_states())),
            **({"loss_scale": self.loss_scale.state_dict()} if self.loss_scale.used else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`. Raises ValueError, before any change, if it isn't this trainer's.

        Of several ranks, all call it.
        """
        if missing := self.state_dict().keys() - state.keys():
            raise ValueError(f"the state lacks {sorted(missing)}: it was saved by another version of this program")
        step, best_loss, generators = state["step"], state["best_loss"], state["generators"]
        if unlike := sorted(generators.keys() ^ self.state_dict()["generators"].keys()):
            raise ValueError(f"the state doesn't fit this model: one has generators for {unlike}, the other hasn't")
        if self.optimizer.t != step:
            raise ValueError(f"the state is that of step {step}, and the optimiser has made {self.optimizer.t}")
        self.set_generator_states(generators)
        self.step, self.best_loss = step, math.inf if best_loss is None else best_loss
        self.best_step, self.unevaluated = state["best_step"], state["unevaluated"]
        if self.loss_scale.used:
            self.loss_scale.load_state_dict(state["loss_scale"])

    def generator_states(self) -> dict[str, Any]:
        """Return the state of every generator that training draws from on this rank."""
        states = {"batches": self.rng.bit_generator.state}
        if any(worker.generators for worker in self.replicas.workers):
            for more in self.replicas.call("generator_states", [()] * self.threads):
                states |= more
        return states

    def set_generator_states(self, states: dict[str, Any]) -> None:
        """Bring every generator back to a state it was in."""
        self.rng.bit_generator.state = states["batches"]
        self.replicas.call("set_generator_states", [(states,)] * self.threads)
