"""The tensors of a Hugging Face checkpoint and the parameters of a model: which is which, and how each is laid out.

Nothing is computed, elements only change places, so either can be had from the other without loss:

- GPT-2's linear maps are (in, out), ours (out, in), and its queries, keys and values are one map, side by side.
- Llama's rotary pairs are (i, i + d_k/2) of a head, our faster layout's (2i, 2i + 1) (`layers/position.py`). So the
  rows of each head of q and of k are reordered, of which k has fewer.
- A tied head is no tensor of its own.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

import numpy as np

from numpygpt.config import TransformerConfig
from numpygpt.hf_config import family
from numpygpt.model import TransformerLM

# Their names and ours, without .weight and .bias. # is the number of the layer.
LLAMA = {
    "model.embed_tokens": ["token_embeddings"],
    "model.layers.#.input_layernorm": ["layers.#.ln1"],
    "model.layers.#.self_attn.q_proj": ["layers.#.attn.q_proj"],
    "model.layers.#.self_attn.k_proj": ["layers.#.attn.k_proj"],
    "model.layers.#.self_attn.v_proj": ["layers.#.attn.v_proj"],
    "model.layers.#.self_attn.o_proj": ["layers.#.attn.output_proj"],
    "model.layers.#.post_attention_layernorm": ["layers.#.ln2"],
    "model.layers.#.mlp.gate_proj": ["layers.#.ffn.w1"],
    "model.layers.#.mlp.up_proj": ["layers.#.ffn.w3"],
    "model.layers.#.mlp.down_proj": ["layers.#.ffn.w2"],
    "model.norm": ["ln_final"],
    "lm_head": ["lm_head"],
}
GPT2 = {
    "transformer.wte": ["token_embeddings"],
    "transformer.wpe": ["positions.embeddings"],
    "transformer.h.#.ln_1": ["layers.#.ln1"],
    "transformer.h.#.attn.c_attn": ["layers.#.attn.q_proj", "layers.#.attn.k_proj", "layers.#.attn.v_proj"],
    "transformer.h.#.attn.c_proj": ["layers.#.attn.output_proj"],
    "transformer.h.#.ln_2": ["layers.#.ln2"],
    "transformer.h.#.mlp.c_fc": ["layers.#.ffn.w1"],
    "transformer.h.#.mlp.c_proj": ["layers.#.ffn.w2"],
    "transformer.ln_f": ["ln_final"],
    "lm_head": ["lm_head"],
}
TABLES = {"llama": LLAMA, "gpt2": GPT2}
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
ROTARY = ("q_proj", "k_proj")
# What some files hold besides: tables that are computed, and the causal mask.
COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|transformer\.h\.\d+\.attn\.(masked_)?bias")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of theirs, and the parameters of ours that it holds: several lie side by side along its last axis."""

    shape: tuple[int, ...]  # theirs
    ours: tuple[str, ...]
    transposed: bool
    d_k: int | None  # of the heads, if the rows of each are in another order

    def to_ours(self, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yield our names with their parts of the tensor, as we lay them out; views where no row is moved."""
        array = array.T if self.transposed else array
        for name, part in zip(self.ours, np.split(array, len(self.ours)), strict=True):
            yield name, part if self.d_k is None else swap_pairs(part, 2, self.d_k // 2)

    def to_theirs(self, parameters: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the tensor, of our parameters."""
        parts = [parameters[name] for name in self.ours]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        array = array if self.d_k is None else swap_pairs(array, self.d_k // 2, 2)
        return np.ascontiguousarray(array.T if self.transposed else array)


def swap_pairs(rows: np.ndarray, n: int, m: int) -> np.ndarray:
    """Return the rows of all heads, those of each read as an (n, m) table, in the order of the (m, n) one."""
    return rows.reshape(-1, n, m, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def tensors_of(config: TransformerConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the tensors by which Hugging Face has parameters of these shapes, of a model that has a family."""
    table, d_k = TABLES[family(config) or ""], config.d_model // config.num_heads
    tensors = {}
    for part, ours in table.items():
        for layer in range(config.num_layers if "#" in part else 1):
            for kind in ("weight", "bias"):
                names = tuple(f"{name}.{kind}".replace("#", str(layer)) for name in ours)
                if names[0] in shapes:
                    theirs = f"{part}.{kind}".replace("#", str(layer))
                    transposed = theirs.endswith(TRANSPOSED)
                    shape = (sum(shapes[name][0] for name in names), *shapes[names[0]][1:])
                    shape = shape[::-1] if transposed else shape
                    moved = table is LLAMA and config.rope_layout == "interleaved" and part.endswith(ROTARY)
                    tensors[theirs] = Tensor(shape, names, transposed, d_k if moved else None)
    return tensors


def to_theirs(config: TransformerConfig, parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return parameters of a model that has a family, by our names, as Hugging Face has them."""
    tensors = tensors_of(config, {name: array.shape for name, array in parameters.items()})
    return {name: tensor.to_theirs(parameters) for name, tensor in tensors.items()}


def fill(model: TransformerLM, theirs: Mapping[str, np.ndarray]) -> None:
    """Give a model that has a family the tensors of a Hugging Face checkpoint; one is held at a time.

    Names and shapes must match both ways: ValueError, before any change, names the tensor that doesn't fit. The prefix
    "transformer." of GPT-2's names may be lacking in all of them, and a tied head may be there a second time.
    """
    tensors = tensors_of(model.config, {name: p.shape for name, p in model.named_parameters()})
    shared = "" if any(name.startswith(("model.", "transformer.")) for name in theirs) else "transformer."
    names = {name if name == "lm_head.weight" else shared + name: name for name in theirs}
    head, embedding = names.get("lm_head.weight"), names.get(next(iter(tensors)))
    if model.config.tie_embeddings and head is not None and embedding is not None:
        if not np.array_equal(theirs[head], theirs[embedding]):
            raise ValueError(f"the tensor {head} is tied to {embedding}, but holds other values")
        del names["lm_head.weight"]
    if missing := [name for name in tensors if name not in names]:
        raise ValueError(f"the tensor {missing[0]} is missing{and_more(missing)}")
    if unknown := [names[name] for name in names if name not in tensors and not COMPUTED.fullmatch(name)]:
        raise ValueError(f"the tensor {unknown[0]} is unknown{and_more(unknown)}")
    for name, tensor in tensors.items():
        array = theirs[names[name]]
        if array.shape != tensor.shape:
            raise ValueError(f"the tensor {names[name]} has shape {array.shape}, not the config's {tensor.shape}")
        if array.dtype.kind in "biuc":
            raise ValueError(f"the tensor {names[name]} must hold floating-point numbers, not {array.dtype}")
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        for our_name, part in tensor.to_ours(theirs[names[name]]):
            parameters[our_name].value = part


def and_more(names: list[str]) -> str:
    """Say how many follow the first of these names."""
    return f", and {len(names) - 1} more" if len(names) > 1 else ""
