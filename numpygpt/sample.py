r"""Sampling: from logits to a distribution, and from a prompt to a text."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Integer

from numpygpt.array import Array, check_positive
from numpygpt.cache import KeyValueCache
from numpygpt.device import mover
from numpygpt.init import Seed
from numpygpt.layers.softmax import Softmax
from numpygpt.model import TransformerLM
from numpygpt.module import evaluating


def next_token_distribution(
    logits: Float[np.ndarray, "... vocab"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Float[np.ndarray, "... vocab"]:
    r"""Return the probabilities to draw from, (..., V) in float64: never all zero, summing to 1.

    1. `temperature` T: softmax of logits / T. T = 0 is greedy: all on the largest logit, the first one of equals.
    2. `top_k`: only the k most probable tokens are kept; equals are kept in the order of their ids. A k above V keeps
       all.
    3. `top_p`: only the smallest set of most probable tokens that reaches p together (Holtzman et al., 2020,
       arXiv:1904.09751, section 3.1); at least one.
    4. `min_p`: only tokens at least min_p times as probable as the most probable one (Nguyen et al., 2024,
       arXiv:2407.01082).

    None turns a limit off; several apply in this order, each to the renormalised rest. ValueError for a value that
    makes no sense, and for logits that are NaN or infinite.
    """
    if not (temperature >= 0 and np.isfinite(temperature)):
        raise ValueError(f"temperature must be a finite number of at least 0, not {temperature!r}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, or None for no limit, not {top_k!r}")
    for name, p in (("top_p", top_p), ("min_p", min_p)):
        if p is not None and not 0 <= p <= 1:
            raise ValueError(f"{name} must lie between 0 and 1, or be None for no limit, not {p!r}")
    if not np.isfinite(np.max(logits, axis=-1)).all():  # a NaN is the largest of its row
        raise ValueError("logits hold NaN or infinity: the model's weights are damaged")
    if temperature == 0:
        probs = np.zeros(logits.shape)
        np.put_along_axis(probs, np.argmax(logits, axis=-1, keepdims=True), 1.0, axis=-1)
        return probs
    logits = logits.astype(np.float64)
    probs = Softmax().forward((logits - np.max(logits, axis=-1, keepdims=True)) / temperature)
    if top_k is not None:
        probs = limited(probs, largest(logits, np.full((*logits.shape[:-1], 1), min(top_k, logits.shape[-1]))))
    if top_p is not None:
        descending = -np.sort(-probs, axis=-1)
        descending /= np.sum(descending, axis=-1, keepdims=True)
        before = np.cumsum(descending, axis=-1) - descending  # the probability of all that come before
        enough = np.sum(before < top_p, axis=-1, keepdims=True)
        probs = limited(probs, largest(probs, np.maximum(enough, 1)))
    if min_p is not None:
        probs = limited(probs, probs >= min_p * np.max(probs, axis=-1, keepdims=True))
    return probs


def largest(x: Float[np.ndarray, "... n"], count: Integer[np.ndarray, "... 1"]) -> Bool[np.ndarray, "... n"]:
    """Return which elements are among the `count` largest of their row; equals are taken in their order."""
    least = np.take_along_axis(-np.sort(-x, axis=-1), count - 1, axis=-1)
    larger, equal = x > least, x == least
    room = count - np.sum(larger, axis=-1, keepdims=True)
    return larger | (equal & (np.cumsum(equal, axis=-1) <= room))


def limited(probs: Float[np.ndarray, "... n"], kept: Bool[np.ndarray, "... n"]) -> Float[np.ndarray, "... n"]:
    """Return the probabilities of what is kept, renormalised."""
    probs = np.where(kept, probs, 0)
    return probs / np.sum(probs, axis=-1, keepdims=True)


def penalise_repetition(logits: Float[np.ndarray, "vocab"], seen: Array, penalty: float) -> Array:
    """Return logits with those of the `seen` ids made smaller: positive ones divided by `penalty`, others multiplied.

    Source: Keskar et al. (2019), arXiv:1909.05858, section 4.1, with the sign taken care of.
    """
    logits = logits.copy()
    ids = np.unique(seen)
    logits[ids] = np.where(logits[ids] > 0, logits[ids] / penalty, logits[ids] * penalty)
    return logits


class Draw(NamedTuple):
    """A token id, and the distribution over the vocabulary (float64) that it was drawn from."""

    token: int
    probs: Float[np.ndarray, "vocab"]


def generate_batch(
    model: TransformerLM,
    prompts: Sequence[Integer[np.ndarray, "_"]],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: Collection[int] = (),
    vocab_size: int | None = None,
    rng: Seed | Sequence[Seed] = None,
) -> Iterator[list[Draw | None]]:
    """Yield, up to `max_new_tokens` times, one draw for each prompt, or None for a text that has ended.

    Prompts (seq,) may have different lengths, and each goes on as it would alone. Its draws are those of its own
    generator: give a list of seeds, one for each, or one seed to spawn them from. The rest is as in `generate`.
    """
    texts = [checked_prompt(prompt) for prompt in prompts]
    if not texts:
        raise ValueError("there is no prompt to go on from")
    if not (repetition_penalty >= 1 and np.isfinite(repetition_penalty)):
        raise ValueError(f"repetition_penalty must be a finite number of at least 1, not {repetition_penalty!r}")
    if vocab_size is not None:
        check_positive(vocab_size=vocab_size)
    if isinstance(rng, Sequence):
        rngs = [np.random.default_rng(seed) for seed in rng]
    else:
        rngs = np.random.default_rng(rng).spawn(len(texts))
    if len(rngs) != len(texts):
        raise ValueError(f"{len(rngs)} seeds were given for {len(texts)} prompt(s)")
    modules, context = list(model.modules()), model.config.context_length
    starts = [max(0, len(text) - context) for text in texts]  # where in its text each window starts
    ended = [False] * len(texts)
    cache: KeyValueCache | None = None
    for _ in range(max_new_tokens):
        for i, text in enumerate(texts):
            if len(text) - starts[i] > context:
                starts[i] = len(text) - max(1, context // 2)
                cache = None
        windows = [text[start:] for text, start in zip(texts, starts, strict=True)]
        with evaluating(modules):
            if cache is None:
                cache = model.new_cache(len(texts))
                all_logits = read_windows(model, windows, cache)
            else:
                all_logits = read_last(model, windows, cache)
        draws: list[Draw | None] = [None] * len(texts)
        for i, logits in enumerate(all_logits):
            if ended[i]:
                continue
            if repetition_penalty != 1:
                logits = penalise_repetition(logits, np.array(texts[i]), repetition_penalty)
            probs = next_token_distribution(logits[:vocab_size], temperature, top_k, top_p, min_p)
            token = int(rngs[i].choice(probs.size, p=probs))
            if token in stop:
                ended[i] = True  # from here on its last token is read again and again, into the same slot
            else:
                texts[i].append(token)
                draws[i] = Draw(token, probs)
        if all(ended):
            return
        yield draws


def checked_prompt(prompt_ids: Array) -> list[int]:
    """Return the ids as a list; raise unless they are integers, and at least one."""
    if prompt_ids.dtype.kind not in "iu":
        raise TypeError(f"prompt_ids must be integers, not {prompt_ids.dtype}")
    if prompt_ids.size == 0:
        raise ValueError("the prompt is empty: give at least one token to go on from")
    return prompt_ids.tolist()


def read_windows(model: TransformerLM, windows: list[list[int]], cache: KeyValueCache) -> list[Array]:
    """Read all windows into an empty cache; return the logits behind the last id of each, on the host."""
    ids = np.zeros((len(windows), max(map(len, windows))), np.int64)  # shorter ones are filled up at the end
    for row, window in zip(ids, windows, strict=True):
        row[: len(window)] = window
    logits = model.forward(np.asarray(ids, like=model.flat.value), cache=cache)
    to_host = mover("cpu")
    return [to_host(logits[i, len(window) - 1]) for i, window in enumerate(windows)]


def read_last(model: TransformerLM, windows: list[list[int]], cache: KeyValueCache) -> list[Array]:
    """Read the last id of each window, all others of which are cached; return the logits behind it, on the host."""
    ids = np.array([[window[-1]] for window in windows])
    positions = np.array([[len(window) - 1] for window in windows])
    if np.all(positions == positions[0]):
        positions = positions[0]  # one for all texts: a slice of the cache
    return list(mover("cpu")(model.forward(np.asarray(ids, like=model.flat.value), positions, cache))[:, 0])


def generate(
    model: TransformerLM,
    prompt_ids: Integer[np.ndarray, "seq"],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: Collection[int] = (),
    vocab_size: int | None = None,
    rng: Seed = None,
) -> Iterator[int]:
    """Yield up to `max_new_tokens` ids that go on from `prompt_ids` (seq,), each as soon as it is drawn.

    The prompt is read in one pass and then each id once, by a key/value cache: the weights must stay what they are.
    The model sees a window of the text. Of a prompt beyond the context length T, it is the last T ids. It grows by the
    ids drawn; the one that would make it longer than T makes it start anew from the latest T // 2 ids (at least one),
    counted from position 0. So past the context the model sees T // 2 to T ids.

    Drawing an id in `stop` ends the text, without that id. Only ids below `vocab_size`, the tokenizer's, are drawn: a
    model's own may be padded to a rounder number. Between two ids the model is as it was: each module in its
    mode, with its gradients and what it has kept for a backward; dropout draws nothing. ValueError for an empty prompt
    or a setting that makes no sense; see next_token_distribution for the limits.
    """
    for (draw,) in generate_batch(
        model,
        [prompt_ids],
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop,
        vocab_size=vocab_size,
        rng=[rng],
    ):
        if draw is not None:
            yield draw.token


def until_stop(pieces: Iterable[str], stop: Collection[str]) -> Iterator[str]:
    """Yield a text that comes in pieces, up to the first of the strings in `stop`, without that.

    A stop string may span pieces: what could be its beginning is held back until that is decided, and nothing else is.
    The string that is complete first ends the text, of two that are complete at once the longer one. ValueError for an
    empty one.
    """
    if "" in stop:
        raise ValueError("a stop string is empty: give at least one character")
    held = ""
    for piece in pieces:
        held += piece
        found = [(held.index(s) + len(s), held.index(s)) for s in stop if s in held]
        if found:
            held = held[: min(found)[1]]
            break
        # the longest end of the text that a stop string begins with
        possible = max((n for s in stop for n in range(1, len(s)) if held.endswith(s[:n])), default=0)
        decided = len(held) - possible
        if decided:
            yield held[:decided]
        held = held[decided:]
    if held:
        yield held
