r"""LaTeX to MathML, for the commands that docstrings and pages use.

latex2mathml does the work. What browsers don't take from it as it stands is put right here, in `repaired`: MathML Core,
which they implement, knows no `mathvariant` but "normal", stretches every bar over a letter, and spaces named functions
like relations.
"""

import functools
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

from numpygpt.extras import need

Element = ElementTree.Element
NAMESPACE = "http://www.w3.org/1998/Math/MathML"
ARITY = {"mfrac": 2, "msub": 2, "msup": 2, "munder": 2, "mover": 2, "mroot": 2, "msubsup": 3, "munderover": 3}
SCRIPTS = {name: slice(1, None) for name in ("msub", "msup", "msubsup", "munder", "mover", "munderover")}
LEAVES = {"mi", "mn", "mo", "mtext"}
ACCENTS = {"¯": "¯", "^": "ˆ", "~": "˜"}  # as they sit right above a letter
TIGHT = set("|‖/:′")  # no space around them
FENCES = set("⌊⌋⌈⌉⟨⟩")
RELATIONS = set("=≤≥<>≠≈←→∈∝≡")
CAPITALS = set("ΓΔΘΛΞΠΣΥΦΨΩ")  # upright in TeX, slanted in MathML unless told
DOUBLE_STRUCK = {"1": "𝟙", "R": "ℝ", "N": "ℕ", "Z": "ℤ", "C": "ℂ", "E": "𝔼"}
ORDINARY = set("∞∂∇⊤ℓ")  # letters, not operators
THIN, WIDE = "0.167em", "2em"


@functools.cache
def to_mathml(latex: str, display: bool) -> str:
    r"""Return a formula as MathML: a <math> for each part of it, so that a line can break between them.

    ValueError says what in it can't be converted. `\tag` must have been taken out.
    """
    html = ""
    for part in split(repaired(converted(latex, display)), display):
        if len(part[0]):
            html += "<wbr>" if html and not html.endswith("span>") else ""
            html += ElementTree.tostring(part, "unicode", short_empty_elements=False)
        else:
            html += '<span class="far"> </span>'
    return html


def converted(latex: str, display: bool) -> Element:
    """Return what latex2mathml makes of a formula; ValueError if it can't, or left something out."""
    converter = need("latex2mathml.converter", "book")
    if not latex.strip():
        raise ValueError("is empty")
    try:
        text = converter.convert(latex, display="block" if display else "inline")
        math = ElementTree.fromstring(text)
    except Exception as error:  # it has no common class for its own, and raises IndexError and KeyError too
        raise ValueError(f"can't be converted: {error or type(error).__name__}") from error
    for element in math.iter():
        element.tag = element.tag.removeprefix(f"{{{NAMESPACE}}}")
        name, text = element.tag, element.text or ""
        if name == "merror":
            raise ValueError("can't be converted")
        if "\\" in text:
            raise ValueError(f"has a command that latex2mathml doesn't know: {text}")
        if name in LEAVES and not text:
            raise ValueError("has an empty place")
        if len(element) != ARITY.get(name, len(element)):
            raise ValueError(f"has an argument too few or too many (<{name}> of {len(element)})")
        if name in ARITY and any(child.tag == "mrow" and not len(child) for child in element):
            raise ValueError("has an empty place")
    return math


def repaired(math: Element) -> Element:
    """Return a formula that looks in browsers as it would in TeX."""
    for parent in list(math.iter()):
        if parent.tag == "mrow":
            merge_upright(parent)
        if parent.tag in ("msup", "msubsup") and (parent[-1].text or "") == "′":
            lower_prime(parent)
        if parent.tag == "msub" and (parent[0].text or "") in ("max", "min") and math.get("display") == "block":
            parent.tag = "munder"
            parent[0].set("movablelimits", "true")
        if parent.tag in ("mover", "munder") and (parent[1].text or "") in ACCENTS:
            parent.set("accent", "true")
            parent[1].text = ACCENTS[parent[1].text or ""]
            parent[1].set("stretchy", "false")
        for script in list(parent)[SCRIPTS[parent.tag]] if parent.tag in SCRIPTS else []:
            for operator in script.iter("mo"):
                operator.attrib |= {"lspace": "0", "rspace": "0"}
    for leaf in math.iter():
        repair_leaf(leaf)
    for row in list(math.iter()):
        sign_numbers(row)
        space_functions(row)
    return math


def merge_upright(row: Element) -> None:
    """Make one name of the upright letters that latex2mathml makes of \\mathrm{softmax}."""
    letters = [child.text or "" for child in row if child.tag == "mi" and child.get("mathvariant") == "normal"]
    if len(letters) > 1 and len(letters) == len(row):
        row.tag, row.text = "mi", "".join(letters)
        for child in list(row):
            row.remove(child)


def lower_prime(parent: Element) -> None:
    """Put a prime beside its letter: the sign is raised by itself, and raised once more it would fly away."""
    letter, *below, prime = list(parent)
    parent.remove(letter)
    parent.remove(prime)
    row = parent
    if below:
        parent.tag, row = "msub", Element("mrow")
        parent.insert(0, row)
    else:
        parent.tag = "mrow"
    row.extend([letter, prime])


