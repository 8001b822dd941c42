"""Let a trained model go on from a prompt."""

import argparse
from pathlib import Path

from numpygpt import checkpoint
from numpygpt.array import check_not_negative
from numpygpt.cli import fail, run
from numpygpt.data import CharTokenizer, DataError
from numpygpt.sample import generate


def main() -> int:
    """Read the flags, load the model and write; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("folder", type=Path, help="folder of a trained model, such as runs/shakespeare")
    add("--prompt", default="\n", help="text to go on from (default: a line break)")
    add("--length", type=int, default=500, help="characters to write (default: 500)")
    add("--temperature", type=float, default=0.8, help="0 always takes the most probable character (default: 0.8)")
    add("--top-k", type=int, help="draw among so many most probable characters only")
    add("--top-p", type=float, help="draw among the most probable characters that reach this probability together")
    add("--min-p", type=float, help="draw among characters at least so probable, relative to the most probable one")
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        help="above 1: make what was written less probable (default: 1)",
    )
    add("--seed", type=int, help="the same seed gives the same text")
    args = parser.parse_args()
    try:
        check_not_negative(length=args.length)
        if args.seed is not None:
            check_not_negative(seed=args.seed)
        model, state = checkpoint.load(args.folder)
        tokenizer = CharTokenizer.load(args.folder)
        if tokenizer.fingerprint != state.get("tokenizer"):
            raise DataError(f"{args.folder}/tokenizer.json isn't the tokenizer this model was trained with")
        limits = {name: vars(args)[name] for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
        tokens = generate(model, tokenizer.encode(args.prompt), args.length, **limits, rng=args.seed)
        text = map(tokenizer.decode, ([token] for token in tokens))
        first = next(text, "")  # a setting that makes no sense shows here, before anything is written
    except (ValueError, OSError) as error:
        fail(error)
    print(args.prompt, end=first, flush=True)
    for character in text:
        print(character, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    run(main)
