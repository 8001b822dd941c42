"""The book: every formula, number, link, snippet and exercise of it, and what its builder says of a bad page."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from running import SCRIPTS, run

pytest.importorskip("latex2mathml", reason='needs pip install -e ".[book]"')
pytest.importorskip("markdown_it", reason='needs pip install -e ".[book]"')
pytest.importorskip("pygments", reason='needs pip install -e ".[book]"')
pytest.importorskip("matplotlib", reason='needs pip install -e ".[book]"')
sys.path.insert(0, str(SCRIPTS))
from book import drawing, links, source
from book.errors import BookError
from book.formula import to_mathml
from book.pages import DOCS, read_pages
from book.site import Site

ROOT = Path(__file__).parent.parent
PAGES = read_pages()
FENCES = [(page, fence) for page in PAGES for fence in page.fences]
VOID = {"meta", "link", "input", "br", "wbr", "img", "hr"}


class Tree(HTMLParser):
    """A page as a list of its tags: name, attributes, and those around each."""

    def __init__(self, path):
        super().__init__()
        self.open, self.tags = [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs), list(self.open)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """The whole book, built."""
    out = tmp_path_factory.mktemp("book") / "site"
    site = Site()
    site.write(out)
    assert site.problems == []
    return out


@pytest.fixture(scope="module")
def trees(book):
    return {path.name: Tree(path) for path in sorted(book.glob("*.html"))}


def numbered():
    """Yield (object, number, lines) as test_derivations reads them, with no help from the book's own reader."""
    for path in sorted((ROOT / "numpygpt").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for number in re.findall(r"\\tag\{(\w+)\}", ast.get_docstring(node) or ""):
                    yield path, getattr(node, "name", path.stem), number


def test_every_equation_of_the_package_is_on_one_page_and_beside_its_lines(trees):
    places = {}
    lines = {}
    for name, tree in trees.items():
        for _, attributes, _ in tree.tags:
            if "eq" in attributes.get("class", "").split() and "id" in attributes and name != "index.html":
                places.setdefault(attributes["id"].rpartition(".")[2], []).append(name)
            if "line" in attributes.get("class", "").split():
                for key in attributes.get("data-eq", "").split():
                    lines.setdefault(key.rpartition(".")[2], set()).add(attributes["data-n"])
    expected = [f"{name}-{number}" for _, name, number in numbered()]
    assert sorted(places) == sorted(expected)
    assert {key: found for key, found in places.items() if len(found) > 1} == {}
    assert set(lines) == set(expected)


def test_every_number_of_the_code_leads_to_its_equation_and_back(trees):
    anchors = {(name, a["id"]): (a, around) for name, tree in trees.items() for _, a, around in tree.tags if "id" in a}
    to_equation, to_code = set(), set()
    for name, tree in trees.items():
        for tag, attributes, around in tree.tags:
            if tag != "a" or attributes.get("class") != "tag" or name == "equations.html":
                continue
            file, _, anchor = attributes["href"].partition("#")
            there, inside = anchors[file or name, anchor]
            if any("line" in a.get("class", "").split() for _, a in around):
                assert "eq" in there["class"].split()
                keys = next(a for _, a in around if "line" in a.get("class", "").split())["data-eq"].split()
                assert anchor in keys
                to_equation.add(anchor)
            else:
                line = next(a for _, a in inside if "line" in a.get("class", "").split())
                key = anchor.removesuffix("-code")
                assert key in line["data-eq"].split()
                assert key == next(a for _, a in around if "eq" in a.get("class", "").split())["id"]
                to_code.add(key)
    assert to_equation == to_code != set()


def test_all_numbers_in_comments_are_links(book):
    for page in PAGES:
        text = (book / page.file).read_text(encoding="utf-8")
        for note in re.findall(r'<span class="note">(.*?)\n</span>', text):
            tags = re.findall(r'<a class="tag"[^>]*>\((\w+)\)</a>', note)
            assert tags == re.findall(r"\((\d+|A)\)", re.sub(r"<[^>]*>", "", note)), note


def test_every_formula_is_rendered(book):
    count = 0
    for path in book.glob("*.html"):
        for text in re.findall(r"<math.*?</math>", path.read_text(encoding="utf-8"), re.DOTALL):
            math = ElementTree.fromstring(text)
            count += 1
            for element in math.iter():
                assert element.tag != "merror"
                assert "\\" not in (element.text or "")
                if element.tag in ("mi", "mo", "mn", "mtext", "mtd"):
                    assert element.text or len(element), ElementTree.tostring(math)
        assert "$" not in re.sub(
            r"<(pre|code|script|style).*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL
        )
    assert count > 500


def test_nothing_is_loaded_from_elsewhere(book):
    for path in book.iterdir():
        text = path.read_text(encoding="utf-8")
        loaded = re.findall(r"<link[^>]*? href=\"([^\"]*)|\ssrc=\"([^\"]*)|url\(([^)]*)\)|@import\s+(\S+)", text)
        for url in map("".join, loaded):
            assert url.startswith(("#", "data:")) or (book / url).is_file(), url
    script = (book / "book.js").read_text(encoding="utf-8")
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|https?:|eval\(", script)


def test_every_question_is_on_the_page_of_questions(trees):
    linked = [a["href"] for tag, a, around in trees["questions.html"].tags if tag == "a" and ("main", {}) in around]
    for page, fence in FENCES:
        if fence.kind == "question":
            assert f"{page.file}#{fence.argument}" in linked


def test_the_search_knows_every_equation_by_its_line(book, trees):
    text = (book / "search.js").read_text(encoding="utf-8")
    entries = json.loads(text.removeprefix("window.SEARCH = ").removesuffix(";\n"))
    titles = {title: href for kind, title, _, href, _ in entries if kind == "equation"}
    assert titles["RMSNorm (8)"].endswith(".html#RMSNorm-8-code")
    assert len(titles) == len(list(numbered()))
    for _, _, _, href, _ in entries:
        file, _, anchor = href.partition("#")
        assert not anchor or any(a.get("id") == anchor for _, a, _ in trees[file].tags), href


def test_a_figure_has_its_own_ids_and_the_colours_of_the_page(book):
    for path in book.glob("*.html"):
        text = path.read_text(encoding="utf-8")
        for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
            assert 'role="img"' in svg
            assert re.search(r'aria-label="[^"]+"', svg)
            assert "#000000" not in svg
            assert "#1f6feb" not in svg
            assert len(svg) < 250_000
    name = "model.model"
    assert drawing.inline_svg(name, "here", "x") == drawing.inline_svg(name, "here", "x")


@pytest.mark.parametrize(
    "fence", [fence for _, fence in FENCES if fence.kind == "check"], ids=lambda fence: fence.place
)
def test_every_snippet_runs(fence, capsys):
    exec(compile(fence.head, fence.place, "exec"), {"__name__": "check"})


MUTATIONS = [fence for _, fence in FENCES if fence.mutation]


@pytest.fixture(scope="module")
def broken():
    """Of each exercise the first test named in its answer that fails."""
    if not hasattr(os, "fork"):
        pytest.skip("forks")
    command = [sys.executable, Path(__file__).parent / "breaking.py", DOCS]
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "mutants"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("fence", MUTATIONS, ids=lambda fence: fence.place)
def test_every_exercise_breaks_the_test_that_its_answer_names(broken, fence):
    assert broken[fence.place] != "?", f"the answer names no test of {fence.mutation.tests.name}"
    assert broken[fence.place], "no test that the answer names fails"


def test_every_page_has_its_parts():
    for page in PAGES[1:]:
        assert page.of_kind("figure"), page.name
        assert page.of_kind("check"), page.name
        assert page.of_kind("exercise"), page.name
        assert "\n## Sources\n" in page.text, page.name


PAGE = "# Title\n\nA text.\n"
BREAK = PAGE + "\n```{exercise} numpygpt/layers/norm.py tests/test_norm.py\nQ\n"


@pytest.mark.parametrize(
    ("text", "line", "named"),
    [
        ("No title\n", 1, "begins with '# Title'"),
        (PAGE + "\n```{picture} norms.ellipse\n```\n", 5, "unknown fence '{picture} norms.ellipse'"),
        (PAGE + "\n```{derivation} numpygpt.layers.norm.Norm\n```\n", 5, "unknown object numpygpt.layers.norm.Norm"),
        (PAGE + "\n```{figure} nowhere.x\nCaption.\n```\n", 5, "scripts/book/figures/nowhere.py"),
        (PAGE + "\n```{figure} model.x\nCaption.\n```\n", 5, "no function 'x'"),
        (PAGE + "\n```{equation} RMSNorm 8\n```\n", 5, "'RMSNorm 8' is on no page"),
        (PAGE + "\nSee {eq}`RMSNorm 99`.\n", 5, "unknown equation 'RMSNorm 99'"),
        (PAGE + "\nSee\nthe page {page}`nowhere`.\n", 6, "unknown page 'nowhere'"),
        (PAGE + "\nSee {code}`numpygpt/nothing.py`.\n", 5, "numpygpt/nothing.py isn't there"),
        (PAGE + "\nSee {role}`x`.\n", 5, "unknown role {role}"),
        (PAGE + "\nA formula\nsuch as $\\foo x$.\n", 6, "the formula '\\\\foo x' has a command that latex2mathml"),
        (PAGE + "\n$$\\frac{a}$$\n", 5, "the formula '\\\\frac{a}' has an argument too few"),
        (PAGE + "\nFrom $a\n- b$ on.\n", 5, "a $ without its partner"),
        (PAGE + "\n$$x^{$$\n", 5, "can't be converted"),
        (PAGE + "\n$$x = 1 \\tag{1}$$\n", 5, "only docstrings number their equations"),
        (PAGE + "\n```{check}\nprint(1)\n```\n", 5, "no assert"),
        (PAGE + "\n```{check}\nassert 1 +\n```\n", 5, "no Python"),
        (PAGE + "\n```{question} why\nWhy?\n```\n", 5, "no line ---"),
        (PAGE + "\n```{question} why\nWhy?\n---\n```\n", 5, "no answer"),
        (PAGE + "\n```{question}\nWhy?\n---\nSo.\n```\n", 5, "needs a name"),
        (PAGE + "\n```{exercise} numpygpt/a.py tests/test_norm.py\nQ\n--- x\n---\nA\n```\n", 5, "numpygpt/a.py isn't"),
        (BREAK + "--- dx *= r  # (88)\n---\nA\n```\n", 5, "0 times"),
        (BREAK + "--- dx -= s * h\n---\nA\n```\n", 5, "2 times"),
        (BREAK + "---\nA\n```\n", 5, "line '--- code'"),
        (PAGE + "\n## One\n\n## One\n", 7, "the anchor one stands twice"),
    ],
)  # fmt: skip
def test_a_bad_page_is_named_with_its_line(tmp_path, text, line, named):
    (tmp_path / "01-bad.md").write_text(text, encoding="utf-8")
    with pytest.raises(BookError) as error:
        Site(tmp_path).write(tmp_path / "out")
    assert str(error.value).startswith(f"{tmp_path / '01-bad.md'}:{line}: ")
    assert named in str(error.value)
    assert not (tmp_path / "out").exists()


def test_what_leads_nowhere_is_listed_and_ends_with_1(tmp_path):
    page = (
        "# Norms\n\nSee [this](nowhere.html) and [that](#nothing).\n\n```{derivation} numpygpt.layers.activation.ReLU"
    )
    (tmp_path / "01-norms.md").write_text(f"{page}\n```\n", encoding="utf-8")
    result = run("build_book.py", "--pages", tmp_path, "--out", tmp_path / "out")
    assert result.returncode == 1
    errors = result.stderr.splitlines()
    assert all(line.startswith("error: ") for line in errors)
    for named in (
        "norms.html:", "the link nowhere.html leads to no file", "the link #nothing leads to no place on that page",
        "numpygpt.layers.norm.RMSNorm has equations, and no page has a {derivation} of it",
        "numpygpt/layers/activation.py:61: no page has the derivation of activation (A)",
    ):  # fmt: skip
        assert named in result.stderr


def test_a_number_without_a_line_and_a_line_without_an_equation_are_found(tmp_path, monkeypatch):
    text = 'class Twice:\n    r"""Twice.\n\n    $$y = 2x \\tag{1}$$\n    $$z = y \\tag{2}$$\n    """\n\n'
    text += "    def forward(self, x):\n"
    folder = tmp_path / "numpygpt"
    folder.mkdir()
    (folder / "twice.py").write_text(text + "        y = 2 * x  # (1)\n        return y  # (3)\n", encoding="utf-8")
    (tmp_path / "01-twice.md").write_text("# Twice\n\n```{derivation} numpygpt.twice.Twice\n```\n", encoding="utf-8")
    caches = (source.read_package, source.by_name, source.owners_of, source.code_references)
    with monkeypatch.context() as patch:
        patch.setattr(source, "PACKAGE", folder)
        patch.setattr(source, "ROOT", tmp_path)
        for cache in caches:
            cache.cache_clear()
        problems = Site(tmp_path).problems
    for cache in caches:
        cache.cache_clear()
    assert problems == [
        "numpygpt/twice.py:10: (3) is the number of no equation of Twice",
        f"{tmp_path / '01-twice.md'}:3: no line of code shown in the book has the number of Twice (2)",
    ]


def test_the_link_checker_sees_what_is_planted(book, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(book, site)
    page = '<p id="a"></p><p id="a"></p><a href="index.html#gone"></a><a href="no.html"></a>'
    page += '<img src="https://example.org/x.png">'
    (site / "more.html").write_text(page, encoding="utf-8")
    assert list(links.problems(site)) == [
        "more.html: the anchor a stands twice",
        "more.html:1: the link index.html#gone leads to no place on that page",
        "more.html:1: the link no.html leads to no file",
        "more.html:1: https://example.org/x.png would be loaded from elsewhere",
    ]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_nothing_but_a_book_is_written_over(tmp_path, kind):
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
    mine = out / "mine.txt" if kind == "folder" else out
    mine.write_text("mine")
    (tmp_path / "01-a.md").write_text(PAGE)
    result = run("build_book.py", "--pages", tmp_path, "--out", out)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert str(out) in result.stderr
    assert mine.read_text() == "mine"


def test_without_a_package_the_extra_is_named(tmp_path):
    (tmp_path / "latex2mathml.py").write_text("raise ImportError")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = run("build_book.py", "--out", tmp_path / "out", env={**os.environ, "PYTHONPATH": path})
    assert result.returncode == 2
    assert result.stderr == 'error: this needs the package latex2mathml: pip install -e ".[book]"\n'
    assert not (tmp_path / "out").exists()


def test_the_readme_picture_is_the_one_the_book_draws():
    saved = (ROOT / "docs" / "model.svg").read_text(encoding="utf-8")
    drawn = drawing.picture()

    def labels(svg):  # matplotlib writes each text as a comment; the curves of letters are its version's
        return re.findall(r"<!-- (.*?) -->", svg), re.search(r'viewBox="[^"]*"', svg)[0]

    assert labels(saved) == labels(drawn)
    version = r"Matplotlib v[\d.]+"
    if re.search(version, saved)[0] == re.search(version, drawn)[0]:
        assert saved == drawn


@pytest.mark.parametrize(
    ("latex", "found", "absent"),
    [
        (r"\bar x", '<mo stretchy="false" lspace="0" rspace="0">¯</mo>', 'stretchy="true"'),
        (r"\mathrm{softmax}(x)", "<mi>softmax</mi>", "<mi mathvariant"),
        (r"\mathbb 1[x > 0]", "𝟙", "double-struck"),
        (r"\lfloor x \rfloor", '<mo stretchy="false" lspace="0" rspace="0">⌊</mo>', "<mi>⌊"),
        (r"\Big(x\Big)", 'minsize="1.623em"', "<mi>("),
        (r"f'(x)", "<mo", "<msup>"),
        (r"-\infty", "<mi", "<mo>∞"),
        (r"\Phi", '<mi mathvariant="normal">Φ</mi>', "<mi>Φ"),
    ],
)
def test_what_browsers_would_show_badly_is_repaired(latex, found, absent):
    html = to_mathml(latex, False)
    assert found in html
    assert absent not in html
