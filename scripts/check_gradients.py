"""Check every gradient: of each layer, of the whole model, or of a layer of your own."""

import argparse
import importlib
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import numpygpt
from numpygpt import TransformerConfig, TransformerLM, layers
from numpygpt.array import Array, check_not_negative, check_positive
from numpygpt.cli import Parser, add_device, fail, run
from numpygpt.config import CHOICES
from numpygpt.device import mover
from numpygpt.gradcheck import Report, gradcheck
from numpygpt.gradcheck.complex_step import ComplexStep
from numpygpt.layers.activation import ACTIVATIONS
from numpygpt.module import Module, Parameter

EPILOG = """
Each layer is drawn several times, with other shapes, options and numbers. What its backward says is held against
central differences and the complex step (see numpygpt/gradcheck), on a GPU against differences alone. The table shows
the largest errors, and how much they take of what rounding may cause. The exit status is 1 if a gradient is wrong.

--layer my_layers:tanh calls the function `tanh` of my_layers.py. It returns a layer and its inputs, `(layer, x)`. If
it needs an argument, it gets a NumPy generator to draw them from, another one for each draw. A dict at the end holds
options of gradcheck, such as `{"parameters": {"W": "dW"}}` for the weights `layer.W` and their gradient `layer.dW`.
"""

Case = tuple[Any, ...]  # a layer and its inputs
F64: dict[str, Any] = {"dtype": np.float64}


