"""A matplotlib Figure as SVG that stands in a page: its text and axes take the page's colour, its ids are its own."""

import importlib
import io
import re
from html import escape
from pathlib import Path
from typing import Any

from book import figures
from book.errors import BookError
from numpygpt.extras import need

FIGURES = Path(figures.__file__).parent
PAPER = "#fdfcf8"
COLOURS = {
    figures.FORWARD: "var(--forward)",
    figures.BACKWARD: "var(--backward)",
    figures.THIRD: "var(--third)",
    figures.FOURTH: "var(--fourth)",
    figures.MUTED: "var(--muted)",
    "#000000": "currentColor",
    "#ffffff": "var(--paper)",
}


def draw(name: str, place: str) -> Any:
    """Return the Figure that `norms.ellipse` names: what `ellipse` of figures/norms.py returns."""
    need("matplotlib.figure", "book")
    module, _, function = name.partition(".")
    if not (FIGURES / f"{module}.py").is_file():
        raise BookError(place, f"the figure {name} needs scripts/book/figures/{module}.py, which isn't there")
    drawer = getattr(importlib.import_module(f"book.figures.{module}"), function, None)
    if drawer is None:
        raise BookError(place, f"scripts/book/figures/{module}.py has no function {function!r}")
    with settings(name):
        return drawer()


def settings(salt: str) -> Any:
    """Return matplotlib's own settings, whatever the user's, as a context: the same figure gives the same bytes."""
    matplotlib = need("matplotlib", "book")
    rc = {**matplotlib.rcParamsDefault, "svg.fonttype": "path", "svg.hashsalt": salt, "svg.image_inline": True}
    rc |= {"font.size": 10, "mathtext.fontset": "stix", "path.simplify": True, "axes.facecolor": "none"}
    rc.pop("backend")
    return matplotlib.rc_context(rc)


def to_svg(figure: Any, salt: str, paper: str = "none") -> str:
    """Return a figure as an SVG file without a date."""
    file = io.StringIO()
    with settings(salt):
        figure.savefig(file, format="svg", metadata={"Date": None}, facecolor=paper)
    return file.getvalue()


def picture() -> str:
    """Return the README's picture: on paper of its own, as it is seen on light and dark pages."""
    return to_svg(draw("model.model", "README.md"), "model", PAPER)


def inline_svg(name: str, place: str, label: str) -> str:
    """Return a figure as an element of a page."""
    svg = to_svg(draw(name, place), name)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*|<\?.*?\?>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\n\s*", "\n", svg)
    for colour, variable in COLOURS.items():
        svg = svg.replace(colour, variable)
    prefix = name.replace(".", "-")
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'((?:xlink:)?href="#|url\(#)', rf"\g<1>{prefix}-", svg).replace("xlink:href", "href")
    size = re.search(r'viewBox="0 0 ([\d.]+) ', svg)
    width = float(size[1]) * 4 / 3 if size else 0  # points to pixels
    opening = f'<svg role="img" aria-label="{escape(label)}" class="figure" style="width:{width:.0f}px"'
    view = re.search(r'viewBox="[^"]*"', svg)
    body = svg[svg.index(">") + 1 :]
    return f"{opening} {view[0] if view else ''}>{body}"
