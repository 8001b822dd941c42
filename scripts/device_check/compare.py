"""A layer on the CPU and on the device: the same weights and inputs, forward and backward."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.sizes import SEED, Size, batches
from device_check.cases import BAD_IDS, CONFIGS, LAYERS, MODEL_IDS, REFUSED, Case, make_model, refusals
from device_check.report import Row
from numpygpt.array import Array
from numpygpt.model import TransformerLM
from numpygpt.module import Module

Move = Callable[[Array], Array]  # copies an array to a device

# Of the largest difference over the largest magnitude. A GPU adds in another order and has functions of its own: a
# layer's float32 is off by some 1e-7, and a float16 may be its neighbour. Roundings add up along a model (on the CPU
# those of size M take its float32 1e-6 from float64), and in sums over thousands of positions.
BOUNDS = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-12}
BOUNDS_OF_MODELS = {"float32": 5e-5}

NOTES = f"""
layers and models: the largest difference from the CPU's numbers over the largest of these; right is up to
{BOUNDS["float32"]:.0e} in float32, {BOUNDS["float16"]:.0e} in float16 and {BOUNDS["float64"]:.0e} in float64,
and {BOUNDS_OF_MODELS["float32"]:.0e} for a whole model"""


class Results(NamedTuple):
    """What forward and backward return, and the gradients they leave: arrays, a loss that is a float, None for ids."""

    outputs: list[Any]
    of_inputs: list[Any]
    of_parameters: list[Any]


def stay(x: Array) -> Array:
    """Return x: the move that isn't one."""
    return x


def forward_and_backward(layer: Module, inputs: Sequence[Array], move: Move) -> Results:
    """Run a layer that is on a device, its inputs moved there, and its backward from a random cotangent."""
    y = layer.forward(*(move(x) for x in inputs))
    if isinstance(y, float):
        dx = layer.backward(2.5)
    else:
        dx = layer.backward(move(np.random.default_rng(1).standard_normal(y.shape).astype(y.dtype)))
    return Results([y], list(dx) if isinstance(dx, tuple) else [dx], [p.grad for p in layer.parameters()])


class Unlike(Exception):
    """A result is of another kind than the CPU's."""


def to_host(result: Any, like: Any, kind: type[Any]) -> Array:
    """Return a result as a host array. Raises Unlike unless it is an array of `kind`, or a float, as `like` is."""
    if not isinstance(like, np.ndarray):
        if type(result) is not type(like):
            raise Unlike(f"a {type(result).__name__}, where the CPU has a {type(like).__name__}")
        return np.array(result)
    if type(result) is not kind:
        raise Unlike(f"a {type(result).__name__}, where a {kind.__name__} should be left")
    if (result.shape, result.dtype) != (like.shape, like.dtype):
        raise Unlike(f"{result.dtype} {result.shape}, where the CPU has {like.dtype} {like.shape}")
    return result.get()


def difference(device: list[Any], host: list[Any], kind: type[Any]) -> float | None:
    """Return the largest difference of any two numbers over the largest magnitude; None if there are no numbers.

    That magnitude is the largest in all arrays together: the gradient of a bias of keys is 0 but for rounding, since
    softmax ignores what is added to all scores, so that a difference relative to itself would say nothing.
    """
    pairs = [(to_host(a, b, kind), np.array(b)) for a, b in zip(device, host, strict=True) if not a is b is None]
    if not pairs:
        return None
    largest = max(float(np.max(np.abs(b))) for _, b in pairs)
    return float(np.max([np.max(np.abs(a.astype(np.float64) - b)) for a, b in pairs])) / (largest or 1.0)


def compare(name: str, case: Case, move: Move, bounds: Mapping[str, float] = BOUNDS) -> Row:
    """Run a layer or a model on both sides."""
    make, *inputs = case
    kind = type(move(np.zeros(1)))
    try:
        host = forward_and_backward(make(), inputs, stay)
        device = forward_and_backward(make().to(move), inputs, move)
        differences = [difference(*group, kind) for group in zip(device, host, strict=True)]
    except Exception as error:  # anything that a device can't do; the other layers are still to be seen
        return Row(name, fault=f"{type(error).__name__}: {error}")
    bound = bounds[str(getattr(host.outputs[0], "dtype", inputs[0].dtype))]
    wrong = not all(d is None or d <= bound for d in differences)  # NaN is wrong too
    shown = tuple("-" if d is None else f"{d:.1e}" for d in differences)
    return Row(name, shown, fault=f"above {bound:.0e}" if wrong else "")


def refuse(what: str, move: Move) -> Row:
    """See that ids out of range are refused wherever they are used as `what`."""
    name = f"{what} out of range"
    for bad in BAD_IDS:
        for call in refusals(bad, move)[what]:
            try:
                call()
            except Exception as error:  # as above
                if not (isinstance(error, IndexError) and f"{what} {bad} is outside" in str(error)):
                    return Row(name, fault=f"{what} {bad}: {type(error).__name__}: {error}")
            else:
                return Row(name, fault=f"{what} {bad} is taken")
    return Row(name, remark="ok: IndexError")


def comparisons(size: Size, move: Move) -> list[Callable[[], Row]]:
    """Return all comparisons of this module, a function for each: layers, models (one of this size), and bad ids."""
    models = {name: (functools.partial(make_model, **options), MODEL_IDS) for name, options in CONFIGS.items()}
    models[f"size {size.name}"] = functools.partial(TransformerLM, size.config, rng=SEED), next(batches(size))[0]
    return [
        *(functools.partial(compare, name, case, move) for name, case in LAYERS.items()),
        *(functools.partial(compare, f"model, {name}", case, move, BOUNDS_OF_MODELS) for name, case in models.items()),
        *(functools.partial(refuse, what, move) for what in REFUSED),
    ]
