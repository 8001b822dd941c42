"""Train a Transformer on Shakespeare, in plain NumPy, and let it write.

With no arguments: 2,000 steps of a small model on Shakespeare's plays, saved under runs/shakespeare. Whatever ends it,
--resume goes on from the last checkpoint, to the same bits as if nothing had happened.
"""

import argparse
import hashlib
import json
import math
import platform
import sys
from pathlib import Path

import numpy as np

from numpygpt import checkpoint, durable
from numpygpt.array import check_not_negative, check_positive
from numpygpt.cli import fail, run
from numpygpt.config import CHOICES, TransformerConfig
from numpygpt.corpus import load_corpus
from numpygpt.data import BPETokenizer, CharTokenizer, per_character, split
from numpygpt.metrics import MetricsLog
from numpygpt.model import TransformerLM
from numpygpt.sample import generate
from numpygpt.train import TrainConfig, Trainer


def make_parser() -> argparse.ArgumentParser:
    """Declare the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--corpus",
        default="plays",
        help='"plays" (38 plays), "tiny" (tiny Shakespeare), a UTF-8 text file, a folder of *.txt',
    )
    add("--tokenizer", choices=("char", "bpe"), default="char", help="what a token is: a character, or merged bytes")
    add("--vocab-size", type=int, help="tokens of --tokenizer bpe, at most (unless given: 512)")
    add(
        "--out",
        type=Path,
        default=Path("runs/shakespeare"),
        help="folder of the run; one that holds a run already is refused, unless --resume is given",
    )
    add(
        "--resume",
        action="store_true",
        help="go on with the run under --out, with its flags, as if it had never stopped",
    )
    add("--config", type=Path, metavar="FILE", help="take the flags that aren't given from a run's config.json")
    add("--keep", type=int, default=3, help="checkpoints to keep: the newest so many, and the best")

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, default=TrainConfig.steps, help="number of updates; the schedule is fitted to it")
    add("--minutes", type=float, default=math.inf, help="stop after this time, if the steps take longer")
    add("--batch-size", type=int, default=TrainConfig.batch_size, help="sequences in a batch")
    add("--accumulate", type=int, default=TrainConfig.accumulate, help="parts a batch is cut into, to save memory")
    add("--lr", type=float, default=TrainConfig.lr, help="learning rate at the peak")
    add("--min-lr", type=float, help="learning rate at the end (unless given: a tenth of --lr)")
    add(
        "--warmup-steps",
        type=int,
        help="steps of rising learning rate (unless given: 100, or a tenth of a shorter run)",
    )
    add("--weight-decay", type=float, default=TrainConfig.weight_decay, help="AdamW's decay, on matrices only")
    add("--beta1", type=float, default=TrainConfig.beta1, help="decay of AdamW's first moment")
    add("--beta2", type=float, default=TrainConfig.beta2, help="decay of AdamW's second moment")
    add("--grad-clip", type=float, default=TrainConfig.grad_clip, help="largest norm of the gradient")
    add(
        "--eval-interval",
        type=int,
        default=TrainConfig.eval_interval,
        help="steps between evaluations on the held-out tenth",
    )
    add("--seed", type=int, default=TrainConfig.seed, help="of starting weights, batches, dropout and sample")
    add("--sample-length", type=int, default=500, help="tokens to write at the end")

    add = parser.add_argument_group("model").add_argument
    add("--context-length", type=int, default=64, help="tokens the model sees")
    add("--d-model", type=int, default=128, help="features of the residual stream")
    add("--num-layers", type=int, default=4, help="decoder blocks")
    add("--num-heads", type=int, default=4, help="attention heads")
    add("--num-kv-heads", type=int, help="key/value heads (unless given: as many as --num-heads)")
    add("--d-ff", type=int, help="hidden features of the ffn (unless given: 4, or 8/3 if gated, times --d-model)")
    add("--norm", choices=CHOICES["norm"], default=TransformerConfig.norm, help="kind of norm")
    add(
        "--norm-position",
        choices=CHOICES["norm_position"],
        default=TransformerConfig.norm_position,
        help="before or after the sublayer",
    )
    add("--norm-eps", type=float, default=TransformerConfig.norm_eps, help="added to the mean square or variance")
    add("--ffn", choices=CHOICES["ffn"], default=TransformerConfig.ffn, help="kind of feed-forward layer")
    add(
        "--positions",
        choices=CHOICES["positions"],
        default=TransformerConfig.positions,
        help="how the model knows the order",
    )
    add("--rope-theta", type=float, default=TransformerConfig.rope_theta, help="base of RoPE's frequencies")
    add(
        "--rope-layout",
        choices=CHOICES["rope_layout"],
        default=TransformerConfig.rope_layout,
        help="which features RoPE pairs",
    )
    add(
        "--bias",
        action=argparse.BooleanOptionalAction,
        default=TransformerConfig.bias,
        help="biases of linear maps and LayerNorm",
    )
    add(
        "--tie-embeddings",
        action=argparse.BooleanOptionalAction,
        default=TransformerConfig.tie_embeddings,
        help="one array for both ends",
    )
    add("--dropout", type=float, default=TransformerConfig.dropout, help="probability of dropping a feature")
    add("--init", choices=CHOICES["init"], default=TransformerConfig.init, help="starting weights")
    return parser


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the flags; those that aren't given come from the file of --config, if that is."""
    args = parser.parse_args()
    if args.config is None:
        return args
    try:
        flags = json.loads(args.config.read_text(encoding="utf-8"))
        flags.pop("versions", None)
        if unknown := sorted(flags.keys() - vars(args).keys()):
            raise ValueError(f"it has no flag {', '.join(unknown)}")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        fail(f"--config {args.config} is no config.json of a run: {error}")
    parser.set_defaults(**flags)
    return parser.parse_args()


