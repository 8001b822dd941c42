"""Talk with a model: it answers each line and remembers the conversation.

Ctrl-C stops an answer, /new begins another conversation, and Ctrl-D ends. If nobody types, each line of the input is a
question.
"""

import argparse
import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator

from numpygpt import pretrained
from numpygpt.array import check_not_negative
from numpygpt.chat import ContextFull, Conversation
from numpygpt.cli import Parser, add_device, add_limits, fail, run
from numpygpt.device import mover

LIMITS = ("temperature", "top_k", "top_p", "min_p")
NEW = "/new"


def parse() -> argparse.Namespace:
    """Read the flags."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--model", default="smollm2", help="smollm2, a GGUF file or a Hugging Face folder (default: smollm2)")
    add("--system", help="tell the model what it is and how to answer (default: what its makers tell it)")
    add("--length", type=int, help="end an answer after so many tokens (default: where the model ends it)")
    add_limits(parser, temperature=0.2)
    add_device(parser)
    return parser.parse_args()


def questions() -> Iterator[str]:
    """Yield what is typed, or the lines of the input."""
    if not sys.stdin.isatty():
        yield from map(str.strip, sys.stdin)
        return
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # input() then knows the arrow keys
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\nCtrl-D ends")


def write_answer(conversation: Conversation, question: str, length: int | None) -> None:
    """Print the answer as it comes. Ctrl-C, if somebody types, ends it."""
    with contextlib.closing(conversation.answer(question, length)) as pieces:
        try:
            for piece in pieces:
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
    print()


def main() -> int:
    """Load the model and answer; return the exit status."""
    args = parse()
    status = 0
    try:
        if args.length is not None:
            check_not_negative(length=args.length)
        if args.seed is not None:
            check_not_negative(seed=args.seed)
        limits = {name: vars(args)[name] for name in LIMITS}
        move = mover(args.device)  # a device that can't be had is refused before a model is read
        found = pretrained.load(args.model)
        found.model.to(move)
        begin = functools.partial(Conversation, found, args.system, rng=args.seed, **limits)
        conversation = begin()
    except (ValueError, OSError, ImportError) as error:
        fail(error)
    for question in filter(None, questions()):
        if question == NEW:
            conversation = begin()
            continue
        try:
            write_answer(conversation, question, args.length)
        except ValueError as error:
            remedy = f" with {NEW}" if isinstance(error, ContextFull) else ""
            print(f"error: {error}{remedy}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    run(main)
