"""Let a trained model go on from a prompt."""

import argparse
import sys
from pathlib import Path

from numpygpt import checkpoint
from numpygpt.data import CharTokenizer, DataError
from numpygpt.sample import generate


def main() -> int:
    """Read the flags, load the model and write; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, help="folder of a trained model, such as runs/shakespeare")
    add("--prompt", default="\n", help="text to go on from (the default is a line break)")
    add("--length", type=int, default=500, help="characters to write")
    add("--temperature", type=float, default=0.8, help="0 always takes the most probable character")
    add("--top-k", type=int, help="draw among so many most probable characters only")
    add("--top-p", type=float, help="draw among the most probable characters that reach this probability together")
    add("--min-p", type=float, help="draw among characters at least so probable, relative to the most probable one")
    add("--repetition-penalty", type=float, default=1.0, help="above 1: make what was written less probable")
    add("--seed", type=int, help="the same seed gives the same text")
    args = parser.parse_args()
    try:
        model, state = checkpoint.load(args.folder)
        tokenizer = CharTokenizer.load(args.folder)
        if tokenizer.fingerprint != state.get("tokenizer"):
            raise DataError(f"{args.folder}/tokenizer.json isn't the tokenizer this model was trained with")
        prompt_ids = tokenizer.encode(args.prompt)
        tokens = generate(
            model,
            prompt_ids,
            args.length,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            rng=args.seed,
        )
        text = map(tokenizer.decode, ([token] for token in tokens))
        first = next(text, "")  # a setting that makes no sense shows here, before anything is written
    except (DataError, ValueError, OSError) as error:
        parser.error(str(error))
    print(args.prompt, end=first, flush=True)
    for character in text:
        print(character, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