def repair_leaf(leaf: Element) -> None:
    """Give one letter, operator or space what browsers need."""
    text = leaf.text or ""
    variant = leaf.get("mathvariant")
    if variant == "double-struck":
        leaf.text = DOUBLE_STRUCK.get(text, text)
        del leaf.attrib["mathvariant"]
        leaf.set("mathvariant", "normal")
    elif variant == "bold":
        del leaf.attrib["mathvariant"]
        leaf.set("style", "font-weight: bold")
    if leaf.tag == "mi" and text in CAPITALS:
        leaf.set("mathvariant", "normal")
    if leaf.tag == "mo" and text in ORDINARY:
        leaf.tag = "mi"
        leaf.set("mathvariant", "normal")
    if leaf.tag == "mi" and text in FENCES | {":", "′"}:
        leaf.tag = "mo"
    if leaf.tag == "mo":
        if "minsize" in leaf.attrib:
            leaf.attrib |= {"stretchy": "true", "symmetric": "true"}
        if text in FENCES:
            leaf.set("stretchy", "false")
        if text in TIGHT | FENCES:
            leaf.attrib |= {"lspace": "0", "rspace": "0"}
        if text == "…":
            leaf.attrib |= {"lspace": THIN, "rspace": THIN}
        if len(text) > 1 and text.isalpha():
            leaf.attrib |= {"lspace": "0", "rspace": "0"}
            leaf.set("form", "prefix")
    if leaf.get("width") == "negativethinmathspace":
        leaf.set("width", f"-{THIN}")
    if leaf.tag == "mtd" and leaf.attrib.pop("columnalign", "") == "left":
        leaf.set("style", "text-align: left")


def is_function(element: Element) -> bool:
    """Return whether this is a name such as cos or softmax, or one with an index or a limit."""
    if element.tag in ARITY and element.tag != "mfrac":
        return is_function(element[0])
    return element.tag in ("mi", "mo") and len(element.text or "") > 1 and (element.text or "").isalpha()


def sign_numbers(row: Element) -> None:
    """Let a minus or plus behind a space or another operator be a sign, without space around it."""
    before = None
    for child in row:
        if child.tag == "mo" and child.text in ("−", "+", "±") and before is not None:
            operator = before.tag == "mo" and (before.text or "") not in tuple(")]}|⌋⟩′")
            if before.tag in ("mspace", "mtext") or operator:
                child.set("form", "prefix")
        before = child


def space_functions(row: Element) -> None:
    """Put a thin space between the name of a function and its neighbours, unless these are brackets or spaces."""
    if row.tag not in ("mrow", "mstyle", "mtd", "math"):
        return
    children = list(row)
    for i in reversed(range(len(children))):
        if not is_function(children[i]):
            continue
        for at, neighbour in ((i + 1, children[i + 1 : i + 2]), (i, children[i - 1 : i] if i else [])):
            if neighbour and neighbour[0].tag not in ("mo", "mspace", "mtext") and not starts_open(neighbour[0]):
                row.insert(at, Element("mspace", {"width": THIN}))


def starts_open(element: Element) -> bool:
    """Return whether an element is a bracket with an exponent, or a space."""
    return element.tag in ARITY and element.tag != "mfrac" and element[0].tag == "mo" and not is_function(element)


def split(math: Element, display: bool) -> list[Element]:
    """Return the parts between which a formula's line may break; one without content stands for a wide space.

    A line of text breaks behind a relation, as TeX has it. A displayed formula breaks before its second one, and at
    \\qquad.
    """
    row = math[0] if len(math) == 1 and math[0].tag == "mrow" else math
    parts, depth, relations = [new_part(display)], 0, 0
    for child in row:
        text = child.text or ""
        depth += child.tag == "mo" and text in tuple("([{⌊⟨")
        closing = child[0] if child.tag in ARITY else child
        depth -= closing.tag == "mo" and (closing.text or "") in tuple(")]}⌋⟩")
        relation = child.tag == "mo" and text in RELATIONS and depth <= 0
        relations += relation
        if display and child.get("width") == WIDE and depth <= 0:
            parts += [new_part(display), new_part(display)]
            relations = 0
            continue
        if display and relation and relations > 1:
            parts.append(new_part(display))
        parts[-1][0].append(child)
        if relation and not display:
            parts.append(new_part(display))
    return parts if display else [part for part in parts if len(part[0])]


def new_part(display: bool) -> Element:
    """Return an empty <math> with a row in it."""
    math = Element("math", {"displaystyle": "true"} if display else {})
    ElementTree.SubElement(math, "mrow")
    return math


COMMAND = re.compile(r"\\([A-Za-z]+|.)")


def words(latex: str) -> Iterator[str]:
    """Yield what a reader may search a formula by: its letters and the names of its commands."""
    for match in re.finditer(r"[A-Za-z0-9]+", COMMAND.sub(r" \1 ", latex)):
        yield match.group()
