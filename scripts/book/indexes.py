"""What leads into the book: the page of all questions, that of all equations, and what the search box knows."""

import re
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from book.formula import words
from book.markdown import mathml, slug
from book.source import Equation, Object, by_name, code_references, read_package
from book.writing import Writer

if TYPE_CHECKING:
    from book.site import Site

USUAL = {"Sources", "Exercises", "Questions", "Derivation", "Check it yourself"}  # headings that every page has


def questions(site: "Site") -> str:
    """Return all questions, page by page, each a link to its answer."""
    parts = ["<p>What learners ask about the gradients of a Transformer, and where the answer is.</p>"]
    for page in site.pages:
        rows = ""
        for fence in page.of_kind("question"):
            title = Writer(site, page).inline(fence.head, fence.line + 1)
            rows += f'<li><a href="{page.file}#{fence.argument}">{title}</a></li>'
        if rows:
            parts.append(f'<h2><a href="{page.file}">{escape(page.title)}</a></h2><ul>{rows}</ul>')
    return f"<main><h1>Questions</h1>{''.join(parts)}</main>"


def equations(site: "Site") -> str:
    """Return all equations in reading order, each with a link to its derivation, beside which its code stands."""
    parts = []
    for page in site.pages:
        for fence in page.of_kind("derivation"):
            one = read_package()[fence.argument]
            rows = ""
            for equation in one.equations.values():
                math = mathml(equation.latex, True, one.file)
                link = f'<a class="tag" href="{page.file}#{equation.key}">({equation.number})</a>'
                rows += f'<div class="eq {site.way(equation)}"><div class="scroll">{math}</div>{link}</div>'
            if rows:
                title = (
                    f'<a href="{page.file}#{one.name}"><code>{one.name}</code></a> <small>{escape(page.title)}</small>'
                )
                parts.append(f"<h2>{title}</h2>{rows}")
    told = "<p>All numbered equations, in reading order. A number leads to its derivation, beside the code.</p>"
    return f'<main><h1>Equations</h1>{told}<div class="all">{"".join(parts)}</div></main>'


def entries(site: "Site") -> Iterator[list[str]]:
    """Yield what can be searched: kind, title, page, link, further words. Of equations the link is to their line."""
    for page in site.pages:
        yield ["page", page.title, "", page.file, page.name]
        for title in re.findall(r"^##+ (.*)", page.text, re.MULTILINE):
            if title not in USUAL:
                yield ["heading", title.replace("`", ""), page.title, f"{page.file}#{slug(title)}", ""]
        for fence in page.of_kind("question"):
            yield ["question", " ".join(fence.head.split()), page.title, f"{page.file}#{fence.argument}", ""]
        for fence in page.of_kind("derivation"):
            one = read_package()[fence.argument]
            yield ["code", one.name, page.title, f"{page.file}#{one.name}", one.file]
            for equation in one.equations.values():
                there = site.code_page.get(equation.key)
                link = f"{there.file}#{equation.key}-code" if there else f"{page.file}#{equation.key}"
                code = next(filter(None, (code_of(o, equation) for o in (one, *by_name().values()))), "")
                yield ["equation", equation.title, page.title, link, f"{code}  {' '.join(words(equation.latex))}"]


def code_of(one: Object, equation: Equation) -> str:
    """Return an object's first line with the number of an equation, or an empty text."""
    carrying = (line.text for line in one.lines if any(r.equation == equation for r in code_references(one, line)))
    return next(carrying, "").strip()
