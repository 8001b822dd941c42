"""Figure of the page on the whole model, backward."""

from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure

from book.figures import BACKWARD, FOURTH, THIRD
from numpygpt import CrossEntropy, TransformerConfig, TransformerLM
from numpygpt.array import Array

CONFIG = TransformerConfig(vocab_size=11, context_length=5, d_model=12, num_layers=2, num_heads=3)
Note = tuple[str, float, str]  # the name of a point, the norm of the gradient there, the colour of its bar


def noting(notes: list[Note], name: str, colour: str, backward: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return a backward that notes the norm of the gradient it is given."""

    def noted(dy: Array) -> Array:
        notes.append((name, float(np.linalg.norm(dy)), colour))
        return backward(dy)

    return noted


def walk() -> Figure:
    """Draw the norm of the gradient at every point of the walk from the logits to the embeddings."""
    model, loss, rng = TransformerLM(CONFIG, dtype=np.float64, rng=0), CrossEntropy(), np.random.default_rng(0)
    ids = rng.integers(0, 11, (2, 6))
    loss.forward(model.forward(ids[:, :-1]), ids[:, 1:])
    notes: list[Note] = []
    parts = [("lm_head", "logits", BACKWARD), ("ln_final", "out of the final norm", BACKWARD)]
    for i in range(CONFIG.num_layers):
        block = f"layers.{i}"
        parts += [
            (f"{block}.dropout2", f"out of block {i + 1}", BACKWARD),
            (f"{block}.ffn.activation", f"ffn {i + 1}: g, out of SiLU", THIRD),
            (f"{block}.ffn.w1", f"ffn {i + 1}: u", THIRD),
            (f"{block}.ffn.w3", f"ffn {i + 1}: v", THIRD),
            (f"{block}.ln2", f"ffn {i + 1}: out of its norm", THIRD),
            (f"{block}.dropout1", f"between the halves of block {i + 1}", BACKWARD),
            (f"{block}.attn.attention", f"attention {i + 1}: o, heads apart", FOURTH),
            (f"{block}.attn.q_rope", f"attention {i + 1}: q, turned", FOURTH),
            (f"{block}.attn.k_rope", f"attention {i + 1}: k, turned", FOURTH),
            (f"{block}.attn.v_proj", f"attention {i + 1}: v", FOURTH),
            (f"{block}.ln1", f"attention {i + 1}: out of its norm", FOURTH),
        ]
    parts.append(("token_embeddings", "out of the embedding", BACKWARD))
    modules = dict(model.named_modules())
    for module, name, colour in parts:
        modules[module].backward = noting(notes, name, colour, modules[module].backward)
    model.backward(loss.backward())
    figure = Figure(figsize=(7, 6.4), layout="constrained")
    axes = figure.subplots()
    height = np.arange(len(notes))[::-1]
    axes.barh(height, [size for _, size, _ in notes], 0.72, color=[colour for *_, colour in notes])
    axes.set_yticks(height, [name for name, *_ in notes], fontsize=8.5)
    axes.set_ylim(-0.6, len(notes) - 0.4)
    axes.set_xlabel("norm of the gradient there")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
