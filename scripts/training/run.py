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
from numpygpt.corpus import DataError, corpus_pieces
from numpygpt.data import split
from numpygpt.forks import WorkerLost
from numpygpt.metrics import MetricsLog
from numpygpt.model import TransformerLM
from numpygpt.threads import usable_cores
from numpygpt.tokenizer import BPETokenizer, CharTokenizer, Ids, Tokenizer, load_tokenizer, per_character
from numpygpt.tokens import is_tokens, open_tokens, read_header, write_tokens
from numpygpt.train import TrainConfig, Trainer
from training.flags import NEW, given_flags, with_recipe
from training.start import check_lora, fill_in, is_trained, start_from

# What a resumed run may change: none of these has a part in what the next step does.
FREE = {"out", "resume", "config", "minutes", "keep", "sample_length"}


def resumed(parser: Parser, args: argparse.Namespace) -> tuple[argparse.Namespace, Path | None]:
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


class Run:
    """A training run in its folder, which this program holds alone."""

    def __init__(self, parser: Parser, args: argparse.Namespace):
        """Check the flags and make, or find again, all that is needed to train.

        Raises ValueError, OSError, ImportError or MemoryError, and leaves the folder as it was, if that can't be.
        """
        check_not_negative(sample_length=args.sample_length)
        check_positive(keep=args.keep)
        if not args.minutes > 0:
            raise ValueError(f"minutes must be above 0, not {args.minutes}")
        with contextlib.ExitStack() as undo:
            self.args, found = resumed(parser, args)
            if self.args.threads is None:
                self.args.threads = usable_cores()  # a number, for --resume and --config: another rounds differently
            init_rng, self.sample_rng = np.random.default_rng(self.args.seed).spawn(2)
            given = given_flags(parser)
            check_lora(self.args, given)
            if is_trained(self.args.init):
                self.model, self.tokenizer = start_from(self.args, found, given, init_rng)
            else:
                fill_in(self.args, NEW)
                self.tokenizer = self.make_tokenizer(found, given)
                sizes = of_class(vars(self.args), TransformerConfig) | {"vocab_size": self.tokenizer.vocab_size}
                self.model = TransformerLM(TransformerConfig(**sizes), rng=init_rng)
            self.flags = {name: value for name, value in vars(self.args).items() if name not in FREE}
            train_config = TrainConfig(**of_class(self.flags, TrainConfig))
            self.tokens, self.tokens_header = self.open_tokens(found, undo)
            training, held_out = split(self.tokens, self.args.context_length)
            if self.args.eval_tokens is not None:
                check_positive(eval_tokens=self.args.eval_tokens)
                held_out = held_out[: self.args.eval_tokens + 1]  # the first is no target
            self.trainer = Trainer(self.model, training, held_out, train_config, self.args.threads)
            self.saved_at: int | None = None
            if found is not None:
                self.restore(found)
            self.losses_per_character = per_character(1.0, self.trainer.validation_tokens[1:], self.tokenizer)
            self.log = MetricsLog(args.out / "metrics.jsonl", self.trainer.reported)
            versions = {"python": platform.python_version(), "numpy": np.__version__}
            config_json = json.dumps({**self.flags, "versions": versions}, indent=1) + "\n"
            durable.write_file(args.out / "config.json", config_json)
            self.tokenizer.save(args.out)  # a copy for whoever looks here
            undo.pop_all()
            durable.remove_leftovers(args.out)

    def make_tokenizer(self, found: Path | None, given: set[str]) -> Tokenizer:
        """Return the tokenizer of the run, or of the file of tokens, or learn one from the corpus."""
        args = self.args
        if found is not None:
            return load_tokenizer(found)
        if is_tokens(args.corpus):
            if given & {"tokenizer", "vocab_size"}:
                raise ValueError(f"{args.corpus} has a tokenizer beside it: leave out --tokenizer and --vocab-size")
            return load_tokenizer(Path(args.corpus).parent)
        if args.vocab_size is not None and args.tokenizer != "bpe":
            raise ValueError("--vocab-size goes with --tokenizer bpe: characters make a vocabulary of their own")
        if args.tokenizer == "bpe":
            return BPETokenizer.train(corpus_pieces(args.corpus), 512 if args.vocab_size is None else args.vocab_size)
        return CharTokenizer.train(corpus_pieces(args.corpus))

    def open_tokens(self, found: Path | None, undo: contextlib.ExitStack) -> tuple[Ids, dict[str, Any]]:
        """Return the ids of the corpus and their file's header; `undo` brings back what was there before.

        A run makes the file once and goes on with it, whatever becomes of the text. ValueError if the file is lost and
        the text doesn't give the same one again.
        """
        corpus, path = self.args.corpus, self.args.out / "tokens.bin"
        expected = None if found is None else checkpoint.load(found)[1]["tokens"]
        if is_tokens(corpus):
            path = Path(corpus)
        elif not expected or not is_whole(path, expected):
            durable.remove_leftovers(self.args.out)  # of encodings that were killed, each as large as the file
            if path.is_file():
                before = path.rename(path.with_name(f"{durable.TEMPORARY}{path.name}-before"))
                undo.callback(before.rename, path)
            undo.callback(path.unlink, missing_ok=True)
            write_tokens(path, map(self.tokenizer.encode, corpus_pieces(corpus)), self.tokenizer)
        tokens, header = open_tokens(path, self.tokenizer), read_header(path)
        if expected not in (None, header):
            raise ValueError(f"--corpus {corpus} doesn't hold any more what {found} was trained on")
        return tokens, header

    def restore(self, found: Path) -> None:
        """Bring the trainer to where it was at the checkpoint `found`."""
        saved, state = checkpoint.load(found)
        if self.args.lora is None:
            self.model.load_state_dict(saved.state_dict())
        checkpoint.load_optimizer(found, self.trainer.optimizer)
        self.trainer.load_state_dict(state["trainer"])
        self.saved_at = self.trainer.step

    def save(self, validation_loss: float | None = None) -> None:
        """Save a checkpoint of this step, unless there is one, and delete those that needn't be kept."""
        trainer, out = self.trainer, self.args.out
        if self.saved_at == trainer.step:
            return
        state = {
            "step": trainer.step,
            "validation_loss": validation_loss,
            "tokens": self.tokens_header,
            "flags": self.flags,
            "trainer": trainer.state_dict(),
        }
        self.log.sync()
        checkpoint.save(checkpoint.of_step(out, trainer.step), self.model, trainer.optimizer, state, self.tokenizer)
        self.saved_at = trainer.step
        checkpoint.prune(out, self.args.keep, checkpoint.of_step(out, trainer.best_step))

    def train(self) -> float | None:
        """Train; return the validation loss, or None if the run was stopped, which is saved then.

        A run that can't go on ends here.
        """

        def log(metrics: dict[str, Any]) -> None:
            if "validation_loss" in metrics:
                metrics["validation_loss_per_character"] = self.losses_per_character * metrics["validation_loss"]
            self.log.append(metrics)

        try:
            if is_trained(self.args.init) and self.trainer.step == 0:
                print(f"validation loss before the first step: {self.trainer.evaluate():.4f}", flush=True)
            validation_loss = self.trainer.run(log, self.save, self.args.minutes)
            if validation_loss is None:
                self.save()
            return validation_loss
        except BrokenPipeError:  # nobody reads what is printed any more
            self.save()
            raise
        except (FloatingPointError, MemoryError, OSError, WorkerLost) as error:
            out, saved_at = self.args.out, self.saved_at
            kept = "nothing was saved" if saved_at is None else f"the checkpoint of step {saved_at} is in {out}"
            remedy = "try a smaller --lr; " if isinstance(error, FloatingPointError) else ""
            fail(f"stopped after step {self.trainer.step}: {error}; {remedy}{kept}", 1)


def is_whole(path: Path, header: dict[str, Any]) -> bool:
    """Whether `path` is a file of tokens, undamaged, with this header."""
    try:
        return len(open_tokens(path)) > 0 and read_header(path) == header
    except DataError:
        return False


def of_class(flags: dict[str, Any], config: type) -> dict[str, Any]:
    """Return those flags that are fields of a dataclass."""
    return {field.name: flags[field.name] for field in dataclasses.fields(config) if field.name in flags}
