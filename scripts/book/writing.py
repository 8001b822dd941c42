"""A page as HTML: its Markdown, and what its fences name."""

import dataclasses
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from book import markdown
from book.drawing import inline_svg
from book.errors import BookError
from book.listing import listing, plain_block
from book.pages import Fence, Page
from book.source import ROOT, TAG, Equation, Line, Object, Reference, by_name, code_references, owners_of, read_package
from book.source import references as find_references

if TYPE_CHECKING:
    from book.site import Site

LONG = 8  # lines of a docstring from which on it stands beside the code, not above


class Writer:
    """Writes one page. `site` knows where everything else is."""

    def __init__(self, site: "Site", page: Page):
        self.site, self.page = site, page
        self.parser = markdown.make_parser()
        self.place = page.shown
        self.owners: list[Object] = []  # whose equations a plain (4) means here
        self.object: Object | None = None  # whose docstring is being written
        self.ids: set[str] = set()
        self.sections: list[tuple[str, str]] = []  # anchor and title, for "on this page"
        rules: dict[str, Callable[..., str]] = {
            "text": self.text,
            "formula": self.formula,
            "formula_block": self.formula_block,
            "role": self.role,
            "fence": self.fence,
            "code_block": lambda tokens, i, *_: plain_block(tokens[i].content.rstrip("\n"), "python"),
            "heading_open": self.heading,
            "table_open": lambda *_: '<div class="scroll"><table>',
            "table_close": lambda *_: "</table></div>",
        }
        self.parser.renderer.rules |= rules

    def body(self) -> str:
        """Return the page without its title."""
        self.owners = self.only_derivation(0)
        return self.markdown("\n" + self.page.text.partition("\n")[2], 1)

    def only_derivation(self, start: int) -> list[Object]:
        """Return whose equations a plain number means from a line on: what the section derives, or the page."""
        headings = [n for n, text in enumerate(self.page.text.split("\n"), 1) if text.startswith("## ") and n > start]
        stop = min(headings, default=self.page.text.count("\n") + 2)
        fences = [(fence.line, read_package()[fence.argument]) for fence in self.page.of_kind("derivation")]
        on_page = [one for _, one in fences if one.equations]
        here = [one for line, one in fences if one.equations and start <= line < stop]
        return next((found for found in (here, on_page) if len(found) == 1), [])

    def markdown(self, text: str, line: int) -> str:
        """Return Markdown as HTML; it begins at this line of the file."""
        tokens = self.parser.parse(text)
        markdown.number_lines(tokens, line)
        return self.parser.renderer.render(tokens, self.parser.options, {})

    def inline(self, text: str, line: int) -> str:
        """Return Markdown without its paragraph."""
        html = self.markdown(text, line).strip()
        return html.removeprefix("<p>").removesuffix("</p>") if html.count("<p>") == 1 else html

    def at(self, token: Any) -> str:
        """Return the file and line of a token."""
        return f"{self.place}:{token.meta['line']}"

    def add_id(self, name: str, place: str) -> str:
        """Take an anchor; BookError if the page has it already."""
        if name in self.ids:
            raise BookError(place, f"the anchor {name} stands twice on the page: rename a heading or a question")
        self.ids.add(name)
        return name

    def text(self, tokens: Sequence[Any], i: int, *_: Any) -> str:
        """Write a text, with links where it names equations."""
        if "$" in tokens[i].content:
            raise BookError(self.at(tokens[i]), "a $ without its partner: a formula ends where its paragraph does")
        before = "".join(token.content for token in tokens[:i])  # names whose equations are meant, perhaps
        text, html, at = before + tokens[i].content, "", len(before) + len(closing(tokens, i))
        for r in find_references(text, self.owners):
            if r.start >= at and r.equation.key in self.site.equations:
                html += escape(text[at : r.start], quote=False) + self.reference(r.equation, text[r.start : r.stop])
                at = r.stop
        return html + escape(text[at:], quote=False)

    def reference(self, equation: Equation, text: str) -> str:
        """Write a link to an equation."""
        href = self.site.equation_href(equation, self.page)
        return f'<a class="ref" href="{href}" data-eq="{equation.key}">{escape(text)}</a>'

    def formula(self, tokens: Sequence[Any], i: int, *_: Any) -> str:
        """Write a formula in a line of text."""
        math = markdown.mathml(tokens[i].content, False, self.at(tokens[i]))
        if mark := closing(tokens, i + 1):
            start = math.rindex("<math")
            math = f'{math[:start]}<span class="whole">{math[start:]}{mark}</span>'
        return math

    def formula_block(self, tokens: Sequence[Any], i: int, *_: Any) -> str:
        """Write a formula of its own; one with a number is an equation."""
        latex = tokens[i].content
        tag = TAG.search(latex)
        if tag and (self.object is None or tag[1] not in self.object.equations):
            raise BookError(
                self.at(tokens[i]), f"only docstrings number their equations: take the \\tag{{{tag[1]}}} out"
            )
        equation = self.object.equations[tag[1]] if tag and self.object else None
        return self.equation(markdown.mathml(latex, True, self.at(tokens[i])), equation)

    def equation(self, math: str, equation: Equation | None) -> str:
        """Write a displayed formula, with its number at the right."""
        if equation is None:
            return f'<div class="eq"><div class="scroll">{math}</div></div>\n'
        way = self.site.way(equation)
        href = self.site.code_href(equation, self.page)
        label = f'<a class="tag" href="{href}" title="the code of {equation.title}">({equation.number})</a>'
        return (
            f'<div class="eq {way}" id="{self.add_id(equation.key, self.place)}" data-eq="{equation.key}">'
            f'<div class="scroll">{math}</div>{label}</div>\n'
        )

    def role(self, tokens: Sequence[Any], i: int, *_: Any) -> str:
        """Write a role."""
        token = tokens[i]
        name, argument = token.info, token.content.strip()
        if name == "eq":
            equation = self.find_equation(argument, self.at(token))
            return self.reference(equation, equation.title)
        if name == "page":
            page = next((page for page in self.site.pages if page.name == argument), None)
            if page is None:
                raise BookError(self.at(token), f"unknown page {argument!r}")
            return f'<a href="{page.file}">{escape(page.title)}</a>'
        if name == "code":
            if not (ROOT / argument).exists():
                raise BookError(self.at(token), f"{argument} isn't there")
            return f"<code>{escape(argument)}</code>"
        raise BookError(self.at(token), f"unknown role {{{name}}}: there are eq, page, code")

    def find_equation(self, argument: str, place: str) -> Equation:
        """Return the equation that "RMSNorm 8" names."""
        name, _, number = argument.rpartition(" ")
        one = by_name().get(name)
        if one is None or number not in one.equations:
            raise BookError(place, f"unknown equation {argument!r}: write a class or function and a number, RMSNorm 8")
        if f"{name}-{number}" not in self.site.equations:
            raise BookError(place, f"{argument!r} is on no page: no {{derivation}} names {one.dotted}")
        return one.equations[number]

    def heading(self, tokens: Sequence[Any], i: int, *_: Any) -> str:
        """Write the beginning of a heading, with an anchor."""
        if self.object is not None:
            return f"<{tokens[i].tag}>"
        title = "".join(child.content for child in tokens[i + 1].children or [])
        anchor = self.add_id(markdown.slug(title), self.at(tokens[i]))
        if tokens[i].tag == "h2":
            self.sections.append((anchor, title))
            self.owners = self.only_derivation(tokens[i].meta["line"])
        return f'<{tokens[i].tag} id="{anchor}">'

    def fence(self, tokens: Sequence[Any], i: int, *_: Any) -> str:
        """Write a fence: one of the book's, or a snippet."""
        token = tokens[i]
        info = token.info.strip()
        if not info.startswith("{"):
            return plain_block(token.content.rstrip("\n"), info)
        fence = next(f for f in self.page.fences if f.line == token.meta["line"])
        return getattr(self, f"write_{fence.kind}")(fence)

    def write_contents(self, fence: Fence) -> str:
        """Write all pages in reading order, each with what the fence says of it in a line "name: what it is about"."""
        lines = [line.partition(": ") for line in fence.head.strip().split("\n")]
        told = {name: (text, fence.line + 1 + i) for i, (name, _, text) in enumerate(lines)}
        pages = {page.name: page for page in self.site.pages[1:]}
        if unlike := sorted(told.keys() ^ pages.keys()):
            raise BookError(fence.place, f"the contents must have one line for each page: see to {', '.join(unlike)}")
        rows = [
            f'<li><a href="{page.file}">{escape(page.title)}</a><span>{self.inline(*told[name])}</span></li>'
            for name, page in pages.items()
        ]
        return f'<ol class="chapters">{"".join(rows)}</ol>\n'

    def write_derivation(self, fence: Fence) -> str:
        """Write an object's docstring and its code, side by side."""
        one = read_package()[fence.argument]
        self.add_id(one.name, fence.place)
        if one.name not in [title for _, title in self.sections]:
            self.sections.append((one.name, one.name))
        code = listing(one, self.code_tag)
        said = self.docstring(one)
        first, last = (one.lines[0].number, one.lines[-1].number) if one.lines else (1, 1)
        title = f"<h3><code>{one.name}</code> <small>{one.file}, lines {first} to {last}</small></h3>"
        sides = "sides" if one.equations or one.docstring.count("\n") >= LONG else "above"
        return (
            f'<section class="derivation" id="{one.name}">{title}<div class="{sides}">'
            f'<div class="said">{said}</div>{code}</div></section>\n'
        )

    def docstring(self, one: Object) -> str:
        """Write an object's docstring."""
        before = self.place, self.owners, self.object
        self.place, self.owners, self.object = one.file, owners_of(one), one
        try:
            return self.markdown(one.docstring, one.docline)
        finally:
            self.place, self.owners, self.object = before

    def code_tag(self, reference: Reference) -> str:
        """Write a number in a comment: a link to its equation, and the first of them what that links to."""
        key = reference.equation.key
        anchor = ""
        if self.site.code_page.get(key) is self.page and f"{key}-code" not in self.ids:
            anchor = f' id="{self.add_id(f"{key}-code", self.place)}"'
        href = self.site.equation_href(reference.equation, self.page)
        text = f"({reference.equation.number})"
        return f'<a class="tag"{anchor} href="{href}" title="equation {reference.equation.title}">{text}</a>'

    def write_equation(self, fence: Fence) -> str:
        """Write one equation and its line, with the lines that lead up to it."""
        equation = self.find_equation(fence.argument, fence.place)
        one = by_name()[equation.name]
        math = markdown.mathml(equation.latex, True, fence.place)
        code = listing(one, self.code_tag, passage(one, equation))
        href = self.site.equation_href(equation, self.page)
        return (
            f'<section class="derivation small"><div class="sides"><div class="said">{self.equation(math, equation)}'
            f'</div>{code}</div><p class="more"><a href="{href}">All of {equation.name}</a></p></section>\n'
        )

    def write_figure(self, fence: Fence) -> str:
        """Write a figure with its caption."""
        caption = fence.head.strip()
        label = " ".join(caption.replace("$", "").replace("\\", "").replace("`", "").split()) or fence.argument
        svg = inline_svg(fence.argument, fence.place, label)
        return f"<figure>{svg}<figcaption>{self.inline(caption, fence.line + 1)}</figcaption></figure>\n"

    def write_question(self, fence: Fence) -> str:
        """Write a learner's question and its answer."""
        anchor = self.add_id(fence.argument, fence.place)
        head, answer = self.inline(fence.head, fence.line + 1), self.markdown(fence.answer, fence.answer_line)
        return f'<section class="question" id="{anchor}"><h3>{head}</h3>\n{answer}</section>\n'

    def write_check(self, fence: Fence) -> str:
        """Write a snippet to paste."""
        block = plain_block(fence.head.rstrip("\n"), "python")
        return f'<div class="check"><button type="button" class="copy" hidden>Copy</button>{block}</div>\n'

    def write_exercise(self, fence: Fence) -> str:
        """Write an exercise, what it changes, and its hidden answer."""
        head, change = self.markdown(fence.head, fence.line + 1), ""
        if m := fence.mutation:
            lines = [f"<del>{escape(f'- {m.old}')}</del>"] + ([f"<ins>{escape(f'+ {m.new}')}</ins>"] if m.new else [])
            where = f"{m.file.relative_to(ROOT).as_posix()}, line {m.number}"
            command = f"pytest {m.tests.relative_to(ROOT).as_posix()}"
            change = (
                f'<p class="where">In <code>{where}</code>:</p><pre><code>{chr(10).join(lines)}</code></pre>'
                f'<p class="where">Then <code>{command}</code></p>'
            )
        answer = self.markdown(fence.answer, fence.answer_line)
        return (
            f'<section class="exercise">{head}{change}<details><summary>Answer</summary>{answer}</details></section>\n'
        )


def closing(tokens: Sequence[Any], i: int) -> str:
    """Return the punctuation that a text behind a formula begins with: browsers would break the line before it."""
    if not 0 < i < len(tokens) or tokens[i].type != "text" or tokens[i - 1].type != "formula":
        return ""
    text = tokens[i].content
    return text[: len(text) - len(text.lstrip(".,;:!?)"))]


def passage(one: Object, equation: Equation) -> list[Line]:
    """Return the line of an equation, and those before it back to the line of another."""
    keys = [[r.equation.key for r in code_references(one, line)] for line in one.lines]
    last = next(i for i, found in enumerate(keys) if equation.key in found)
    first = last
    while first and not keys[first - 1] and one.lines[first - 1].number == one.lines[first].number - 1:
        if one.lines[first - 1].text.rstrip().endswith((":", '"""')):
            break
        first -= 1
    lines = one.lines[first : last + 1]
    margin = min(len(line.text) - len(line.text.lstrip()) for line in lines)
    return [dataclasses.replace(line, text=line.text[margin:]) for line in lines]
