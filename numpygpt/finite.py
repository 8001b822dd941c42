"""Where numbers stopped being finite: the first layer to say so, named."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from numpygpt.module import Module, Parameter, spans


def first_not_finite(models: Sequence[Module], compute: Callable[[], Any]) -> str | None:
    """Run `compute`, a forward of a model (or of replicas of it) and perhaps a backward; say what first wasn't finite.

    That is the output of a module, the gradient of one of its parameters, or the one that it passes back; None if all
    are finite. A module ends after those inside it, so the innermost is named. FloatingPointError from `compute` is
    expected.
    """
    found: list[str] = []

    def watch(module: Module, method: str, check: Callable[[Any], str | None]) -> None:
        plain = getattr(module, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            if not found and (what := check(result)):
                found.append(what)
            return result

        setattr(module, method, watched)

    def check_forward(name: str) -> Callable[[Any], str | None]:
        return lambda output: None if finite(output) else f"the output of {name}"

    def check_backward(name: str, module: Module) -> Callable[[Any], str | None]:
        def check(dx: Any) -> str | None:
            for key, p in vars(module).items():
                if isinstance(p, Parameter) and not all(finite(span.grad) for span in spans([p])):
                    return f"the gradient of {name}.{key}"
            return None if finite(dx) else f"the gradient that {name} passes back"

        return check

    inside = {module: name for model in models for name, module in model.named_modules() if module is not model}
    before = {module: {key: vars(module).get(key) for key in ("forward", "backward")} for module in inside}
    try:
        for module, name in inside.items():
            watch(module, "forward", check_forward(name))
            watch(module, "backward", check_backward(name, module))
        with contextlib.suppress(FloatingPointError):
            compute()
    finally:
        for module, methods in before.items():
            for key, method in methods.items():
                if method is None:
                    delattr(module, key)  # the class's own shows again
                else:
                    setattr(module, key, method)
    return found[0] if found else None


def finite(result: Any) -> bool:
    """Whether an array, or each of a tuple of arrays, is; None is."""
    arrays = result if isinstance(result, tuple) else (result,)
    return all(array is None or bool(np.all(np.isfinite(array))) for array in arrays)
