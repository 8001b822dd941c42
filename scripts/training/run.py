"""A training run: a folder, and all that is needed to begin it or to go on with it."""

import argparse
import contextlib
import dataclasses
import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np

from numpygpt import checkpoint, durable
from numpygpt.array import check_not_negative, check_positive
from numpygpt.cli import Parser, fail
from numpygpt.config import TransformerConfig
from numpygpt.data import split
from numpygpt.device import mover
from numpygpt.forks import WorkerLost
from numpygpt.metrics import MetricsLog
from numpygpt.model import TransformerLM
from numpygpt.ranks import Ranks, RanksDiffer
from numpygpt.tokenizer import Tokenizer, per_character
from numpygpt.tokens import open_tokens, read_header
from numpygpt.train import TrainConfig, Trainer
from training.corpus import encode_corpus, make_tokenizer
from training.flags import NEW, given_flags, with_recipe
from training.start import check_lora, fill_in, is_trained, start_from

# What a resumed run may change: none of these has a part in what the next step does.
FREE = {"out", "resume", "config", "minutes", "keep", "sample_length"}
VERSIONS = {"python": platform.python_version(), "numpy": np.__version__}


def resumed(parser: Parser, args: argparse.Namespace, ranks: int) -> tuple[argparse.Namespace, Path | None]:
    """Return the flags to train with and the checkpoint to go on from, None for a new run.

    Raises ValueError if a new run would meet an old one in its folder, or no checkpoint is whole, or a flag differs
    from the run's. Otherwise checkpoints that are damaged are moved aside.
    """
    if not args.resume:
        if (args.out / checkpoint.MODEL).exists() or checkpoint.checkpoints(args.out):
            raise ValueError(f"{args.out} holds a run: --resume goes on with it, another --out leaves it as it is")
        return args, None
    found, damaged = checkpoint.newest_whole(args.out)
    if found is None:
        reasons = "; ".join(map(str, damaged.values())) or "leave out --resume to begin a run there"
        raise ValueError(f"--resume: {args.out} holds no checkpoint to go on from: {reasons}")
    _, state = checkpoint.load(found)
    flags = state.get("flags")
    if not isinstance(flags, dict) or "tokens" not in state:
        raise ValueError(f"--resume: {found} wasn't saved by this version of this script")
    if (before := state.get("ranks", 1)) != ranks:
        raise ValueError(f"the run under {args.out} has {before} ranks, not {ranks}: start as many")
    given = given_flags(parser)
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if name in given and getattr(args, name) != value:
            raise ValueError(f"{flag} is {value} in the run under {args.out}, not {getattr(args, name)}: leave it out")
    for folder, error in damaged.items():
        print(f"warning: {error}; moved to {checkpoint.set_aside(folder)}", file=sys.stderr)
    print(f"resuming from {found}", file=sys.stderr)
    args = with_recipe(parser, flags.get("recipe"), {})  # which may say what the run doesn't keep, as --sample-length
    return argparse.Namespace(**{**vars(args), **flags}), found


@dataclasses.dataclass
class Start:
    """What training begins with, or goes on with from the checkpoint `found`: of several ranks, the first makes it."""

    args: argparse.Namespace
    found: Path | None
    model: TransformerLM
    tokenizer: Tokenizer
    tokens: Path


