r"""Sampling: from logits to a distribution, and from a prompt to a text."""

from collections.abc import Collection, Iterator

import numpy as np
from jaxtyping import Float, Integer

from numpygpt.array import Array, mover
from numpygpt.init import Seed
from numpygpt.layers.softmax import Softmax
from numpygpt.model import TransformerLM


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
    logits = logits.astype(np.float64)
    order = np.argsort(-logits, axis=-1, kind="stable")  # ids, the most probable first
    if temperature == 0:
        temperature, top_k = 1.0, 1
    scaled = (logits - np.max(logits, axis=-1, keepdims=True)) / temperature
    probs = np.take_along_axis(Softmax().forward(scaled), order, axis=-1)
    if top_k is not None:
        probs[..., top_k:] = 0
    if top_p is not None:
        probs /= np.sum(probs, axis=-1, keepdims=True)
        before = np.cumsum(probs, axis=-1) - probs  # the probability of all that come before
        keep = before < top_p
        keep[..., 0] = True
        probs = np.where(keep, probs, 0)
    if min_p is not None:
        probs = np.where(probs >= min_p * probs[..., :1], probs, 0)
    probs /= np.sum(probs, axis=-1, keepdims=True)
    result = np.empty_like(probs)
    np.put_along_axis(result, order, probs, axis=-1)
    return result


def penalise_repetition(logits: Float[np.ndarray, "vocab"], seen: Array, penalty: float) -> Array:
    """Return logits with those of the `seen` ids made smaller: positive ones divided by `penalty`, others multiplied.

    Source: Keskar et al. (2019), arXiv:1909.05858, section 4.1, with the sign taken care of.
    """
    logits = logits.copy()
    ids = np.unique(seen)
    logits[ids] = np.where(logits[ids] > 0, logits[ids] / penalty, logits[ids] * penalty)
    return logits


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
    rng: Seed = None,
) -> Iterator[int]:
    """Yield up to `max_new_tokens` ids that go on from `prompt_ids` (seq,), each as soon as it is drawn.

    Past the context length the model sees a sliding window: the latest ids, counted from position 0. Drawing an
    id in `stop` ends the text, without that id. The model evaluates (no dropout) and is put back into its mode.
    ValueError for an empty prompt or a setting that makes no sense; see next_token_distribution for the limits.
    """
    if prompt_ids.dtype.kind not in "iu":
        raise TypeError(f"prompt_ids must be integers, not {prompt_ids.dtype}")
    if prompt_ids.size == 0:
        raise ValueError("the prompt is empty: give at least one token to go on from")
    if not (repetition_penalty >= 1 and np.isfinite(repetition_penalty)):
        raise ValueError(f"repetition_penalty must be a finite number of at least 1, not {repetition_penalty!r}")
    rng = np.random.default_rng(rng)
    to_host = mover("cpu")
    ids = prompt_ids.astype(np.int64)
    for _ in range(max_new_tokens):
        window = np.asarray(ids[-model.config.context_length :], like=model.flat.value)
        was_training = model.training
        model.eval()
        try:
            logits = to_host(model.forward(window))[-1]
        finally:
            model.train(was_training)
        if repetition_penalty != 1:
            logits = penalise_repetition(logits, ids, repetition_penalty)
        probs = next_token_distribution(logits, temperature, top_k, top_p, min_p)
        token = int(rng.choice(probs.size, p=probs))
        if token in stop:
            return
        ids = np.append(ids, token)
        yield token
