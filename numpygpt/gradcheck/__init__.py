"""Gradients checked by machine, for our layers and for yours.

What `backward` claims is held against the derivative of `forward`, measured in two independent ways (oracles.py), and
the rules of forward and backward are tried one by one (rules.py). How the two are compared, and how far apart they may
be, is derived in compare.py.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from numpygpt.array import Array, check_positive
from numpygpt.gradcheck.compare import Comparison
from numpygpt.gradcheck.report import GradientError, Report, Row
from numpygpt.gradcheck.rules import Rules
from numpygpt.gradcheck.subject import BrokenRuleError, Subject

__all__ = ["GradientError", "Report", "Row", "gradcheck"]


def gradcheck(
    layer: Any,
    *inputs: Array,
    parameters: Mapping[str, Any] | None = None,
    accumulates: bool = True,
    seed: int = 0,
    directions: int = 3,
    elements: int = 24,
    raise_on_failure: bool = False,
    **kwargs: Any,
) -> Report:
    """Check `layer.backward` against the measured derivative of `layer.forward(*inputs, **kwargs)`.

    `layer` is any object with the two methods. `forward` returns an array or number, or a tuple of them, all floats;
    `backward` takes as many cotangents and returns the gradient of the float input, a tuple for several, or None if
    there is none. Every float input and every parameter is checked, all in float64 or all in float32 (TypeError
    otherwise). Inputs are copied; parameters and their gradients are put back as they were.

    `parameters` are those of `layer.named_parameters()`, if it has that, or a dict: of objects with arrays `.value`
    and `.grad`, or of names of attributes, as in `{"W": "dW"}` for `layer.W` and its gradient `layer.dW`. If these
    are dicts or lists of arrays, as in `{"params": "grads"}`, all in them are checked. Gradients of parameters are to
    be added to what is there; for a layer that sets them, say `accumulates=False`.

    Arrays of up to `elements` elements are moved element by element, larger ones in so many random `directions`.

    The report has a row for each gradient and oracle, with the largest error and its bound (and says so, if 0 would
    have passed as well), and tells of broken rules: an input, parameter or cotangent changed, a forward that isn't
    deterministic, state that leaks from one call into the next, gradients assigned instead of added, of another dtype,
    or too few. A layer that can't take complex numbers is checked by differences alone, from the first input on where
    it shows, and the report says so. With `raise_on_failure`, a report that isn't ok is raised as GradientError.
    """
    check_positive(directions=directions, elements=elements)
    subject, rng = Subject(layer, inputs, parameters, kwargs), np.random.default_rng(seed)
    subject.dtype()  # refuses what can't be checked
    with subject.put_back():
        rules = Rules(subject, rng, accumulates)
        try:
            dy, claims = rules.try_all()
        except BrokenRuleError as fault:
            report = Report([], [*rules.faults, str(fault)], "")
        else:
            comparison = Comparison(subject, dy, claims, rng, directions, elements)
            report = Report(comparison.rows(), rules.faults, comparison.skipped)
    if raise_on_failure and not report.ok:
        raise GradientError(f"{type(layer).__name__}: a gradient is wrong\n{report}")
    return report
