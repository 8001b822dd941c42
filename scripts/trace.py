"""Watch a gradient flow: every array of one forward and one backward over a text, on one page.

The page is a single HTML file. Forward reads down its left half and backward up its right, each value beside its
gradient. The model is a small one with random weights, whose vocabulary is the characters of the text, or with --model
one that was trained.
"""

import argparse
from pathlib import Path

import numpy as np

from numpygpt import durable, pretrained
from numpygpt.array import check_not_negative
from numpygpt.cli import Parser, add_device, fail, run
from numpygpt.config import CHOICES, TransformerConfig
from numpygpt.data import CharTokenizer, DataError, Tokenizer
from numpygpt.device import mover
from numpygpt.model import TransformerLM
from tracing.page import Book, write
from tracing.record import trace
from training.flags import add_parts, given_flags

SMALL = {"d_model": 8, "num_layers": 1, "num_heads": 2, "d_ff": 16}
OF_ANY_MODEL = {"text", "out", "model", "layer", "book", "device"}


def make_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--text", default="To be", help="what the model reads, and whose next tokens it should predict")
    add("--out", type=Path, default=Path("trace.html"), help="the page")
    add("--model", help="a trained model: a run or checkpoint of ours, smollm2, a GGUF file or a Hugging Face folder")
    add("--layer", type=int, nargs="+", help="show the inside of these blocks, counted from 0 (unless given: of all)")
    add("--book", type=Path, help="folder of a built book, to whose equations the page links")
    add_device(parser)
    add = parser.add_argument_group("model", "Without --model it is an untrained one.").add_argument
    add("--seed", type=int, default=0, help="of starting weights and dropout")
    add("--init", choices=CHOICES["init"], default=TransformerConfig.init, help="how starting weights are drawn")
    add_parts(add)
    add("--d-ff", type=int, help="hidden features of the ffn")
    parser.set_defaults(**SMALL)
    return parser


def find_model(parser: Parser, args: argparse.Namespace) -> tuple[TransformerLM, Tokenizer, list[int]]:
    """Return the model, its tokenizer and the ids of the text."""
    if args.model is not None:
        if mine := sorted(given_flags(parser) - OF_ANY_MODEL):
            raise ValueError(f"--{mine[0].replace('_', '-')} is for an untrained model: leave it out, or --model")
        found = pretrained.load(args.model)
        return found.model.eval(), found.tokenizer, [*found.start, *found.tokenizer.encode(args.text)]
    check_not_negative(seed=args.seed)
    tokenizer = CharTokenizer.train(args.text)
    ids = tokenizer.encode(args.text).tolist()
    fields = {name: value for name, value in vars(args).items() if name in TransformerConfig.__dataclass_fields__}
    config = TransformerConfig(tokenizer.vocab_size, max(len(ids) - 1, 1), **fields)
    return TransformerLM(config, rng=args.seed), tokenizer, ids


def main() -> int:
    """Run the model once each way and write the page; return the exit status."""
    parser = make_parser()
    args = parser.parse_args()
    try:
        if not args.text:
            raise ValueError("--text is empty: give at least two characters")
        move = mover(args.device)
        book = None if args.book is None else Book.read(args.book, args.out)
        model, tokenizer, ids = find_model(parser, args)
        if len(ids) < 2:
            raise ValueError(f"--text {args.text!r} is one token, after which there is none to predict: give more")
        if wrong := [i for i in args.layer or () if not 0 <= i < model.config.num_layers]:
            raise ValueError(f"--layer {wrong[0]} isn't there: the model has layers 0 to {model.config.num_layers - 1}")
        ran = trace(model.to(move), np.array(ids), args.layer)
        page = write(ran, model.config, tokenizer, book).encode()
        with durable.replacing(args.out) as file:
            file.write(page)
    except (ValueError, OSError, ImportError, DataError) as error:
        fail(error)
    print(f"loss {ran.loss:.4f}; saved {args.out} ({len(page) / 1e6:.1f} MB, {len(ran.recorder.steps)} arrays)")
    return 0


if __name__ == "__main__":
    run(main)