class Run:
    """A training run in its folder, which this program holds alone; or, of several ranks, the first of them."""

    def __init__(self, parser: Parser, args: argparse.Namespace, ranks: Ranks):
        """Check the flags and make, or find again, all that is needed to train.

        Raises ValueError, OSError, ImportError or MemoryError, and leaves the folder as it was, if that can't be.
        """
        self.ranks = ranks
        cores = ranks.cores()
        with contextlib.ExitStack() as undo:
            start = ranks.from_first(lambda: self.start(parser, args, cores, undo))
            self.args, self.model, self.tokenizer = start.args, start.model, start.tokenizer
            self.flags = {name: value for name, value in vars(self.args).items() if name not in FREE}
            self.sample_rng = generators(self.args.seed)[1]
            if self.args.device != "cpu":
                ranks.take_gpu()
            ranks.together(lambda: self.make_trainer(start))
            if start.found is not None:
                self.restore(start.found)
            self.losses_per_character = per_character(1.0, self.trainer.validation_tokens[1:], self.tokenizer)
            ranks.from_first(self.open_folder)
            undo.pop_all()
            ranks.from_first(lambda: durable.remove_leftovers(args.out))

    def start(self, parser: Parser, args: argparse.Namespace, cores: int, undo: contextlib.ExitStack) -> Start:
        """Make what training begins with; `undo` brings back what was in the folder before."""
        check_not_negative(sample_length=args.sample_length)
        check_positive(keep=args.keep)
        if not args.minutes > 0:
            raise ValueError(f"minutes must be above 0, not {args.minutes}")
        args, found = resumed(parser, args, self.ranks.size)
        mover(args.device)  # a device that can't be had is refused before anything is made
        if args.threads is None:  # a number, for --resume and --config: another rounds differently
            args.threads = cores if args.device == "cpu" else 1
        init_rng, given = generators(args.seed)[0], given_flags(parser)
        check_lora(args, given)
        if is_trained(args.init):
            model, tokenizer = start_from(args, found, given, init_rng)
        else:
            fill_in(args, NEW)
            tokenizer = make_tokenizer(args, found, given)
            sizes = of_class(vars(args), TransformerConfig) | {"vocab_size": tokenizer.vocab_size}
            model = TransformerLM(TransformerConfig(**sizes), rng=init_rng)
        TrainConfig(**of_class(vars(args), TrainConfig))  # what it refuses is refused before the corpus is encoded
        return Start(args, found, model, tokenizer, encode_corpus(args, tokenizer, found, undo))

    def make_trainer(self, start: Start) -> None:
        """Make the trainer, on the device of the run."""
        if not start.tokens.exists():  # on rank 0 it does
            raise ValueError(f"{start.tokens} isn't there on rank {self.ranks.rank}: all ranks must see the same files")
        self.model.to(self.args.device)
        self.tokens, self.tokens_header = open_tokens(start.tokens, self.tokenizer), read_header(start.tokens)
        training, held_out = split(self.tokens, self.args.context_length)
        if self.args.eval_tokens is not None:
            check_positive(eval_tokens=self.args.eval_tokens)
            held_out = held_out[: self.args.eval_tokens + 1]  # the first is no target
        config = TrainConfig(**of_class(self.flags, TrainConfig))
        self.trainer = Trainer(self.model, training, held_out, config, self.args.threads, self.ranks)
        self.saved_at: int | None = None

    def open_folder(self) -> None:
        """Open the log, and write down what this run is."""
        out = self.args.out
        self.log = MetricsLog(out / "metrics.jsonl", self.trainer.reported)
        durable.write_file(out / "config.json", json.dumps({**self.flags, "versions": VERSIONS}, indent=1) + "\n")
        self.tokenizer.save(out)  # a copy for whoever looks here

    def restore(self, found: Path) -> None:
        """Bring the trainer to where it was at the checkpoint `found`."""

        def read() -> dict[str, Any]:
            saved, state = checkpoint.load(found)
            if self.args.lora is None:
                here = self.model.flat.value
                self.model.load_state_dict({name: np.asarray(x, like=here) for name, x in saved.state_dict().items()})
            checkpoint.load_optimizer(found, self.trainer.optimizer)
            return state["trainer"]

        # All take rank 0's, so that one that sees another checkpoint there is found out by its optimiser's step.
        self.trainer.load_state_dict(self.ranks.together(read)[0])
        self.saved_at = self.trainer.step

    def save(self, validation_loss: float | None = None) -> None:
        """Save a checkpoint of this step, unless there is one, and delete those that needn't be kept."""
        trainer, out = self.trainer, self.args.out
        if self.saved_at == trainer.step:
            return
        trainer.check_alike()
        state = {
            "step": trainer.step,
            "validation_loss": validation_loss,
            "tokens": self.tokens_header,
            "flags": self.flags,
            "ranks": self.ranks.size,
            "trainer": trainer.state_dict(),
        }

        def write() -> None:
            self.log.sync()
            checkpoint.save(checkpoint.of_step(out, trainer.step), self.model, trainer.optimizer, state, self.tokenizer)
            checkpoint.prune(out, self.args.keep, checkpoint.of_step(out, trainer.best_step))

        self.ranks.from_first(write)
        self.saved_at = trainer.step

    def train(self) -> float | None:
        """Train; return the validation loss, or None if the run was stopped, which is saved then.

        A run that can't go on ends here.
        """

        def log(metrics: dict[str, Any]) -> None:
            if "validation_loss" in metrics:
                metrics["validation_loss_per_character"] = self.losses_per_character * metrics["validation_loss"]
            self.ranks.from_first(lambda: self.log.append(metrics))

        try:
            if is_trained(self.args.init) and self.trainer.step == 0:
                print(f"validation loss before the first step: {self.trainer.evaluate():.4f}", flush=True)
            validation_loss = self.trainer.run(log, self.save, self.args.minutes)
            if validation_loss is None:
                self.save()
            return validation_loss
        except BrokenPipeError:  # nobody reads what is printed any more
            if self.ranks.size == 1:  # of several, the others don't know
                self.save()
            raise
        except (FloatingPointError, MemoryError, OSError, WorkerLost, RanksDiffer) as error:
            out, saved_at = self.args.out, self.saved_at
            kept = "nothing was saved" if saved_at is None else f"the checkpoint of step {saved_at} is in {out}"
            remedy = "try a smaller --lr; " if isinstance(error, FloatingPointError) else ""
            fail(f"stopped after step {self.trainer.step}: {error}; {remedy}{kept}", 1)


def generators(seed: int) -> list[np.random.Generator]:
    """Return the generators of starting weights and of the sample at the end."""
    return np.random.default_rng(seed).spawn(2)


def of_class(flags: dict[str, Any], config: type) -> dict[str, Any]:
    """Return those flags that are fields of a dataclass."""
    return {field.name: flags[field.name] for field in dataclasses.fields(config) if field.name in flags}
