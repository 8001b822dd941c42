"""The whole model: gradients of the loss in every combination of its parts, and what its parts are to each other."""

import copy
import dataclasses
import itertools
import math
import pickle

import numpy as np
import pytest
from strategies import Reseeded, arrays_in, check_along

from numpygpt.config import CHOICES
from numpygpt.layers import CrossEntropy, Dropout, Embedding, Linear
from numpygpt.model import TransformerConfig, TransformerLM
from numpygpt.module import Module
from numpygpt.optim import AdamW, clip_grad_norm

PARTS = {
    "ffn": CHOICES["ffn"],
    "positions": CHOICES["positions"],
    "norm": CHOICES["norm"],
    "norm_position": CHOICES["norm_position"],
    "tie_embeddings": (False, True),
    "bias": (False, True),
}
COMBINATIONS = [dict(zip(PARTS, values, strict=True)) for values in itertools.product(*PARTS.values())]
SAMPLE = COMBINATIONS[::7]
IDS = np.array([[0, 1, 4, 1], [3, 2, 0, 0]])
TARGETS = np.array([[1, 4, 1, -1], [2, 0, -1, 3]])


def make(dtype=np.float64, **fields):
    fields = {"num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "d_ff": 3, "d_model": 4, "vocab_size": 5} | fields
    config = TransformerConfig(context_length=fields.pop("context_length", 4), **fields)
    model = TransformerLM(config, dtype=dtype, rng=0)
    rng = np.random.default_rng(1)
    for p in model.parameters():
        p.value = rng.standard_normal(p.shape)
    return model


class LossOf(Module):
    """The loss of a model, to be checked in every parameter."""

    def __init__(self, model):
        self.model, self.loss = model, CrossEntropy(ignore_index=-1)

    def forward(self, ids, targets, **kwargs):
        return self.loss.forward(self.model.forward(ids, **kwargs), targets)

    def backward(self, dloss):
        self.model.backward(self.loss.backward(dloss))


class FlatLossOf(LossOf):
    """The same, with all parameters checked together, as the one vector that they are views of."""

    def named_parameters(self):
        yield "flat", self.model.flat


def name_of(fields):
    return "-".join(
        f"{'not_' * (value is False)}{name}" if value in (True, False) else value for name, value in fields.items()
    )


def pytest_generate_tests(metafunc):
    if "sampled" in metafunc.fixturenames:
        deep = metafunc.config.getoption("deep")
        metafunc.parametrize("sampled", COMBINATIONS if deep else SAMPLE, ids=name_of)


def test_the_sample_has_every_pair_of_parts():
    for a, b in itertools.combinations(PARTS, 2):
        assert {(c[a], c[b]) for c in SAMPLE} == set(itertools.product(PARTS[a], PARTS[b]))


@pytest.mark.parametrize("fields", COMBINATIONS, ids=name_of)
def test_gradients_of_the_loss_in_every_combination(fields, unchecked):
    model = make(**fields)
    names = dict(model.named_parameters())
    assert len(COMBINATIONS) == 576 and ("lm_head.weight" in names) != fields["tie_embeddings"]
    check_along(FlatLossOf(model), IDS, TARGETS)


def test_gradients_of_the_loss_parameter_by_parameter(sampled, unchecked):
    report = check_along(LossOf(make(**sampled)), IDS, TARGETS, directions=1)
    assert len({row.name for row in report.rows}) == len(make(**sampled).parameters()) >= 20


@pytest.mark.parametrize("kind", CHOICES["positions"])
@pytest.mark.parametrize("t", [[4, 2, 2, 0], [[5, 1, 3, 1], [2, 3, 4, 5]]])
def test_gradients_at_any_token_positions(kind, t):
    model = make(positions=kind, num_layers=1, context_length=6, rope_theta=20.0)
    check_along(FlatLossOf(model), IDS, TARGETS, token_positions=np.array(t))


@pytest.mark.parametrize("place", ["pre", "post"])
def test_gradients_in_training_with_dropout(place, unchecked):
    model = make(num_layers=2, norm_position=place, dropout=0.3, positions="learned")
    layer = Reseeded(LossOf(model))
    check_along(layer, IDS, TARGETS, directions=1)
    dropped = [m for m in model.modules() if isinstance(m, Dropout)]
    assert len(dropped) == 5 and all(np.count_nonzero(m.saved == 0) for m in dropped)
    without = make(num_layers=2, norm_position=place, positions="learned")
    assert np.array_equal(model.eval()(IDS), without(IDS))


@pytest.mark.parametrize("ids", [np.array([1, 2, 0]), np.array([[[3]]]), np.arange(16).reshape(2, 1, 2, 4) % 5])
def test_ids_may_have_any_leading_axes(ids):
    model = make()
    assert model(ids).shape == (*ids.shape, 5)
    alone = [model(row) for row in ids.reshape(-1, ids.shape[-1])]
    np.testing.assert_allclose(model(ids).reshape(np.shape(alone)), alone, rtol=1e-9)
    check_along(FlatLossOf(model), ids, np.zeros_like(ids))


def test_dropouts_draw_masks_of_their_own():
    model = make(num_layers=2, dropout=0.5, context_length=64, d_model=16)
    model(np.zeros((2, 64), int))
    masks = [m.saved for m in model.modules() if isinstance(m, Dropout)]
    assert not any(np.array_equal(a, b) for a, b in itertools.combinations(masks, 2))


def test_next_token_probs_are_the_softmax_of_the_last_position():
    model = make()
    last = np.exp(model(IDS)[:, -1])
    np.testing.assert_allclose(model.next_token_probs(IDS), last / last.sum(axis=-1, keepdims=True))


# Names, sizes, the start


def test_state_names_of_the_modern_stack():
    layers = [
        "ln1.weight",
        *(f"attn.{name}_proj.weight" for name in ("q", "k", "v", "output")),
        "ln2.weight",
        *(f"ffn.w{i}.weight" for i in (1, 2, 3)),
    ]
    want = ["token_embeddings.weight", *(f"layers.{i}.{name}" for i in range(3) for name in layers)]
    assert sorted(make().state_dict()) == sorted([*want, "ln_final.weight", "lm_head.weight"])


def test_state_names_of_the_original_stack():
    model = make(num_layers=1, norm="layernorm", ffn="gelu", positions="learned", bias=True, tie_embeddings=True)
    parts = ["ln1", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.output_proj", "ln2", "ffn.w1", "ffn.w2"]
    layers = [f"layers.0.{part}.{array}" for part in parts for array in ("weight", "bias")]
    want = [*layers, "token_embeddings.weight", "positions.embeddings.weight", "ln_final.weight", "ln_final.bias"]
    assert sorted(model.state_dict()) == sorted(want)
    assert {p.name for p in model.parameters()} == set(want)
    assert not any("ln_final" in name for name in make(norm_position="post").state_dict())


def test_the_number_of_parameters():
    model = TransformerLM(TransformerConfig(65, 64, 128, 4, 4), rng=0)
    assert model.flat.value.size == sum(p.size for p in model.parameters()) == 869_760


def test_the_glorot_start():
    model = TransformerLM(TransformerConfig(300, 200, 192, 2, 4, positions="learned", bias=True), rng=0)
    for module in model.modules():
        if isinstance(module, Embedding | Linear):
            weight = module.weight.value
            std = 1 if isinstance(module, Embedding) else math.sqrt(2 / sum(weight.shape))
            assert weight.std() == pytest.approx(0.98658 * std, rel=0.02) and np.abs(weight).max() <= 3.0001 * std
    assert_gains_and_biases(model)


@pytest.mark.parametrize("tie", [False, True])
def test_the_gpt2_start(tie):
    parts = {"positions": "learned", "bias": True, "norm": "layernorm", "tie_embeddings": tie, "init": "gpt2"}
    model = TransformerLM(TransformerConfig(300, 200, 192, 8, 4, **parts), rng=0)
    for name, p in model.named_parameters():
        if p.decays:
            std = 0.02 / 4 if name.endswith(("output_proj.weight", "w2.weight")) else 0.02
            assert p.value.std() == pytest.approx(std, rel=0.02), name
    assert np.abs(model.token_embeddings.weight.value).max() > 0.07  # not cut
    assert_gains_and_biases(model)


def assert_gains_and_biases(model):
    for name, p in model.named_parameters():
        if not p.decays:
            assert (p.value == (0 if name.endswith("bias") else 1)).all()


def test_no_two_blocks_start_alike():
    blocks = TransformerLM(make().config, rng=0).layers
    assert not np.array_equal(blocks[0].ffn.w1.weight.value, blocks[1].ffn.w1.weight.value)


# Tying


def test_one_shared_entry_by_a_finite_difference():
    model = make(tie_embeddings=True)
    layer, weight = LossOf(model), model.lm_head.weight
    layer.forward(IDS, TARGETS)
    layer.backward(1.0)
    losses = []
    for step in (1e-5, -2e-5):
        weight.value[1, 2] += step
        losses.append(layer.forward(IDS, TARGETS))
    assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(weight.grad[1, 2], rel=1e-6)


def test_a_tied_array_is_counted_once_and_loads_from_a_state_without_lm_head():
    model = make(tie_embeddings=True)
    model.flat.grad += 1
    assert clip_grad_norm(model.parameters(), 1e9) == pytest.approx(math.sqrt(sum(p.size for p in model.parameters())))
    state = model.state_dict()
    assert "lm_head.weight" not in state
    state["token_embeddings.weight"] += 1
    model.load_state_dict(state)
    assert np.array_equal(model.lm_head.weight.value, state["token_embeddings.weight"])


# One flat buffer


@pytest.mark.parametrize("duplicate", [lambda x: x, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_all_parameters_are_views_of_one_buffer_matrices_first_also_in_a_copy(duplicate):
    model = duplicate(make(bias=True, norm="layernorm"))
    offset = 0
    for p in sorted(model.parameters(), key=lambda p: p.offset):
        assert p.offset == offset and p.buffer is model.flat
        assert np.shares_memory(p.value, model.flat.value) and np.shares_memory(p.grad, model.flat.grad)
        offset += p.size
    decays = [p.decays for p in sorted(model.parameters(), key=lambda p: p.offset)]
    assert offset == model.flat.value.size and decays == sorted(decays, reverse=True)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_training_a_copy_with_its_optimiser_leaves_the_original_alone(duplicate):
    model = make(tie_embeddings=True)
    optimizer = AdamW(model.parameters(), 0.1)
    twin, twins_optimizer = duplicate((model, optimizer))
    before, alike = model.flat.value.copy(), twin.flat.value.copy()
    layer = LossOf(twin)
    layer.forward(IDS, TARGETS)
    layer.backward(1.0)
    twins_optimizer.step()
    assert np.array_equal(before, alike) and not np.allclose(twin.flat.value, alike)
    assert np.array_equal(model.flat.value, before) and not model.flat.grad.any() and optimizer.t == 0
    assert np.array_equal(
        twin.token_embeddings.weight.value.ravel(), twin.flat.value[: twin.token_embeddings.weight.size]
    )


def test_gradients_accumulate_until_zeroed():
    # karpathy/micrograd#2, #53, #102
    model = make(np.float32)
    layer = LossOf(model)
    layer.forward(IDS, TARGETS)
    layer.backward(1.0)
    once = model.flat.grad.copy()
    layer.backward(1.0)
    assert np.array_equal(model.flat.grad, 2 * once)
    model.zero_grad()
    assert not model.flat.grad.any()
    layer.backward(1.0)
    assert np.array_equal(model.flat.grad, once)


# Precision


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("fields", COMBINATIONS[::3], ids=name_of)
def test_everything_stays_in_the_dtype_of_the_model(fields, dtype, unchecked):
    # numpy/numpy#25098: one float64 scalar turns all that follows into float64
    numbers = {"dropout": np.float64(0.1), "norm_eps": np.float64(1e-5), "rope_theta": np.float64(100)}
    layer = LossOf(make(dtype, num_layers=1, **fields, **numbers))
    model = layer.model
    optimizer = AdamW(model.parameters(), np.float64(0.1), weight_decay=np.float64(0.1))
    outputs = []
    for module in layer.modules():
        for method in ("forward", "backward"):
            setattr(module, method, recorded(getattr(module, method, None), outputs))
    layer.forward(IDS, TARGETS)
    layer.backward(1.0)
    clip_grad_norm(model.parameters(), 0.1)
    optimizer.step()
    saved = [vars(m).get("saved") for m in layer.modules()]
    everything = [*arrays_in(outputs), *arrays_in(saved), model.flat.value, model.flat.grad, *optimizer.m, *optimizer.v]
    assert len(everything) > 50
    assert {x.dtype for x in everything if x.dtype.kind == "f"} == {np.dtype(dtype)}


def recorded(function, outputs):
    def call(*args, **kwargs):
        outputs.append(function(*args, **kwargs))
        return outputs[-1]

    return call


# Errors


@pytest.mark.parametrize("bad", [5, -1])
def test_an_id_outside_the_vocabulary_is_refused(bad):
    with pytest.raises(IndexError, match=f"token id {bad} "):
        make()(np.array([0, bad]))


@pytest.mark.parametrize(
    ("shape", "named"),
    [((2, 5), "5 tokens.*context_length 4"), ((2, 0), r"\(2, 0\)"), ((0, 4), r"\(0, 4\)"), ((), r"\(\)")],
)
def test_ids_that_are_no_sequences_within_the_context_are_refused(shape, named, unchecked):
    with pytest.raises(ValueError, match=named):
        make()(np.zeros(shape, int))


def test_ids_in_a_list_and_positions_that_are_not_one_for_each_id_are_refused(unchecked):
    with pytest.raises(TypeError, match="array of integers, not a list"):
        make()([0, 1])
    for positions in (np.array([0]), np.array([0.0, 1, 2, 3])):
        with pytest.raises((ValueError, TypeError), match=str(positions.dtype)):
            make(positions="none")(IDS, positions)


@pytest.mark.parametrize("kind", ["rope", "sinusoidal", "learned"])
def test_a_position_beyond_the_context_is_refused(kind):
    with pytest.raises(IndexError, match="position 4 "):
        make(positions=kind)(np.array([0, 1]), np.array([3, 4]))


def test_an_odd_head_width_works_without_rope():
    # huggingface/transformers#48101, codertimo/BERT-pytorch#78
    model = make(d_model=15, num_heads=3, positions="sinusoidal")
    assert model(IDS).shape == (2, 4, 5)
    with pytest.raises(ValueError, match="odd"):
        dataclasses.replace(model.config, positions="rope")
