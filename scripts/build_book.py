"""Build the book: the derivations beside their code, as a site that opens without a network.

It is made of the package's docstrings and code and of docs/book, and ends with a check of all links.
"""

import argparse
import sys
from pathlib import Path

from book.drawing import picture
from book.pages import DOCS
from book.site import Site
from numpygpt import cli, durable


def parse() -> argparse.Namespace:
    """Read the flags."""
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add(
        "--out", type=Path, default=Path("build/book"), metavar="FOLDER", help="where to write it (default: build/book)"
    )
    add("--pages", type=Path, default=DOCS, metavar="FOLDER", help="the pages (default: docs/book)")
    add("--picture", type=Path, metavar="FILE", help="write the README's picture instead (docs/model.svg)")
    return parser.parse_args()


def main() -> int:
    """Build; return the exit status, 1 if a link or a number leads nowhere."""
    args = parse()
    try:
        if args.picture:
            with durable.replacing(args.picture) as file:
                file.write(picture().encode())
            print(f"Saved {args.picture}")
            return 0
        site = Site(args.pages)
        site.write(args.out)
    except (ValueError, OSError, ImportError) as error:
        cli.fail(error)
    for problem in site.problems:
        print(f"error: {problem}", file=sys.stderr)
    print(f"{len(site.pages)} pages, {len(site.equations)} equations: open {args.out / 'index.html'}")
    return 1 if site.problems else 0


if __name__ == "__main__":
    cli.run(main)
