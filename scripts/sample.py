"""Let a trained model go on from a prompt, or from several at once."""

import argparse
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from numpygpt import pretrained
from numpygpt.array import check_not_negative
from numpygpt.cli import Parser, add_device, add_limits, fail, run
from numpygpt.data import Tokenizer
from numpygpt.device import mover
from numpygpt.sample import Draw, generate_batch, until_stop

LIMITS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
SHOWN = 5  # tokens of each distribution that --explain shows
BAR = 40  # characters for a probability of 1


def parse() -> argparse.Namespace:
    """Read the flags."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="folder of a trained model, such as runs/shakespeare")
    add("--model", help="instead of it, one that others have trained: smollm2, a GGUF file or a Hugging Face folder")
    add("--prompt", action="append", help="text to go on from (default: a line break); repeated: one text for each")
    add("--length", type=int, default=500, help="tokens to write, of which one is a character or more (default: 500)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add("--explain", action="store_true", help="show what each token was drawn from, and the text at the end")
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        help="above 1: make what was written less probable (default: 1)",
    )
    add_limits(parser, temperature=0.8)
    add_device(parser)
    return parser.parse_args()


def explained(draw: Draw, tokenizer: Tokenizer) -> str:
    """Return a table of the most probable tokens of a draw, with bars; an arrow points to the one drawn."""
    likely = sorted(range(draw.probs.size), key=lambda i: -draw.probs[i])[:SHOWN]
    if draw.token not in likely:
        likely.append(draw.token)
    rows = []
    for token in likely:
        p = draw.probs[token]
        if p > 0:
            arrow = "->" if token == draw.token else "  "
            rows.append(f"{arrow} {tokenizer.decode([token])!r:7}{100 * p:6.1f} % {'#' * round(BAR * p)}".rstrip())
    return "\n".join(rows) + "\n"


def drawn(steps: Iterable[list[Draw | None]], i: int, explain: Tokenizer | None) -> Iterator[int]:
    """Yield the tokens of text i until it ends; print how each was drawn, if a tokenizer is given to name them."""
    for step in steps:
        draw = step[i]
        if draw is None:
            return
        if explain is not None:
            print(explained(draw, explain), flush=True)
        yield draw.token


def main() -> int:
    """Load the model and write; return the exit status."""
    args = parse()
    prompts = args.prompt or ["\n"]
    try:
        check_not_negative(length=args.length)
        if args.seed is not None:
            check_not_negative(seed=args.seed)
        if "" in args.stop:
            raise ValueError("--stop is empty: give at least one character")
        if args.explain and len(prompts) > 1:
            raise ValueError("--explain takes one --prompt")
        if (args.folder is None) == (args.model is None):
            raise ValueError("give the folder of a trained model, or --model with the name of another one")
        move = mover(args.device)  # a device that can't be had is refused before a model is read
        found = pretrained.from_run(args.folder) if args.model is None else pretrained.load(args.model)
        model, tokenizer, start, ends = found[:4]
        model.to(move)
        limits = {name: vars(args)[name] for name in LIMITS}
        ids = [np.array([*start, *tokenizer.encode(prompt)], np.int64) for prompt in prompts]
        drawing = {**limits, "stop": ends, "vocab_size": tokenizer.vocab_size, "rng": args.seed}
        steps = generate_batch(model, ids, args.length, **drawing)
        first = list(itertools.islice(steps, 1))  # a setting that makes no sense shows here, before anything is written
    except (ValueError, OSError, ImportError) as error:
        fail(error)
    copies = itertools.tee(itertools.chain(first, steps), len(prompts))  # each text reads its own part of every step
    for i, prompt in enumerate(prompts):
        ids_of_text = drawn(copies[i], i, tokenizer if args.explain else None)
        text = until_stop(tokenizer.stream(ids_of_text), args.stop)
        if args.explain:
            text = iter(["".join(text)])
        print(prompt, end="", flush=True)
        for piece in text:
            print(piece, end="", flush=True)
        print()
        if i < len(prompts) - 1:
            print("-" * BAR)
    return 0


if __name__ == "__main__":
    run(main)
