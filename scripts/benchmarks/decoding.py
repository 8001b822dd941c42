"""Writing text, token by token, each the likeliest: numpygpt beside transformers' Llama with the same weights.

The bound is reading the weights once a token (but for the embeddings, of which a row is read). It is measured as the
time that `np.dot` takes of a vector as long as they are with itself: their bytes over the bandwidth of the memory, or
of a cache that holds them all.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.report import ratios, spread, table
from benchmarks.runner import Timing, Void
from benchmarks.sizes import SEED, SHAPES, Size, Weights, load_weights, make_size
from benchmarks.timing import BOUND, OURS, measure, peak_mb
from numpygpt.array import Array
from numpygpt.model import TransformerLM
from numpygpt.sample import generate_batch

PROMPT, NEW, CONTEXT = 16, 128, 256  # tokens
AGREE = 20  # tokens of each text that must be the same: later on rounding may decide between two
THEIRS = "transformers"

Tokens = list[list[int]]
Writer = Callable[[], Tokens | None]


def decoding_sizes() -> list[Size]:
    """Return M and a Llama of GPT-2's size, for a text and for sixteen, in the rotary layout of transformers."""
    sizes = []
    for name in ("M", "G"):
        layers, heads, width, _, _, vocabulary = SHAPES[name]
        for batch in (1, 16):
            size = make_size(f"{name}, batch {batch}", layers, heads, width, CONTEXT, batch, vocabulary)
            sizes.append(dataclasses.replace(size, config=dataclasses.replace(size.config, rope_layout="half")))
    return sizes


def prompts_of(size: Size) -> Array:
    """Return the texts to go on from, random ids."""
    return np.random.default_rng(SEED).integers(size.config.vocab_size, size=(size.batch_size, PROMPT))


def ours(size: Size, weights: Weights, threads: int) -> Writer:
    """Return a function that writes with numpygpt."""
    model, prompts = TransformerLM(size.config), list(prompts_of(size))
    model.load_state_dict(weights)

    def write() -> Tokens:
        steps = [[d.token for d in draws if d] for draws in generate_batch(model, prompts, NEW, temperature=0)]
        return [list(text) for text in zip(*steps, strict=True)]

    return write


def theirs(size: Size, weights: Weights, threads: int) -> Writer:
    """Return a function that writes with transformers."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    config = size.config
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            max_position_embeddings=config.context_length,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()
    model.load_state_dict({their_name(name): torch.tensor(array) for name, array in weights.items()})
    ids = torch.tensor(prompts_of(size))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, "use_cache": True}
    return lambda: model.generate(ids, **options)[:, PROMPT:].tolist()


def their_name(name: str) -> str:
    """Return the name in transformers' Llama of one of our parameters."""
    names = {
        "token_embeddings": "embed_tokens",
        "attn.output_proj": "self_attn.o_proj",
        "attn.": "self_attn.",
        "ffn.w1": "mlp.gate_proj",
        "ffn.w2": "mlp.down_proj",
        "ffn.w3": "mlp.up_proj",
        "ln1": "input_layernorm",
        "ln2": "post_attention_layernorm",
        "ln_final": "norm",
    }
    found = next((ours for ours in names if ours in name), None)
    name = name.replace(found, names[found]) if found else name
    return name if name.startswith("lm_head") else f"model.{name}"


def bound(size: Size, weights: Weights, threads: int) -> Writer:
    """Return a function that reads the weights once for each token of a text."""
    vector = np.ones(weights_read(weights), np.float32)

    def read() -> None:
        for _ in range(NEW):
            np.dot(vector, vector)

    return read


def weights_read(weights: Weights) -> int:
    """Return how many weights every token needs."""
    return sum(array.size for name, array in weights.items() if name != "token_embeddings.weight")


WRITERS = {OURS: ours, THEIRS: theirs, BOUND: bound}


def measure_decoding(
    contender: str, size: dict[str, Any], weights: str, threads: int, seconds: float
) -> dict[str, Any]:
    """Write for so many seconds; return the fields of a Timing, in which a step is the writing of all texts."""
    write = WRITERS[contender](Size.from_dict(size), load_weights(weights), threads)
    return {"imports_mb": peak_mb()} | measure(write, 1, 1, seconds)


def check_texts(timings: list[Timing]) -> None:
    """Raise Void unless all texts begin alike."""
    writers = [t for t in timings if t.results]
    for timing in writers:
        beginnings, expected = ([text[:AGREE] for text in t.results[0]] for t in (timing, writers[0]))
        if beginnings != expected:
            raise Void(
                f"the run is void: at {timing.size} {timing.contender} and {writers[0].contender} write different "
                f"texts within {AGREE} tokens"
            )


def decoding_table(sizes: Sequence[Size], timings: Sequence[Timing]) -> str:
    """Return the table, and what its columns are."""
    rows = []
    for size in sizes:
        own = [t for t in timings if t.size == size.name]
        for contender in dict.fromkeys(t.contender for t in own):
            took = statistics.median(t.step_s for t in own if t.contender == contender)
            cells = [spread(ratios(own, contender, THEIRS)), f"{size.batch_size * NEW / took:,.0f}"]
            rows.append([size.name, contender, *cells, f"{1000 * took / NEW:.2f}"])
    return (
        table(["size", "contender", "time / transformers'", "tokens/s", "ms a token of each text"], rows, left=2)
        + NOTES
    )


NOTES = f"""
{NEW} new tokens after {PROMPT}, greedy, with a key/value cache; the time of a text holds the reading of its prompt.
bound: reading all weights but the embeddings once a token, measured as np.dot of a vector as long with itself."""
