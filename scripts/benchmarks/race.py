"""The time to a result: `--recipe fast` of train_shakespeare.py beside nanoGPT's recipe for CPUs, in eager PyTorch.

Source of theirs: karpathy/nanoGPT, config/train_shakespeare_char.py with the flags that its README gives for a CPU, and
train.py's own betas, decay and clipping; written anew here. It is GPT-2's dress without biases, and its GELU is exact.
Where this departs from nanoGPT it spares it work: AdamW is fused, and no checkpoints are saved.

A clock runs from the start of a process, imports and the reading of the text included. Ours stops with the process,
after its evaluation of the whole held-out tenth, its checkpoint and its sample. Theirs stops after the last of the
estimates of its losses that it makes on its way; then it is evaluated on that tenth as ours was, which isn't timed.
"""

import dataclasses
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import spread, table
from benchmarks.runner import SCRIPTS, ChildFailed, Void, environment_of, output_of, run_child, there_and_back
from benchmarks.sizes import LR, SHAPES, Size, make_size
from numpygpt.array import Array
from numpygpt.corpus import load_corpus
from numpygpt.data import CharTokenizer, Ids, random_batch, sequential_batches, split
from numpygpt.model import TransformerLM
from numpygpt.optim import cosine_schedule
from numpygpt.progress import progress_bar

SEEDS = (0, 1, 2)
OURS, THEIRS = "numpygpt", "nanoGPT"
RECIPE = ("--recipe", "fast")  # flags of ours
LOSS = "validation loss: "  # what ours prints before it


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How theirs trains; what isn't here is as for all contenders of the benchmark."""

    steps: int = 2000
    warmup_steps: int = 100
    max_lr: float = LR
    min_lr: float = LR / 10
    eval_interval: int = 250  # steps
    eval_batches: int = 20  # of the text's first nine tenths, and as many of the last

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        rates = {"max_lr": self.max_lr, "min_lr": self.min_lr}
        return cosine_schedule(step, **rates, warmup_steps=self.warmup_steps, decay_steps=self.steps)


SCHEDULE = Schedule()


@dataclasses.dataclass(frozen=True)
class Finish:
    """How long a run took, and its mean loss over the held-out tenth."""

    contender: str
    seed: int
    seconds: float
    loss: float


def encode(corpus: str) -> tuple[CharTokenizer, Ids]:
    """Return the tokenizer of a corpus's characters, and their ids, uint16. Raises DataError if it can't be had."""
    text = load_corpus(corpus)
    tokenizer = CharTokenizer.train(text)
    return tokenizer, tokenizer.encode(text).astype(np.uint16)


def their_size(corpus: str) -> Size:
    """Return the model and the batch of theirs: S, for the characters of a corpus. DataError if that is too short."""
    tokenizer, tokens = encode(corpus)
    layers, heads, width, context, batch, _ = SHAPES["S"]
    size = make_size(THEIRS, layers, heads, width, context, batch, tokenizer.vocab_size, dress="gpt2")
    split(tokens, context)
    return dataclasses.replace(size, config=dataclasses.replace(size.config, bias=False, ffn="gelu"))


def train_theirs(
    corpus: str, seed: int, size: dict[str, Any], schedule: dict[str, Any], threads: int
) -> dict[str, float]:
    """Train theirs in this process; return when that was done, in seconds since the epoch, and its loss then."""
    import torch

    from benchmarks.pytorch import make_model, make_optimizer, update

    torch.set_num_threads(threads)
    made, plan, rng = Size.from_dict(size), Schedule(**schedule), np.random.default_rng(seed)
    context = made.config.context_length
    parts = split(encode(corpus)[1], context)
    model = make_model(made.config, TransformerLM(made.config, rng=rng).state_dict())
    optimizer = make_optimizer(model)

    def train() -> None:
        for step in range(plan.steps):
            if step % plan.eval_interval == 0:
                estimate()
            for group in optimizer.param_groups:
                group["lr"] = plan.learning_rate(step)
            update(model, optimizer, *random_batch(parts[0], made.batch_size, context, rng))
        estimate()

    def estimate() -> None:
        for part in parts:
            for _ in range(plan.eval_batches):
                loss_of(*random_batch(part, made.batch_size, context, rng))

    @torch.no_grad()
    def loss_of(inputs: Array, targets: Array) -> float:
        return model(torch.from_numpy(inputs), torch.from_numpy(targets)).item()

    train()
    done = time.time()
    total = sum(y.size * loss_of(x, y) for x, y in sequential_batches(parts[1], made.batch_size, context))
    return {"done": done, "loss": total / (len(parts[1]) - 1)}


def run_theirs(corpus: str, seed: int, size: Size, threads: int) -> Finish:
    """Train theirs in a process of its own."""
    arguments = {"size": dataclasses.asdict(size), "schedule": dataclasses.asdict(SCHEDULE)}
    with tempfile.TemporaryDirectory() as folder:
        start = time.time()
        result = run_child("race.train_theirs", Path(folder), threads, corpus=corpus, seed=seed, **arguments)
    return Finish(THEIRS, seed, result["done"] - start, result["loss"])


def run_ours(corpus: str, seed: int, threads: int) -> Finish:
    """Train ours, as a user does."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--corpus", corpus, "--seed", str(seed), "--threads", str(threads), "--out", f"{folder}/run"]
        command = [sys.executable, str(SCRIPTS / "train_shakespeare.py"), *RECIPE, *flags]
        start = time.time()
        output = output_of(command, environment_of(threads))
        seconds = time.time() - start
    (loss,) = [line.removeprefix(LOSS) for line in output.splitlines() if line.startswith(LOSS)]
    return Finish(OURS, seed, seconds, float(loss))


def run_race(corpus: str, threads: int) -> Iterator[Finish]:
    """Yield each run as it ends, the two of a seed one after the other. Raises DataError, ChildFailed or Void."""
    size = their_size(corpus)
    with progress_bar(2 * len(SEEDS), unit="run") as bar:
        for i, contender in there_and_back([THEIRS, OURS], len(SEEDS)):
            seed = SEEDS[i]
            try:
                if contender == OURS:
                    finish = run_ours(corpus, seed, threads)
                else:
                    finish = run_theirs(corpus, seed, size, threads)
            except ChildFailed as error:
                raise ChildFailed(f"{contender} failed with seed {seed}: {error}") from None
            if not math.isfinite(finish.loss):
                raise Void(f"the run is void: with seed {seed} the loss of {contender} is {finish.loss}")
            bar.update()
            yield finish


def race_table(finishes: Sequence[Finish]) -> str:
    """Return a row for each seed, and the median ratio."""
    head = ["seed", f"{THEIRS}, s", f"{OURS}, s", "ratio", f"{THEIRS}'s loss", f"{OURS}'s loss"]
    rows, ratios = [], []
    for seed in dict.fromkeys(f.seed for f in finishes):
        theirs, ours = ({f.contender: f for f in finishes if f.seed == seed}[name] for name in (THEIRS, OURS))
        ratios.append(ours.seconds / theirs.seconds)
        seconds = [f"{f.seconds:.1f}" for f in (theirs, ours)]
        rows.append([str(seed), *seconds, f"{ratios[-1]:.3f}", *(f"{f.loss:.4f}" for f in (theirs, ours))])
    return f"{table(head, rows)}\n{NOTES}\nmedian ratio: {spread(ratios)}"


NOTES = """
seconds: from the start of the process to the end of the training, estimates of the loss on the way included;
ratio: numpygpt's over nanoGPT's; loss: the mean over the whole held-out tenth, each character counted once."""
