"""The whole model, of any config: changes of the input or the weights whose effect on all gradients is known.

A batch in another order, a longer text, a renamed vocabulary, heads in another order, a factor moved from one map to
the next: each says what becomes of logits, loss and gradients, without a reference and without a finite difference.
"""

import dataclasses
import re

import numpy as np
import pytest
from comparing import assert_all_close, assert_close, deviation, randomise
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import rngs

from numpygpt.config import CHOICES, TransformerConfig
from numpygpt.layers import CrossEntropy
from numpygpt.layers.block import GATES
from numpygpt.model import TransformerLM
from numpygpt.optim import AdamW, clip_grad_norm

pytestmark = pytest.mark.usefixtures("unchecked")  # three times as fast

VOCABULARY, LIMIT = 6, 8  # tokens; the longest sequence
HEADS = [(1, None, 6), (2, None, 4), (2, 1, 2), (3, 1, 2), (4, 2, 2), (6, 2, 2)]  # of queries, of keys, their width


@st.composite
def configs(draw, **fixed):
    """Draw a config with any options but those fixed (a list: one of it)."""
    num_heads, num_kv_heads, d_k = draw(st.sampled_from(HEADS))
    options = {
        "num_layers": [1, 2, 3],
        "d_ff": [1, 3, 5],
        "rope_theta": [10000.0, 20.0],
        "norm_eps": [1e-5, 0.1],
        "bias": [False, True],
        "tie_embeddings": [False, True],
        **CHOICES,
        **fixed,
    }
    drawn = {name: draw(st.sampled_from(choices)) for name, choices in options.items()}
    shape = {"d_model": num_heads * d_k, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    return TransformerConfig(VOCABULARY, LIMIT, **shape, **drawn)


@st.composite
def cases(draw, **fixed):
    """Draw a model of such a config, ids, their targets (some ignored, never all of a sequence) and a generator."""
    config, rng = draw(configs(**fixed)), draw(rngs)
    model = randomise(TransformerLM(config, dtype=np.float64), rng)
    shape = draw(st.integers(2, 3)), draw(st.integers(2, 5))
    ids, targets = rng.integers(0, VOCABULARY, shape), rng.integers(-1, VOCABULARY, shape)
    targets[:, 0] = ids[:, -1]
    return model, ids, targets, rng


def run(model, ids, targets, positions=None, dloss=1.0):
    """Return logits, loss and all gradients by name."""
    cross_entropy = CrossEntropy(ignore_index=-1)
    model.zero_grad()
    logits = model.forward(ids, positions)
    loss = cross_entropy.forward(logits, targets)
    model.backward(cross_entropy.backward(dloss))
    return logits, loss, gradients(model)


def gradients(model):
    return {name: p.grad.copy() for name, p in model.named_parameters()}


def like(model, weights, **options):
    """A model of the same config but for some options, with the given weights."""
    other = TransformerLM(dataclasses.replace(model.config, **options), dtype=np.float64)
    other.load_state_dict(weights)
    return other


def assert_same(ours, theirs):
    """Logits, loss and gradients are the same, to rounding."""
    assert_close(ours[0], theirs[0], "logits")
    assert_close(ours[1], theirs[1], "loss")
    assert_all_close(ours[2], theirs[2])


# The batch and the text


@given(cases())
def test_the_order_of_a_batch_does_not_matter(case):
    model, ids, targets, rng = case
    logits, loss, grads = run(model, ids, targets)
    order = rng.permutation(len(ids))
    assert_same(run(model, ids[order], targets[order]), (logits[order], loss, grads))


@given(cases())
def test_parts_of_a_batch_add_up_to_its_gradient_each_weighted_by_its_targets(case):
    model, ids, targets, rng = case
    _, loss, grads = run(model, ids, targets)
    model.zero_grad()
    cross_entropy, total = CrossEntropy(ignore_index=-1), 0.0
    cut = rng.integers(1, len(ids))
    for part in slice(cut), slice(cut, None):
        share = (targets[part] != -1).sum() / (targets != -1).sum()
        total += share * cross_entropy.forward(model.forward(ids[part]), targets[part])
        model.backward(cross_entropy.backward(share))
    assert_close(total, loss, "loss")
    assert_all_close(gradients(model), grads)


@given(cases())
def test_tokens_appended_with_ignored_targets_change_neither_loss_nor_gradients(case):
    model, ids, targets, rng = case
    logits, loss, grads = run(model, ids, targets)
    more = rng.integers(0, VOCABULARY, (len(ids), rng.integers(1, 4)))
    padded = run(model, np.hstack([ids, more]), np.hstack([targets, np.full_like(more, -1)]))
    assert_same((padded[0][:, : ids.shape[1]], *padded[1:]), (logits, loss, grads))


@given(cases())
def test_no_logits_depend_on_later_tokens(case):
    model, ids, _, rng = case
    logits = model.forward(ids)
    t = rng.integers(1, ids.shape[1])
    assert_close(model.forward(ids[:, :t]), logits[:, :t], "logits of a prefix")
    ids[:, t:] = (ids[:, t:] + 1) % VOCABULARY
    other = model.forward(ids)
    assert_close(other[:, :t], logits[:, :t], "logits before a change")
    assert deviation(other[:, t], logits[:, t]) > 1e-6


# Positions


@given(cases(positions=["rope", "none"]))
def test_rope_sees_distances_only(case):
    model, ids, targets, rng = case
    length = ids.shape[1]
    shifted = np.arange(length) + rng.integers(0, LIMIT - length + 1, (len(ids), 1))  # each sequence by its own
    assert_same(run(model, ids, targets, shifted), run(model, ids, targets))


@given(cases(positions=["learned"]))
def test_learned_positions_are_rows_and_no_more(case):
    model, ids, targets, rng = case
    there = np.sort(rng.permutation(LIMIT)[: ids.shape[1]])
    order = np.append(there, np.setdiff1d(np.arange(LIMIT), there))
    rules = [("positions.embeddings", "rows", order)]
    logits, loss, grads = run(model, ids, targets, there)
    other = like(model, transform(model.state_dict(), rules, reorder))
    assert_same(run(other, ids, targets), (logits, loss, transform(grads, rules, reorder)))


@pytest.mark.parametrize("kind", ["rope", "sinusoidal", "learned"])
def test_distances_are_seen(kind):
    config = TransformerConfig(VOCABULARY, LIMIT, 8, 2, 2, positions=kind, d_ff=6)
    model = randomise(TransformerLM(config, dtype=np.float64), np.random.default_rng(0))
    ids = np.array([0, 1, 4, 1])
    assert deviation(model(ids, 2 * np.arange(4)), model(ids)) > 1e-3
    assert (deviation(model(ids, 3 + np.arange(4)), model(ids)) > 1e-3) == (kind != "rope")


# Weights that are renamed. A rule (parts, "rows" or "columns", numbers) is about the rows of a part's weight and the
# elements of its bias, or about the columns of its weight.


def transform(arrays, rules, change):
    """Change rows and columns of arrays (weights or gradients by name) by the rules."""
    arrays = dict(arrays)
    for parts, axis, numbers in rules:
        for name, array in arrays.items():
            part, kind = name.rsplit(".", 1)
            if part.endswith(parts) and axis == "rows":
                arrays[name] = change(array.T, numbers).T
            elif part.endswith(parts) and kind == "weight":
                arrays[name] = change(array, numbers)
    return arrays


def reorder(array, order):
    return array[..., order]


def by_heads(config):
    """Number of key/value heads, of query heads for each, and their width."""
    kv_heads = config.num_kv_heads or config.num_heads
    return kv_heads, config.num_heads // kv_heads, config.d_model // config.num_heads


def heads(config, rng):
    kv_heads, group, d_k = by_heads(config)
    order = rng.permutation(kv_heads)
    queries = np.arange(config.d_model).reshape(kv_heads, group, d_k)[order][:, rng.permutation(group)].ravel()
    keys = np.arange(kv_heads * d_k).reshape(kv_heads, d_k)[order].ravel()
    return [("q_proj", "rows", queries), ("output_proj", "columns", queries), (("k_proj", "v_proj"), "rows", keys)]


def features_of_values(config, rng):
    kv_heads, group, d_k = by_heads(config)
    order = rng.permutation(d_k)
    values, outputs = ((d_k * np.arange(n)[:, None] + order).ravel() for n in (kv_heads, kv_heads * group))
    return [("v_proj", "rows", values), ("output_proj", "columns", outputs)]


def hidden_units(config, rng):
    order = rng.permutation(config.d_ff)
    return [((".w1", ".w3"), "rows", order), (".w2", "columns", order)]


READERS = ("q_proj", "k_proj", "v_proj", ".w1", ".w3", "lm_head")
WRITERS = ("output_proj", ".w2")


def features_of_the_residual_stream(config, rng):
    assume(config.positions != "sinusoidal")  # whose features are not alike
    order = rng.permutation(config.d_model)
    return [((*READERS, "embeddings"), "columns", order), ((*WRITERS, "ln1", "ln2", "ln_final"), "rows", order)]


@pytest.mark.parametrize("symmetry", [heads, features_of_values, hidden_units, features_of_the_residual_stream])
@given(case=cases())
def test_what_has_no_order_may_be_reordered(symmetry, case):
    model, ids, targets, rng = case
    logits, loss, grads = run(model, ids, targets)
    rules = symmetry(model.config, rng)
    other = like(model, transform(model.state_dict(), rules, reorder))
    assert_same(run(other, ids, targets), (logits, loss, transform(grads, rules, reorder)))


@given(cases())
def test_a_renamed_vocabulary_renames_logits_and_gradients(case):
    model, ids, targets, rng = case
    logits, loss, grads = run(model, ids, targets)
    order = rng.permutation(VOCABULARY)
    new = np.append(np.argsort(order), -1)  # the new name of each id; -1 stays ignored
    rules = [(("token_embeddings", "lm_head"), "rows", order)]
    other = like(model, transform(model.state_dict(), rules, reorder))
    assert_same(run(other, new[ids], new[targets]), (logits[..., order], loss, transform(grads, rules, reorder)))


@given(cases(positions=["rope"], rope_layout=["interleaved"]))
def test_the_two_layouts_of_rope_differ_by_an_order_of_rows(case):
    model, ids, targets, _ = case
    kv_heads, group, d_k = by_heads(model.config)
    to_half = np.array([*range(0, d_k, 2), *range(1, d_k, 2)])
    queries, keys = ((d_k * np.arange(n)[:, None] + to_half).ravel() for n in (kv_heads * group, kv_heads))
    rules = [("q_proj", "rows", queries), ("k_proj", "rows", keys)]
    logits, loss, grads = run(model, ids, targets)
    other = like(model, transform(model.state_dict(), rules, reorder), rope_layout="half")
    assert_same(run(other, ids, targets), (logits, loss, transform(grads, rules, reorder)))


# Weights that are rescaled: a factor of one array is the inverse factor of its gradient. And where factors change
# nothing, the loss has no slope along them: products of weights and gradients cancel, feature by feature.


def assert_unchanged_by(rules, model, ids, targets):
    """All is the same with the factors of the rules on the weights, and the loss has no slope along them.

    No two rules are about the same array.
    """
    logits, loss, grads = run(model, ids, targets)
    weights = model.state_dict()
    other = like(model, transform(weights, rules, np.multiply))
    assert_same(run(other, ids, targets), (logits, loss, transform(grads, rules, np.divide)))

    slopes = {name: weights[name] * grad for name, grad in grads.items()}  # in the logarithm of each weight
    along = transform(slopes, [(parts, axis, 1 + np.log(f)) for parts, axis, f in rules], np.multiply)
    assert_close(sum((along[name] - slopes[name]).sum() for name in slopes), 0.0, "slope along the factors")


def factors(rng, *shape):
    return 2 ** rng.uniform(-1, 1, shape)


def gains_folded_into_the_next_map(config, rng):
    assume(config.norm_position == "pre")  # else the residual path has the gain too
    pairs = [("ln1", ("q_proj", "k_proj", "v_proj")), ("ln2", (".w1", ".w3"))]
    pairs += [] if config.tie_embeddings else [("ln_final", "lm_head")]
    rules = []
    for norm, maps in pairs:
        f = factors(rng, config.d_model)
        rules += [(norm, "rows", f), (maps, "columns", 1 / f)]
    return rules


def keys_against_queries(config, rng):
    kv_heads, group, d_k = by_heads(config)
    f = factors(rng, kv_heads, 1, 1)
    q, k = (np.broadcast_to(f, (kv_heads, n, d_k)).ravel() for n in (group, 1))
    return [("q_proj", "rows", q), ("k_proj", "rows", 1 / k)]


def values_against_outputs(config, rng):
    kv_heads, group, d_k = by_heads(config)
    f = factors(rng, kv_heads, 1, d_k)
    shared = np.broadcast_to(f, (kv_heads, group, d_k))
    return [("v_proj", "rows", f.ravel()), ("output_proj", "columns", 1 / shared.ravel())]


def hidden_units_that_are_linear(config, rng):
    assume(config.ffn in GATES or config.ffn == "relu")
    f = factors(rng, config.d_ff)
    return [(".w3" if config.ffn in GATES else ".w1", "rows", f), (".w2", "columns", 1 / f)]


SCALES = [gains_folded_into_the_next_map, keys_against_queries, values_against_outputs, hidden_units_that_are_linear]


@pytest.mark.parametrize("symmetry", SCALES)
@given(case=cases())
def test_a_factor_may_move_from_one_map_to_the_next(symmetry, case):
    model, ids, targets, rng = case
    assert_unchanged_by(symmetry(model.config, rng), model, ids, targets)


SEEN_BY_NORMS_ALONE = {"norm_position": ["pre"], "tie_embeddings": [False]}  # what the residual stream holds


@given(cases(**SEEN_BY_NORMS_ALONE, norm_eps=[1e-15], positions=["rope", "learned", "none"]))
def test_norms_do_not_see_the_length_of_the_residual_stream(case):
    model, ids, targets, rng = case
    assert_unchanged_by([(("embeddings", *WRITERS), "rows", factors(rng))], model, ids, targets)


ATTENTION = ("attn.q_proj", "attn.k_proj", "attn.v_proj"), "attn.output_proj", "ln1"
FFN = ("ffn.w1", "ffn.w3"), "ffn.w2", "ln2"


@given(cases(norm_position=["post"], tie_embeddings=[False], norm_eps=[1e-15], positions=["rope", "learned", "none"]))
def test_norms_behind_do_not_see_the_length_of_the_sums_before_them(case):
    model, ids, targets, rng = case
    rules, source = [], "embeddings"
    for i in range(model.config.num_layers):
        for readers, writer, norm in ATTENTION, FFN:
            f = factors(rng)  # of the residual path, and of what the sublayer adds
            maps = tuple(f"layers.{i}.{reader}" for reader in readers)
            rules += [(source, "rows", f), (maps, "columns", 1 / f), (f"layers.{i}.{writer}", "rows", f)]
            source = f"layers.{i}.{norm}"
    assert_unchanged_by(rules, model, ids, targets)


@given(cases(**SEEN_BY_NORMS_ALONE, norm=["layernorm"]))
def test_layernorm_does_not_see_a_constant_added_to_all_features(case):
    model, ids, targets, rng = case
    state = model.state_dict()
    for name, array in state.items():
        part, kind = name.rsplit(".", 1)
        if part.endswith("embeddings"):
            state[name] = array + rng.standard_normal((len(array), 1))
        elif part.endswith(WRITERS):
            state[name] = array + rng.standard_normal((1, array.shape[1]) if kind == "weight" else 1)
    assert_same(run(like(model, state), ids, targets), run(model, ids, targets))


@given(cases(bias=[True], positions=["sinusoidal", "learned", "none"]))
def test_attention_does_not_see_a_constant_added_to_all_keys(case):
    model, ids, targets, rng = case
    here = run(model, ids, targets)
    for block in model.layers:
        block.attn.k_proj.bias.value = rng.standard_normal(block.attn.k_proj.bias.shape)
    assert_same(run(model, ids, targets), here)
    for block in model.layers:
        assert_close(block.attn.k_proj.bias.grad, np.zeros(block.attn.k_proj.bias.shape), "bias of the keys")


# Models that are the same


@given(cases())
def test_shared_heads_are_equal_heads_and_their_gradients_add(case):
    model, ids, targets, _ = case
    kv_heads, group, d_k = by_heads(model.config)

    def is_shared(name):
        return name.rsplit(".", 1)[0].endswith(("k_proj", "v_proj"))

    def repeated(array):
        return array.reshape(kv_heads, d_k, -1).repeat(group, axis=0).reshape(-1, *array.shape[1:])

    def summed(grad):
        return grad.reshape(kv_heads, group, d_k, -1).sum(axis=1).reshape(-1, *grad.shape[1:])

    state = {name: repeated(array) if is_shared(name) else array for name, array in model.state_dict().items()}
    logits, loss, grads = run(like(model, state, num_kv_heads=None), ids, targets)
    grads = {name: summed(grad) if is_shared(name) else grad for name, grad in grads.items()}
    assert_same(run(model, ids, targets), (logits, loss, grads))


@given(cases(tie_embeddings=[True]))
def test_the_gradient_of_a_tied_array_is_the_sum_of_the_two_it_would_have_had(case):
    # rasbt/LLMs-from-scratch#822, huggingface/transformers#38870, karpathy/nanoGPT#21
    model, ids, targets, _ = case
    state = model.state_dict()
    state["lm_head.weight"] = state["token_embeddings.weight"]
    logits, loss, grads = run(like(model, state, tie_embeddings=False), ids, targets)
    one, other = grads.pop("lm_head.weight"), grads["token_embeddings.weight"]
    assert one.any() and other.any()
    assert_same(run(model, ids, targets), (logits, loss, grads | {"token_embeddings.weight": one + other}))


@given(cases(bias=[False]))
def test_biases_of_zero_are_no_biases(case):
    model, ids, targets, _ = case
    biased = TransformerLM(dataclasses.replace(model.config, bias=True), dtype=np.float64)
    biased.load_state_dict(biased.state_dict() | model.state_dict())  # all biases start at 0
    logits, loss, grads = run(biased, ids, targets)
    without = {name: grad for name, grad in grads.items() if not name.endswith(".bias")}
    assert len(without) < len(grads)
    assert_same(run(model, ids, targets), (logits, loss, without))


@given(cases(norm_position=["pre"], num_layers=[2, 3]))
def test_a_block_that_adds_nothing_may_be_left_out(case):
    model, ids, targets, rng = case
    silent = rng.integers(0, model.config.num_layers)
    for part in model.layers[silent].attn.output_proj, model.layers[silent].ffn.w2:
        for p in part.parameters():
            p.value = np.zeros(p.shape)

    def without_it(arrays):
        kept = {name: array for name, array in arrays.items() if not name.startswith(f"layers.{silent}.")}
        return {re.sub(r"(?<=^layers\.)\d+", number_without_it, name): array for name, array in kept.items()}

    def number_without_it(match):
        return str(int(match[0]) - (int(match[0]) > silent))

    logits, loss, grads = run(model, ids, targets)
    shorter = like(model, without_it(model.state_dict()), num_layers=model.config.num_layers - 1)
    assert_same(run(shorter, ids, targets), (logits, loss, without_it(grads)))


# Backward


@given(cases())
def test_backward_is_linear_in_its_cotangent_and_exact_for_powers_of_two(case):
    model, ids, targets, rng = case
    *_, once = run(model, ids, targets)
    *_, twice = run(model, ids, targets, dloss=2.0)
    assert all(np.array_equal(twice[name], 2 * grad) for name, grad in once.items())

    one, other = rng.standard_normal((2, *ids.shape, VOCABULARY))
    each = []
    for cotangent in (one, other, 0.3 * one - other):
        model.zero_grad()
        model.backward(cotangent)
        each.append(gradients(model))
    assert_all_close(each[2], {name: 0.3 * each[0][name] - each[1][name] for name in each[2]})


# Seeds


def trained(config, seed):
    """The weights that a seed means, and all that three steps of training compute (from weights that are the same for
    all seeds, so that only dropout tells them apart), in bytes.
    """
    model, cross_entropy = TransformerLM(config, rng=seed), CrossEntropy()
    optimizer = AdamW(model.parameters(), 0.01)
    rng = np.random.default_rng(0)
    numbers = [model.flat.value.copy()]
    model.load_state_dict(TransformerLM(config, rng=0).state_dict())
    for _ in range(3):
        ids = rng.integers(0, VOCABULARY, (4, LIMIT))
        model.zero_grad()
        logits = model.forward(ids)
        loss = cross_entropy.forward(logits, ids)
        model.backward(cross_entropy.backward())
        norm = clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        numbers += [logits, loss, norm, model.flat.grad.copy(), model.flat.value.copy()]
    return [np.asarray(x).tobytes() for x in (*numbers, *optimizer.m, *optimizer.v)]


@given(configs(dropout=[0.3]), st.integers(0, 2**32 - 2))
def test_a_seed_means_the_same_bits_to_the_end_of_training_and_another_seed_other_ones(config, seed):
    numbers = trained(config, seed)
    assert trained(config, seed) == numbers
    assert not any(a == b for a, b in zip(trained(config, seed + 1), numbers, strict=True))