class Draw:
    """Draws of one generator."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.width = self.size()
        self.x = self.array(self.width)

    def size(self) -> int:
        """Return a number from 1 to 5."""
        return int(self.rng.integers(1, 6))

    def coin(self) -> bool:
        """Return true or false."""
        return bool(self.rng.integers(2))

    def one_of(self, choices: Any) -> Any:
        """Return one of them."""
        return list(choices)[self.rng.integers(len(choices))]

    def array(self, *last: int) -> Array:
        """Return standard normal numbers, with any leading axes before these last ones."""
        return self.rng.standard_normal((*self.one_of([(), (1,), (3,), (2, 2), (1, 2, 1)]), *last))

    def ids(self, stop: int, shape: tuple[int, ...], start: int = 0) -> Array:
        """Return integers below `stop`."""
        return self.rng.integers(start, stop, shape)

    def lora(self) -> Case:
        """Return a linear map with adapters, frozen or not."""
        layer = layers.LoRALinear(
            layers.Linear(self.width, self.size(), self.coin(), **F64), 1, self.one_of([1.0, 3.0])
        )
        if self.coin():
            for buffer in layer.linear.buffers():
                buffer.freeze()
        return layer, self.x

    def attention(self) -> Case:
        """Return an attention, with a mask or none."""
        q, keys, d_v = self.array(3, 2), 4, self.size()
        k, v = (self.rng.standard_normal((*q.shape[:-2], keys, d)) for d in (2, d_v))
        mask = [self.rng.random((*q.shape[:-1], keys)) < 0.6] if self.coin() else []
        return layers.ScaledDotProductAttention(), q, k, v, *mask

    def positions(self, make: Callable[[int, int], Module], width: int) -> Case:
        """Return a layer that takes positions, made for so many of them and this width."""
        x = self.array(3, width)
        return make(9, width), x, self.ids(9, x.shape[:-1])

    def rope(self, max_seq_len: int, d_k: int) -> layers.RotaryPositionalEmbedding:
        """Return a RoPE of either layout."""
        return layers.RotaryPositionalEmbedding(20.0, d_k, max_seq_len, self.one_of(CHOICES["rope_layout"]), **F64)

    def multi_head_attention(self) -> Case:
        """Return a multi-head attention, its key/value heads shared or not, with RoPE or without."""
        rope = self.rope(3, 2) if self.coin() else None
        return layers.MultiHeadAttention(8, 4, self.one_of([1, 2, 4]), rope, self.coin(), **F64), self.array(3, 8)

    def config(self, **options: Any) -> TransformerConfig:
        """Return a small config with any parts."""
        options |= {name: self.one_of(choices) for name, choices in CHOICES.items()}
        options |= {"bias": self.coin(), "tie_embeddings": self.coin(), "num_kv_heads": self.one_of([1, 2]), "d_ff": 3}
        return TransformerConfig(5, 6, 4, self.one_of([1, 2, 3]), 2, **options)


LAYERS: dict[str, Callable[[Draw], Case]] = {
    "Linear": lambda d: (layers.Linear(d.width, d.size(), d.coin(), **F64), d.x),
    "LoRALinear": lambda d: d.lora(),
    "Embedding": lambda d: (layers.Embedding(4, d.width, **F64), d.ids(4, d.x.shape)),
    "RMSNorm": lambda d: (layers.RMSNorm(d.width, **F64), d.x),
    "LayerNorm": lambda d: (layers.LayerNorm(d.width, bias=d.coin(), **F64), d.x),
    "ReLU": lambda d: (layers.ReLU(), d.x),
    "Sigmoid": lambda d: (layers.Sigmoid(), d.x),
    "SiLU": lambda d: (layers.SiLU(), d.x),
    "GELU": lambda d: (layers.GELU(d.one_of(["none", "tanh"])), d.x),
    "Dropout": lambda d: (Reseeded(layers.Dropout(0.4)), d.x),
    "FeedForward": lambda d: (layers.FeedForward(d.width, 3, d.one_of(ACTIVATIONS), d.coin(), **F64), d.x),
    "GLU": lambda d: (layers.GLU(d.width, 3, d.one_of(ACTIVATIONS), d.coin(), **F64), d.x),
    "SwiGLU": lambda d: (layers.SwiGLU(d.width, 3, d.coin(), **F64), d.x),
    "SinusoidalPositions": lambda d: d.positions(lambda n, c: layers.SinusoidalPositions(n, c, **F64), d.width),
    "LearnedPositions": lambda d: d.positions(lambda n, c: layers.LearnedPositions(n, c, **F64), d.width),
    "RotaryPositionalEmbedding": lambda d: d.positions(d.rope, 2 * d.width),
    "Softmax": lambda d: (layers.Softmax(d.one_of(range(d.x.ndim))), 3 * d.x),
    "ScaledDotProductAttention": lambda d: d.attention(),
    "MultiHeadAttention": lambda d: d.multi_head_attention(),
    "DecoderBlock": lambda d: (Reseeded(layers.DecoderBlock(d.config(dropout=0.3), **F64)), d.array(3, 4)),
    "CrossEntropy": lambda d: (layers.CrossEntropy(-1), 3 * d.x, d.ids(d.width, d.x.shape[:-1], start=-1)),
    "TransformerLM": lambda d: (LossOf(TransformerLM(d.config(), **F64)), d.ids(5, (2, 5)), d.ids(5, (2, 5), start=-1)),
}
COMPOSITE = {"MultiHeadAttention", "DecoderBlock", "TransformerLM"}  # along a random direction, not element by element


class Reseeded(Module):
    """A layer whose dropouts draw the same masks in every forward."""

    def __init__(self, layer: Module):
        self.layer = layer

    def forward(self, x: Array) -> Array:
        """Run the layer's, with all its dropouts seeded anew."""
        for seed, module in enumerate(m for m in self.layer.modules() if isinstance(m, layers.Dropout)):
            module.rng = np.random.default_rng(seed)
        return self.layer.forward(x)

    def backward(self, dy: Array) -> Array:
        """Run the layer's."""
        return self.layer.backward(dy)


class LossOf(Module):
    """The loss of a model."""

    def __init__(self, model: TransformerLM):
        self.model, self.loss = model, layers.CrossEntropy(ignore_index=-1)

    def forward(self, ids: Array, targets: Array) -> float:
        """Return the loss."""
        return self.loss.forward(self.model.forward(ids), targets)

    def backward(self, dloss: float) -> None:
        """Add the gradients of all parameters."""
        self.model.backward(self.loss.backward(dloss))


