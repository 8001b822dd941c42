"""Fine-tuning with few weights: LoRA beside every linear map of a model's blocks, and one model again in the end.

The model is frozen: its weights have neither gradients nor moments, which would take three times their memory, and no
product is made for their gradients, a third of a step's. The adapters lie in a flat buffer of their own, and all that
goes over parameters (optimiser, clipping, threads) meets only these.

A checkpoint's weights are those of the merged model, so whoever reads them finds an ordinary one. What training goes on
from is the model as it was, and the adapters beside the moments: a merged matrix is rounded, and can't be taken apart.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from numpygpt.array import Array
from numpygpt.device import mover
from numpygpt.init import Seed
from numpygpt.layers.linear import Linear
from numpygpt.layers.lora import LoRALinear
from numpygpt.model import TransformerLM
from numpygpt.module import FlatBuffer, Module


def add_lora(model: TransformerLM, rank: int, alpha: float = 16.0, *, rng: Seed = None) -> None:
    """Freeze `model`, and put a LoRALinear in the place of each linear map of its blocks.

    All of them, where Hu et al. (2021) took those of q and v alone: at one number of adapter weights these do best
    (their section 7.1), but Dettmers et al. (2023, arXiv:2305.14314, section 4) had to adapt all to reach the loss of a
    full fine-tuning, and found that the rank then matters little. ValueError, and nothing is changed, if the model has
    adapters, or for a rank that a map can't have.
    """
    if has_lora(model):
        raise ValueError("the model has adapters already: merge them first")
    rng = np.random.default_rng(rng)
    added = [(part, name, LoRALinear(linear, rank, alpha, rng=rng)) for part, name, linear in maps_of(model, Linear)]
    for part, name, lora in added:
        setattr(part, name, lora)
    model.flat.freeze()
    FlatBuffer([p for p in model.parameters() if p.trainable])
    name_parameters(model)


def merge_lora(model: TransformerLM) -> None:
    """Make `model` an ordinary one again, which computes what it did with its adapters, and learns as a whole."""
    for part, name, lora in list(maps_of(model, LoRALinear)):
        lora.linear.weight.value = lora.merged()
        setattr(part, name, lora.linear)
    model.flat.freeze(False)
    name_parameters(model)


def has_lora(model: TransformerLM) -> bool:
    """Whether the model has adapters."""
    return any(isinstance(module, LoRALinear) for module in model.modules())


def maps_of(model: TransformerLM, kind: type[Module]) -> Iterator[tuple[Module, str, Any]]:
    """Yield the linear maps of this kind in the blocks: the layer that has it, under which name, and the map."""
    for block in model.layers:
        for part in (block.attn, block.ffn):
            yield from [(part, name, item) for name, item in part.children() if type(item) is kind]


def name_parameters(model: TransformerLM) -> None:
    """Tell each parameter its name, for messages and for the state of an optimiser."""
    for name, p in model.named_parameters():
        p.name = name


def merged_state(model: TransformerLM) -> dict[str, Array]:
    """Return `model.state_dict()` as it would be after merge_lora; the model stays as it is."""
    state = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            del state[f"{name}.A"], state[f"{name}.B"]
            state[f"{name}.linear.weight"] = module.merged()
    return {name.replace(".linear.", "."): value for name, value in state.items()}


def adapter_state(model: TransformerLM) -> dict[str, Array]:
    """Return a copy of each adapter by its name: nothing, if the model has none."""
    return {p.name: p.value.copy() for p in model.parameters() if has_lora(model) and p.trainable}


def load_adapter_state(model: TransformerLM, state: dict[str, Array]) -> None:
    """Copy adapters from `state`. Raises ValueError, before any change, unless names and shapes match."""
    own = {name: value.shape for name, value in adapter_state(model).items()}
    if own != {name: value.shape for name, value in state.items()}:
        raise ValueError(f"the adapters don't fit this model, which has {len(own)}, of other names or shapes")
    for p in model.parameters():
        if p.name in state:
            p.value = np.asarray(state[p.name], like=p.value)


def describe_lora(model: TransformerLM) -> dict[str, Any] | None:
    """Return what add_lora was given, and the fingerprint of the model beside its adapters; None if it has none."""
    for _, _, lora in maps_of(model, LoRALinear):
        return {"rank": lora.A.shape[0], "alpha": lora.alpha, "base": fingerprint(model)}
    return None


def fingerprint(model: TransformerLM) -> str:
    """Return the SHA-256 of a model's weights without its adapters, which are worth nothing beside others."""
    return hashlib.sha256(mover("cpu")(model.flat.value).data.cast("B")).hexdigest()
