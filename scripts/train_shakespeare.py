"""Train a Transformer on Shakespeare, in plain NumPy, and let it write.

With no arguments: 2,000 steps of a small model on Shakespeare's plays, saved under runs/shakespeare. --init takes a
trained model instead, which learns as a whole or, with --lora, by adapters. Whatever ends a run, --resume goes on from
the last checkpoint, to the same bits as if nothing had happened.

    mpiexec -n 4 python scripts/train_shakespeare.py     four processes share each batch
"""

import contextlib

from numpygpt import cli, durable
from numpygpt.cli import fail
from numpygpt.corpus import DataError
from numpygpt.ranks import Ranks, join
from numpygpt.sample import generate
from numpygpt.tokenizer import CharTokenizer
from training.flags import make_parser, parse_arguments
from training.run import VERSIONS, Run


def main() -> int:
    """Train, report, save and sample; return the exit status."""
    try:
        ranks = join()
    except (ValueError, ImportError) as error:
        fail(error)
    with ranks.ending_together():
        return train_together(ranks)


def train_together(ranks: Ranks) -> int:
    """Train, report, save and sample, as one of several ranks or alone; return the exit status."""
    parser = make_parser(str(__doc__))
    args = parse_arguments(parser)
    with contextlib.ExitStack() as stack:
        try:
            ranks.check_alike({f"--{name.replace('_', '-')}": value for name, value in vars(args).items()} | VERSIONS)
            ranks.from_first(lambda: stack.enter_context(durable.locked(args.out)) and None)
            run = Run(parser, args, ranks)
        except (ValueError, OSError, ImportError) as error:
            fail(error)
        except MemoryError as error:
            fail(f"the model doesn't fit into memory ({error}): make it smaller")
        return train_and_report(run)


def train_and_report(run: Run) -> int:
    """Train, with the numbers that a reader waits for before and after it; then write a sample. The exit status."""
    args, tokenizer, trainer = run.args, run.tokenizer, run.trainer
    characters = f"{tokenizer.count_characters(run.tokens):,} characters"
    print(f"corpus: {args.corpus}, {characters}, {len(run.tokens):,} tokens of {tokenizer.vocab_size} kinds")
    learning = sum(p.size for p in run.model.parameters() if p.trainable)
    adapters = "" if args.lora is None else f", frozen, and {learning:,} of adapters"
    print(f"model: {run.model.flat.value.size:,} parameters{adapters}", flush=True)
    validation_loss = run.train()
    if validation_loss is None:
        print(f"Stopped after step {trainer.step} of {args.steps}; saved in {args.out}; --resume goes on")
        return 130
    print(f"validation loss: {validation_loss:.4f}")
    if trainer.best_loss < validation_loss:
        print(f"The lowest was {trainer.best_loss:.4f}; that checkpoint is kept too")
    if tokenizer.kind != CharTokenizer.kind:
        print(f"a character: {run.losses_per_character * validation_loss:.4f}")
    if run.ranks.rank > 0:
        return 0
    print(f"Saved in {args.out}; a sample:\n")
    try:
        prompt = tokenizer.encode("\n")
    except DataError:
        prompt = run.tokens[:1]
    size = tokenizer.vocab_size
    ids = generate(run.model, prompt, args.sample_length, temperature=0.8, vocab_size=size, rng=run.sample_rng)
    for text in tokenizer.stream(ids):
        print(text, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    cli.run(main)