def given_flags(parser: argparse.ArgumentParser) -> set[str]:
    """Return the names of the flags on the command line, whether or not they say what would hold without them."""
    unset = object()
    namespace = argparse.Namespace(**{name: unset for name in vars(parser.parse_args())})
    return {name for name, value in vars(parser.parse_args(namespace=namespace)).items() if value is not unset}


# What a resumed run may change: none of these has a part in what the next step does.
FREE = {"out", "resume", "config", "minutes", "keep", "sample_length"}


def resumed(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[argparse.Namespace, Path | None]:
    """Return the flags to train with and the checkpoint to go on from, None for a new run.

    Raises ValueError if a new run would meet an old one in its folder, or no checkpoint is whole, or a flag differs
    from the run's.
    """
    if not args.resume:
        if (args.out / checkpoint.MODEL).exists() or checkpoint.checkpoints(args.out):
            raise ValueError(f"{args.out} holds a run: --resume goes on with it, another --out leaves it as it is")
        return args, None
    found, damaged = checkpoint.newest_whole(args.out)
    reasons = "".join(f"; {error}" for error in damaged.values())
    if found is None:
        raise ValueError(f"--resume: {args.out} holds no checkpoint to go on from{reasons}")
    _, state = checkpoint.load(found)
    flags = state.get("flags")
    if not isinstance(flags, dict):
        raise ValueError(f"--resume: {found} wasn't saved by this script, its state holds no flags")
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if name in given_flags(parser) and getattr(args, name) != value:
            raise ValueError(f"{flag} is {value} in the run under {args.out}, not {getattr(args, name)}: leave it out")
    for folder, error in damaged.items():
        print(f"warning: {error}; moved to {checkpoint.set_aside(folder)}", file=sys.stderr)
    print(f"resuming from {found}", file=sys.stderr)
    return argparse.Namespace(**{**vars(args), **flags}), found


def restore(trainer: Trainer, found: Path, fingerprint: str, corpus_sha256: str) -> None:
    """Bring a new trainer to where the run was at the checkpoint `found`; ValueError if the corpus has changed."""
    saved, state = checkpoint.load(found)
    if (state["tokenizer"], state["corpus_sha256"]) != (fingerprint, corpus_sha256):
        raise ValueError(f"--corpus {state['flags']['corpus']} isn't the text any more that {found} was trained on")
    trainer.model.load_state_dict(saved.state_dict())
    checkpoint.load_optimizer(found, trainer.optimizer)
    trainer.load_state_dict(state["trainer"])


def main() -> int:
    """Train, report, save and sample; return the exit status."""
    parser = make_parser()
    args = parse_arguments(parser)
    try:
        args, found = resumed(parser, args)
        flags = {name: value for name, value in vars(args).items() if name not in FREE}
        train_config = TrainConfig(**{k: v for k, v in flags.items() if k in TrainConfig.__dataclass_fields__})
        check_not_negative(sample_length=args.sample_length)
        check_positive(keep=args.keep)
        if not args.minutes > 0:
            raise ValueError(f"minutes must be above 0, not {args.minutes}")
        bpe = args.tokenizer == "bpe"
        if args.vocab_size is not None and not bpe:
            raise ValueError("--vocab-size goes with --tokenizer bpe: characters make a vocabulary of their own")
        text = load_corpus(args.corpus)
        vocab_size = 512 if args.vocab_size is None else args.vocab_size
        tokenizer = BPETokenizer.train(text, vocab_size) if bpe else CharTokenizer.train(text)
        model_flags = {k: v for k, v in flags.items() if k in TransformerConfig.__dataclass_fields__}
        config = TransformerConfig(**model_flags | {"vocab_size": tokenizer.vocab_size})
        tokens = tokenizer.encode(text)
        corpus_sha256 = hashlib.sha256(tokens.tobytes()).hexdigest()
        train_tokens, validation_tokens = split(tokens, config.context_length)
        init_rng, sample_rng = np.random.default_rng(args.seed).spawn(2)
        model = TransformerLM(config, rng=init_rng)
        trainer = Trainer(model, train_tokens, validation_tokens, train_config)
        if found is not None:
            restore(trainer, found, tokenizer.fingerprint, corpus_sha256)
        log = MetricsLog(args.out / "metrics.jsonl", trainer.step)
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        durable.write_file(args.out / "config.json", json.dumps({**flags, "versions": versions}, indent=1) + "\n")
        tokenizer.save(args.out)  # a copy for whoever looks here
    except (ValueError, OSError, ImportError) as error:
        fail(error)
    except MemoryError as error:
        fail(f"the model doesn't fit into memory ({error}): make it smaller")

    saved_at = trainer.step if found else None

    def save(validation_loss: float | None) -> None:
        nonlocal saved_at
        if saved_at == trainer.step:
            return
        state = {
            "step": trainer.step,
            "validation_loss": validation_loss,
            "corpus_sha256": corpus_sha256,
            "flags": flags,
            "trainer": trainer.state_dict(),
        }
        log.sync()
        checkpoint.save(checkpoint.of_step(args.out, trainer.step), model, trainer.optimizer, state, tokenizer)
        saved_at = trainer.step
        checkpoint.prune(args.out, args.keep)

    try:
        kinds = f"{len(tokens):,} tokens of {tokenizer.vocab_size} kinds"
        print(f"corpus: {args.corpus}, {len(text):,} characters, {kinds}")
        print(f"model: {model.flat.value.size:,} parameters", flush=True)
        validation_loss = trainer.run(after_step=log.append, after_evaluation=save, minutes=args.minutes)
        if validation_loss is None:
            save(None)
            print(f"Stopped after step {trainer.step} of {args.steps}; saved in {args.out}; --resume goes on")
            return 130
    except BrokenPipeError:  # nobody reads what is printed any more
        save(None)
        raise
    except (FloatingPointError, MemoryError, OSError) as error:
        kept = "nothing was saved" if saved_at is None else f"the checkpoint of step {saved_at} is in {args.out}"
        remedy = "try a smaller --lr; " if isinstance(error, FloatingPointError) else ""
        fail(f"stopped after step {trainer.step}: {error}; {remedy}{kept}", 1)

    print(f"validation loss: {validation_loss:.4f}")
    if trainer.best_loss < validation_loss:
        print(f"The lowest was {trainer.best_loss:.4f}; that checkpoint is kept too")
    if bpe:
        print(f"a character: {per_character(validation_loss, validation_tokens[1:], tokenizer):.4f}")
    print(f"Saved in {args.out}; a sample:\n")
    prompt = "\n" if "\n" in text else text[0]
    sample = generate(model, tokenizer.encode(prompt), args.sample_length, temperature=0.8, rng=sample_rng)
    for characters in tokenizer.stream(sample):
        print(characters, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    run(main)
