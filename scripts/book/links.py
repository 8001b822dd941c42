"""Whether the links of a built site lead somewhere, and none of its pages loads anything from elsewhere."""

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

LOADS = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "use": "href",
    "image": "href",
}


class Reader(HTMLParser):
    """Gathers the anchors, links and loaded files of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[tuple[int, str]] = []
        self.loads: list[tuple[int, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag has."""
        values = {name: value or "" for name, value in attrs}
        line = self.getpos()[0]
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "a" and "href" in values:
            self.links.append((line, values["href"]))
        elif tag in LOADS and LOADS[tag] in values:
            self.loads.append((line, values[LOADS[tag]]))


def read(path: Path) -> Reader:
    """Return what a page has."""
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader


def problems(folder: Path) -> Iterator[str]:
    """Yield a line for each link that leads nowhere, each anchor that stands twice, each file from elsewhere."""
    pages = {path.name: read(path) for path in sorted(folder.glob("*.html"))}
    for name, page in pages.items():
        for anchor in sorted({anchor for anchor in page.ids if page.ids.count(anchor) > 1}):
            yield f"{name}: the anchor {anchor} stands twice"
        for line, href in page.links + page.loads:
            where = f"{name}:{line}: the link {href}"
            if (line, href) in page.loads and not href.startswith(("#", "data:")) and ":" in href:
                yield f"{name}:{line}: {href} would be loaded from elsewhere"
            elif ":" not in href and not href.startswith("//"):
                file, _, anchor = href.partition("#")
                if file and not (folder / unquote(file)).is_file():
                    yield f"{where} leads to no file"
                elif anchor and (target := pages.get(file or name)) and unquote(anchor) not in target.ids:
                    yield f"{where} leads to no place on that page"