class OnDevice:
    """A layer on another device, seen from the host: arrays are handed on to it, and what it answers comes back."""

    def __init__(self, layer: Module, device: str):
        self.here = {name: Parameter(p.value.copy()) for name, p in layer.named_parameters() if p.trainable}
        self.layer, self.device = layer.to(device), device
        self.there = dict(layer.named_parameters())

    def named_parameters(self) -> Iterable[tuple[str, Parameter]]:
        """Return the parameters on the host, by name."""
        return self.here.items()

    def forward(self, *inputs: Array) -> Any:
        """Run the layer's, with the weights as they are on the host."""
        for name, p in self.here.items():
            self.there[name].value = self.hand_on(p.value)
        return self.bring_back(self.layer.forward(*map(self.hand_on, inputs)))

    def backward(self, *cotangents: Any) -> Any:
        """Run the layer's, which adds to the gradients on the host."""
        for name, p in self.here.items():
            self.there[name].grad = self.hand_on(p.grad)
        dx = self.layer.backward(*map(self.hand_on, cotangents))
        for name, p in self.here.items():
            p.grad = self.bring_back(self.there[name].grad)
        return dx if dx is None else self.bring_back(dx)

    def hand_on(self, x: Any) -> Any:
        """Copy an array to the layer's device; TypeError for the complex step, whose arrays are NumPy's own kind."""
        if isinstance(x, ComplexStep):
            raise TypeError("the complex step is made on the CPU")
        return mover(self.device)(x) if isinstance(x, np.ndarray) else x

    def bring_back(self, result: Any) -> Any:
        """Copy an array, or each of a tuple, to the host; a number is one."""
        return tuple(map(mover("cpu"), result)) if isinstance(result, tuple) else mover("cpu")(result)


def draw(name: str, device: str, *seed: int) -> Report:
    """Draw one of our layers, its weights standard normal, and check it."""
    rng = np.random.default_rng(seed)
    layer, *inputs = LAYERS[name](Draw(rng))
    for p in layer.parameters():
        p.value = rng.standard_normal(p.shape)
    elements, directions = (1, 1) if name in COMPOSITE else (24, 3)
    checked = layer if device == "cpu" else OnDevice(layer, device)
    report = gradcheck(checked, *inputs, seed=seed[1], elements=elements, directions=directions)
    if report.only_kinks:  # a number so near 0 that a ReLU has no derivative: not the layer's fault
        return draw(name, device, *seed, 0)
    return report


def reports_of_ours(name: str, draws: int, seed: int, device: str) -> Iterator[Report]:
    """Yield the report of each draw of one of our layers."""
    for i in range(draws):
        yield draw(name, device, seed, i)


def reports_of_yours(make: Callable[..., Case], draws: int, seed: int) -> Iterator[Report]:
    """Yield the report of each draw of a user's layer: one only, if it is always the same."""
    required = [p for p in inspect.signature(make).parameters.values() if p.default is p.empty]
    takes_a_generator = bool(required)
    for i in range(draws if takes_a_generator else 1):
        case = make(np.random.default_rng((seed, i))) if takes_a_generator else make()
        layer, *inputs = case if isinstance(case, tuple | list) and case else (case,)
        if not (hasattr(layer, "forward") and hasattr(layer, "backward")):
            raise TypeError(f"it must return a layer and its inputs, and {layer!r} has no forward and backward")
        options = inputs.pop() if inputs and isinstance(inputs[-1], dict) else {}
        yield gradcheck(layer, *inputs, **{"seed": i, **options})


def load(path: str) -> Callable[..., Case]:
    """Return the function named by `package.module:function`, looked for in the current folder first."""
    module, colon, function = path.partition(":")
    module = module.removesuffix(".py")
    if not (module and colon and function):
        fail(f"--layer must be package.module:function, not {path!r}")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function)
    except Exception as error:  # anything that somebody's module may raise
        fail(f"--layer {path}: {type(error).__name__}: {error}")
    if not callable(make):
        fail(f"--layer {path}: {function} must be a function that returns a layer and its inputs")
    return make


