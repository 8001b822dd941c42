"""Which gradient belongs to which value, and the rows in which the two stand beside each other."""

import dataclasses
import re

from tracing.record import Call, Recorder, Step

LETTERS = {"a": "scores"}  # where the code has a word for a letter of the derivation


@dataclasses.dataclass
class Cell:
    """A step in a column. It may stand `again` where it is used, having been made elsewhere."""

    step: Step
    role: str = ""  # "input" or "parameter"
    name: str = ""  # as the module calls its input, else as the line that made it does
    shape: tuple[int, ...] | None = None  # of the input, which may be the same numbers in another shape
    again: bool = False


@dataclasses.dataclass
class Row:
    """A value and its gradient; either may be missing."""

    value: Cell | None
    gradient: Cell | None


@dataclasses.dataclass
class Section:
    """A module: its rows from input to output, and the modules in it where they are called."""

    path: str
    forward: Call
    backward: Call
    items: "list[Row | Section]"

    def sections(self) -> "list[Section]":
        """Return this section and all inside it."""
        return [self, *(part for item in self.items if isinstance(item, Section) for part in item.sections())]


def gradients(recorder: Recorder) -> tuple[dict[Step, Step], dict[tuple[str, int], Step]]:
    """Return the gradient of each value that has one on the page, and that of each input by (path, number of it).

    What a backward is given belongs to what its forward returned, and what it returns to the inputs. Of an input that
    is used elsewhere too, this is the part of the gradient that comes through this module. Between the two, `dh` is
    the gradient of `h`, and where names are used again, the first `dx` is that of the last `x`, and so on: backward
    mirrors forward.
    """
    of_value: dict[Step, Step] = {}
    of_input: dict[tuple[str, int], Step] = {}
    pairs = [(call, recorder.calls[path, True]) for (path, backward), call in recorder.calls.items() if not backward]
    for forward, backward in pairs:
        for i, (given, gradient) in enumerate(zip(forward.arguments, backward.returned, strict=False)):
            if given.shape == gradient.shape:
                of_input[forward.path, i] = gradient.step
        for given, gradient in zip(forward.returned, backward.arguments, strict=False):
            of_value.setdefault(given.step, gradient.step)
        for binding in backward.bindings:
            if binding.name.endswith(".grad"):
                of_value[forward.parameters[binding.name.removesuffix(".grad")]] = binding.step
    for forward, backward in pairs:
        ends = {b.step for call in (forward, backward) for b in (*call.arguments, *call.returned)}
        values = [binding for binding in forward.bindings if binding.step not in ends]
        for name, step, shape in backward.bindings:
            value_name = LETTERS.get(name[1:], name[1:])
            matching = [v for v in values if v.name == value_name and v.shape == shape]
            if name.startswith("d") and step not in ends and matching:
                values.remove(matching[-1])
                of_value.setdefault(matching[-1].step, step)
    return of_value, of_input


def lay_out(recorder: Recorder) -> list[Section]:
    """Return the sections of the model and of the loss; every step is made in one row, and may stand in others."""
    of_value, of_input = gradients(recorder)

    def section(forward: Call) -> Section:
        items: list[Row | Section] = []
        for i, (name, step, shape) in enumerate(forward.arguments):
            value = Cell(step, "input", name, shape, again=step.call is not forward)
            items.append(row(value, of_input.get((forward.path, i))))
        inputs = {binding.step for binding in forward.arguments}
        waiting = dict(forward.parameters)
        for item in forward.items:
            if isinstance(item, Call):
                if item.items or {b.step for b in item.returned} != {b.step for b in item.arguments}:
                    items.append(section(item))
            elif item not in inputs:
                code = item.place.statement.code if item.place is not None else ""
                for used in [waiting.pop(name) for name in [*waiting] if re.search(rf"self\.{name}\b", code)]:
                    items.append(row(Cell(used, "parameter"), of_value.get(used)))
                items.append(row(Cell(item), of_value.get(item)))
        return Section(forward.path, forward, recorder.calls[forward.path, True], items)

    def row(value: Cell, gradient: Step | None) -> Row:
        return Row(value, Cell(gradient) if gradient is not None else None)

    sections = [section(recorder.calls[path, False]) for path in ("", "loss")]
    every = [part for top in sections for part in top.sections()]
    beside = [(part, item.gradient) for part in every for item in part.items if isinstance(item, Row) and item.gradient]
    placed: set[Step] = set()
    for step in recorder.steps:
        found = [(part.backward is step.call, cell) for part, cell in beside if cell.step is step]
        if found:
            placed.add(step)
            home = max(found, key=lambda each: each[0])[1]  # the first that is its own section's, or else the first
            for _, cell in found:
                cell.again = cell is not home
    for part in every:
        add_the_rest(part, placed)
    return sections


def add_the_rest(part: Section, placed: set[Step]) -> None:
    """Give a row to each gradient that has no value beside it, below what came of it, as backward reads up."""
    last = -1
    for item in reversed(part.backward.items):
        if isinstance(item, Step) and item not in placed:
            last += 1
            part.items.insert(last, Row(None, Cell(item)))
        for i, other in enumerate(part.items):
            if isinstance(other, Section):
                here = other.backward is item
            else:
                here = other.gradient is not None and other.gradient.step is item
            if here:
                last = max(last, i)
