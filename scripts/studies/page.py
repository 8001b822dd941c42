"""The page of all claims, with their verdicts: written from the numbers that the studies kept."""

import shlex
from collections.abc import Iterable
from pathlib import Path

from benchmarks.report import table
from numpygpt import durable
from numpygpt.extras import need
from studies import STUDIES
from studies.picture import save_picture
from studies.study import load
from studies.verdict import Claim, Numbers

INTRO = """\
# Claims, tried

What papers and this project's own pages say of the parts of a Transformer, tried on small models.
`python scripts/experiments.py NAME` makes a study anew (`pip install -e ".[plot,shakespeare]"`; `--list` names them,
each section below ends with its own command). It writes this page, its pictures and its numbers; no verdict and no
number here is written by hand.

**How it is judged.** The criteria stand in [scripts/studies](../scripts/studies) beside the claims, and were there
before these runs; trials of a few steps, which show what a model is like at its start, went before. Each quantity is
measured once with each seed (times: once a round), and its mean is given with its 95 % interval, by Student's t. A
claim says where the mean lies. It **holds** if the whole interval lies there, it is **refuted** if none of it does,
and else it is **undecided: within the spread**. A claim with several criteria holds if all do, and is refuted if one
is. One interval in twenty misses the mean by chance. In tables, a mean is followed by the least and the greatest.

**How far it goes.** Kinds are compared at equal numbers of parameters, to 1 %, and equal numbers of steps, each seed
with the same batches for all. The models are small and trained for minutes: a claim that is refuted here may hold at
another size, and one that holds may not. Losses are in nats a character, over the same part of a tenth of the text that
is held out.
"""


def page_of(folder: Path) -> Path:
    """Return where the page of a folder of pictures lies: beside it."""
    return folder.absolute().with_name(f"{folder.absolute().name}.md")


def numbers_in(folder: Path) -> dict[str, Numbers]:
    """Return what the studies kept in a folder. ValueError names a file that can't be read."""
    files = {name: folder / f"{name}.json" for name in STUDIES}
    return {name: load(path) for name, path in files.items() if path.is_file()}


def write(folder: Path, names: Iterable[str]) -> None:
    """Draw the pictures of some studies, and write the page of all, from the numbers in a folder."""
    kept = numbers_in(folder)
    for name in names:
        save_picture(STUDIES[name], kept[name], folder / f"{name}.svg")
    with durable.replacing(page_of(folder)) as file:
        file.write(page(kept, folder.absolute().name).encode())


def check_can_draw() -> None:
    """Raise ImportError, before anything is measured, if pictures can't be drawn."""
    need("matplotlib", "plot")


def page(kept: dict[str, Numbers], folder: str) -> str:
    """Return the page in Markdown; pictures lie in `folder` beside it."""
    rows = [
        [claim.text, claim.verdict(numbers), f"[{name}](#{anchor(STUDIES[name].title)})"]
        for name, numbers in kept.items()
        for claim in STUDIES[name].claims
    ]
    sections = [section(name, numbers, folder) for name, numbers in kept.items()]
    return "\n".join([INTRO, table(["claim", "verdict", "study"], rows, left=3), "", *sections])


def section(name: str, numbers: Numbers, folder: str) -> str:
    """Return what is said of one study."""
    study = STUDIES[name]
    return "\n".join(
        [
            f"## {study.title}\n",
            f"{study.about}\n",
            f"Here: {numbers['setting']}.\n",
            *(claim_in_words(claim, numbers) for claim in study.claims),
            f"{study.table(numbers)}\n",
            f"![{study.title}]({folder}/{name}.svg)\n",
            f"*{study.caption}*\n",
            f"{study.reading}\n",
            f"    {numbers['command']}\n",
        ]
    )


def claim_in_words(claim: Claim, numbers: Numbers) -> str:
    """Return a claim, what would refute it, what was seen and the verdict."""
    lines = [f"**{claim.text}** ({claim.source})\n"]
    lines += [f"- refuted if {criterion.refuted_if}" for criterion in claim.criteria]
    lines += [f"- seen: {criterion.seen(numbers)}" for criterion in claim.criteria]
    return "\n".join([*lines, f"- **{claim.verdict(numbers)}**\n"])


def anchor(title: str) -> str:
    """Return a heading's address, as GitHub makes it."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def command_of(words: list[str]) -> str:
    """Return the command line that makes a study."""
    return shlex.join(["python", "scripts/experiments.py", *words])