def where(error: Exception) -> str:
    """Return the last line of code that is not numpygpt's or NumPy's on the way to an error."""
    packages = {Path(inspect.getfile(package)).parent for package in (numpygpt, np)}
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if packages.isdisjoint(Path(frame.filename).parents)]
    theirs = [frame for frame in theirs if frame.filename != __file__] or theirs
    return f"{theirs[-1].filename}, line {theirs[-1].lineno}"


HEAD = f"{'layer':27}{'draws':>6}{'gradients':>10}   {'differences':18}{'complex step':18}{'time':>8}"


def line(name: str, reports: list[Report], seconds: float) -> str:
    """Return a line of the table: the largest errors, and the largest shares that errors take of their bounds."""
    cells = []
    for oracle in ("differences", "complex step"):
        rows = [row for report in reports for row in report.rows if row.oracle == oracle]
        share = max((row.error / row.bound for row in rows), default=0.0)
        error = max((row.error for row in rows), default=0.0)
        cells.append(f"{error:.1e} ({f'{share:.2%}' if share <= 1 else '> 100%':>7})" if rows else "-")
    gradients = sum(len({row.name for row in report.rows}) for report in reports)
    verdict = green("ok") if all(report.ok for report in reports) else red("WRONG")
    return f"{name:27}{len(reports):6}{gradients:10}   {cells[0]:18}{cells[1]:18}{seconds:6.1f} s  {verdict}"


def green(text: str) -> str:
    """Return the text in green, where colours can be shown."""
    return f"\x1b[32m{text}\x1b[0m" if colourful() else text


def red(text: str) -> str:
    """Return the text in red, where colours can be shown."""
    return f"\x1b[31m{text}\x1b[0m" if colourful() else text


def colourful() -> bool:
    """Whether the output is a terminal, and colours are not unwanted (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def main() -> int:
    """Read the flags, check and print; return the exit status."""
    parser = Parser(description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layer", metavar="MODULE:FUNCTION", help="check the layer that this function returns")
    add("--only", choices=LAYERS, metavar="NAME", help=f"check one of ours: {', '.join(LAYERS)}")
    add("--draws", type=int, default=50, help="draws of each layer (default: 50)")
    add("--deep", action="store_true", help="1,000 draws of each layer")
    add("--seed", type=int, default=0, help="the same seed gives the same draws (default: 0)")
    add_device(parser)
    args = parser.parse_args()
    if args.layer and args.device != "cpu":
        fail("--device is for our own layers: leave it out with --layer")
    try:
        check_positive(draws=args.draws)
        check_not_negative(seed=args.seed)
        mover(args.device)
    except (ValueError, ImportError) as error:
        fail(error)
    draws = 1000 if args.deep else args.draws
    if args.layer:
        todo = {args.layer: reports_of_yours(load(args.layer), draws, args.seed)}
    else:
        names = [args.only] if args.only else LAYERS
        todo = {name: reports_of_ours(name, draws, args.seed, args.device) for name in names}
    print(HEAD)
    began, shown = time.perf_counter(), []
    for name, reports in todo.items():
        start = time.perf_counter()
        try:
            done = list(reports)
        except Exception as error:  # anything that somebody's layer may raise
            if not args.layer:
                raise
            fail(f"{name}: {type(error).__name__}: {error} ({where(error)})")
        print(line(name, done, time.perf_counter() - start), flush=True)
        shown += [(name, report) for report in done if not report.ok][:1] or [(name, done[0])] * bool(args.layer)
    for name, report in shown:
        print(f"\n{name}\n{report}")
    wrong = sum(not report.ok for _, report in shown)
    verdict = red(f"{wrong} of {len(todo)} wrong") if wrong else green("every gradient is right")
    print(f"\n{verdict} ({time.perf_counter() - began:.0f} s)")
    return 1 if wrong else 0


if __name__ == "__main__":
    run(main)
