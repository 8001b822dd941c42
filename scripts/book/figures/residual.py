"""Figure of the page on the residual path."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from book.figures import BACKWARD, FORWARD, FOURTH, MUTED, THIRD
from numpygpt import TransformerConfig
from numpygpt.array import Array
from numpygpt.layers import DecoderBlock

DEPTH, WIDTH, SEED = 24, 64, 0


class WithoutPath(DecoderBlock):
    """A block whose sublayers replace x, each after its norm, instead of adding to it."""

    def forward(self, x: Array, *_: Any, **__: Any) -> Array:
        """Return the block's output."""
        x = self.attn.forward(self.ln1.forward(x))
        return self.ffn.forward(self.ln2.forward(x))

    def backward(self, dy: Array) -> Array:
        """Return the gradient of x."""
        dx = self.ln2.backward(self.ffn.backward(dy))
        return self.ln1.backward(self.attn.backward(dx))


def walk(kind: type[DecoderBlock], place: str, factor: float = 1.0) -> tuple[list[float], list[float]]:
    """Return the size of x after each block and that of its gradient there, as the weights are at the start.

    `factor` multiplies the matrices that write into the residual path. Sizes are root mean squares, those of gradients
    in units of the one given at the end. Both lists begin with the input of the first block.
    """
    config = TransformerConfig(5, 16, WIDTH, DEPTH, 4, norm_position=place)
    rng = np.random.default_rng(SEED)
    blocks = [kind(config, dtype=np.float64, rng=rng) for _ in range(DEPTH)]
    for block in blocks:
        for name, p in block.named_parameters():
            if name in ("attn.output_proj.weight", "ffn.w2.weight"):
                p.value *= factor
    x = rng.standard_normal((4, 16, WIDTH))
    sizes = [rms(x)]
    for block in blocks:
        x = block.forward(x)
        sizes.append(rms(x))
    dx = rng.standard_normal(x.shape)
    gradients = [rms(dx)]
    for block in reversed(blocks):
        dx = block.backward(dx)
        gradients.append(rms(dx))
    return sizes, [g / gradients[0] for g in reversed(gradients)]


def rms(x: Array) -> float:
    """Return the root mean square."""
    return float(np.sqrt(np.mean(x * x)))


def depth() -> Figure:
    """Draw the sizes along the depth: of the stream, and of the cotangent on its way back."""
    walks = {
        "pre-norm": (walk(DecoderBlock, "pre"), FORWARD),
        r"pre-norm, writers times $1/\sqrt{2L}$": (walk(DecoderBlock, "pre", (2 * DEPTH) ** -0.5), THIRD),
        "post-norm": (walk(DecoderBlock, "post"), BACKWARD),
        "no residual path": (walk(WithoutPath, "pre"), FOURTH),
    }
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    forward, backward = figure.subplots(1, 2)
    for name, ((sizes, gradients), colour) in walks.items():
        forward.plot(range(DEPTH + 1), sizes, color=colour, label=name)
        backward.plot(range(DEPTH + 1), gradients, color=colour)
    forward.set_title("size of $x$ after block $l$", fontsize=10)
    backward.set_title(r"size of $\bar x$ there, in units of the last", fontsize=10)
    backward.set_yscale("log")
    forward.legend(frameon=False, fontsize=8)
    for axes in (forward, backward):
        axes.set_xlabel("block $l$")
        axes.spines[["top", "right"]].set_visible(False)
        axes.axhline(1, color=MUTED, linewidth=0.6, linestyle=":")
    return figure
