"""What a run reads: its tokenizer, and the file of its corpus's tokens, which it makes once and goes on with."""

import argparse
import contextlib
from pathlib import Path
from typing import Any

from numpygpt import checkpoint, durable
from numpygpt.corpus import DataError, corpus_pieces
from numpygpt.tokenizer import BPETokenizer, CharTokenizer, Tokenizer, load_tokenizer
from numpygpt.tokens import is_tokens, open_tokens, read_header, write_tokens


def make_tokenizer(args: argparse.Namespace, found: Path | None, given: set[str]) -> Tokenizer:
    """Return the tokenizer of the run, or of the file of tokens, or learn one from the corpus."""
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


def encode_corpus(
    args: argparse.Namespace, tokenizer: Tokenizer, found: Path | None, undo: contextlib.ExitStack
) -> Path:
    """Return the file of the corpus's ids; `undo` brings back what was there before.

    A run makes the file once and goes on with it, whatever becomes of the text. ValueError if the file is lost and
    the text doesn't give the same one again.
    """
    corpus, path = args.corpus, args.out / "tokens.bin"
    expected = None if found is None else checkpoint.load(found)[1]["tokens"]
    if is_tokens(corpus):
        path = Path(corpus)
    elif not expected or not is_whole(path, expected):
        durable.remove_leftovers(args.out)  # of encodings that were killed, each as large as the file
        if path.is_file():
            before = path.rename(path.with_name(f"{durable.TEMPORARY}{path.name}-before"))
            undo.callback(before.rename, path)
        undo.callback(path.unlink, missing_ok=True)
        write_tokens(path, map(tokenizer.encode, corpus_pieces(corpus)), tokenizer)
    if expected not in (None, read_header(path)):
        raise ValueError(f"--corpus {corpus} doesn't hold any more what {found} was trained on")
    return path


def is_whole(path: Path, header: dict[str, Any]) -> bool:
    """Whether `path` is a file of tokens, undamaged, with this header."""
    try:
        return len(open_tokens(path)) > 0 and read_header(path) == header
    except DataError:
        return False
