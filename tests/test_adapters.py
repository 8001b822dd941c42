"""A model with LoRA: only adapters learn, in every dress, by any number of threads; merged, it is an ordinary model."""

import copy
import pickle

import numpy as np
import pytest
from strict_array import StrictArray, to_device, to_host

from numpygpt import checkpoint
from numpygpt.adapters import add_lora, load_adapter_state, merge_lora, merged_state
from numpygpt.layers import CrossEntropy, Linear, LoRALinear
from numpygpt.model import TransformerConfig, TransformerLM
from numpygpt.optim import AdamW
from numpygpt.tensorfile import CheckpointError
from numpygpt.train import TrainConfig, Trainer

SIZES = {"vocab_size": 7, "context_length": 8, "d_model": 8, "num_layers": 2, "num_heads": 2, "d_ff": 12}
DRESSES = {
    "llama": {"num_kv_heads": 1},
    "gpt2": {"norm": "layernorm", "ffn": "gelu_tanh", "positions": "learned", "bias": True, "tie_embeddings": True},
}
dresses = pytest.mark.parametrize("dress", DRESSES.values(), ids=DRESSES)
TOKENS = np.random.default_rng(0).integers(0, 7, 300)
IDS, TARGETS = TOKENS[:24].reshape(3, 8), TOKENS[1:25].reshape(3, 8)


def make(dtype=np.float64, rng=0, **config):
    return TransformerLM(TransformerConfig(**SIZES, **config), dtype=dtype, rng=rng)


def adapted(dtype=np.float64, **config):
    """A model whose adapters have learned something."""
    model = make(dtype, **config)
    add_lora(model, 2, 3.0, rng=1)
    rng = np.random.default_rng(2)
    for p in model.parameters():
        if p.trainable:
            p.value = rng.standard_normal(p.shape)
    return model


def gradients(model):
    loss = CrossEntropy()
    model.zero_grad()
    loss.forward(model.forward(IDS), TARGETS)
    model.backward(loss.backward())
    return {name: p.grad.copy() for name, p in model.named_parameters() if p.trainable}


def loras(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


@dresses
def test_adapters_come_beside_every_linear_map_of_the_blocks_and_change_nothing_yet(dress):
    model, plain = make(**dress), make(**dress)
    add_lora(model, 2, rng=0)
    assert np.array_equal(model(IDS), plain(IDS))
    maps = [name for name, m in plain.named_modules() if isinstance(m, Linear) and name != "lm_head"]
    assert list(loras(model)) == maps
    learning = [p for p in model.parameters() if p.trainable]
    assert [p.name for p in learning] == [f"{name}.{letter}" for name in maps for letter in "AB"]
    assert len({id(p.buffer) for p in learning}) == 1 and model.flat.grad is None
    assert [p.name for p in model.parameters()] == [name for name, _ in model.named_parameters()]


@dresses
def test_the_gradients_are_those_of_the_merged_model_seen_through_the_adapters(dress):
    model = adapted(**dress)
    merged = copy.deepcopy(model)
    merge_lora(merged)
    np.testing.assert_allclose(merged(IDS), model(IDS), rtol=1e-9, atol=1e-9)
    ours, whole = gradients(model), gradients(merged)
    assert len(ours) == 2 * len(loras(model))
    for name, lora in loras(model).items():
        dM = whole[f"{name}.weight"]
        np.testing.assert_allclose(ours[f"{name}.B"], 1.5 * dM @ lora.A.value.T, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(ours[f"{name}.A"], 1.5 * lora.B.value.T @ dM, rtol=1e-8, atol=1e-9)


@dresses
def test_merged_it_is_an_ordinary_model_that_learns(dress):
    model, plain = adapted(np.float32, **dress), make(np.float32, **dress)
    before, state = model.state_dict(), merged_state(model)
    assert all(np.array_equal(value, before[name]) for name, value in model.state_dict().items())
    merge_lora(model)
    assert list(state) == list(model.state_dict()) == list(plain.state_dict())
    assert all(np.array_equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(value.dtype == np.float32 for value in state.values())
    assert [p.name for p in model.parameters()] == [p.name for p in plain.parameters()]
    assert loras(model) == {} and all(p.trainable for p in model.parameters())
    assert all(grad.any() for grad in gradients(model).values())
    assert all(np.array_equal(value, merged_state(plain)[name]) for name, value in plain.state_dict().items())


def test_a_rank_that_does_not_fit_every_map_is_refused_and_changes_nothing():
    model = make(num_kv_heads=1)  # k and v have 4 outputs
    before = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match="rank 5 is more than a map of 8 to 4"):
        add_lora(model, 5)
    assert [name for name, _ in model.named_parameters()] == before and model.flat.grad is not None
    add_lora(model, 4)
    with pytest.raises(ValueError, match="adapters already"):
        add_lora(model, 4)


# Training


def trainer(model, threads, **options):
    config = TrainConfig(**{"steps": 6, "batch_size": 5, "eval_interval": 3, "lr": 0.05} | options)
    return Trainer(model, TOKENS[:200], TOKENS[200:], config, threads)


def test_only_adapters_learn_and_the_loss_falls():
    model = make(np.float32, dropout=0.1)
    add_lora(model, 2, rng=1)
    frozen, start = model.flat.value.copy(), {p.name: p.value.copy() for p in model.parameters() if p.trainable}
    run = trainer(model, 2)
    assert sum(m.size for m in run.optimizer.m) == sum(value.size for value in start.values())
    before = run.evaluate()
    assert run.run() < before
    assert np.array_equal(model.flat.value, frozen) and model.flat.grad is None
    assert not any(np.array_equal(p.value, start[p.name]) for p in model.parameters() if p.trainable)


def test_threads_share_the_work_and_come_to_the_same_bits_at_every_run():
    def trained(threads, dtype):
        model = make(dtype)
        add_lora(model, 2, rng=1)
        trainer(model, threads).run()
        return merged_state(model)

    one, three = (trained(threads, np.float64) for threads in (1, 3))
    assert all(np.allclose(one[name], three[name], rtol=1e-8, atol=1e-10) for name in one)
    first, second = (trained(3, np.float32) for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_what_is_not_finite_is_named_beside_frozen_weights():
    model = make(np.float32)
    add_lora(model, 2, rng=1)
    with pytest.raises(FloatingPointError, match=r"in step \d the .* is not finite"):
        trainer(model, 2, lr=1e30).run()


def test_a_shorter_window_than_the_model_takes():
    run = trainer(make(np.float32), 1, context_length=5)
    inputs = []
    forward = run.model.forward
    run.model.forward = lambda ids, *rest: inputs.append(ids.shape) or forward(ids, *rest)
    run.train_step()
    run.evaluate()
    assert run.tokens_per_step == 25 and inputs[0] == (5, 5)
    assert {shape[1] for shape in inputs[1:]} == {5, 4}  # 99 targets
    with pytest.raises(ValueError, match="context_length 9 is more than the 8"):
        trainer(make(np.float32), 1, context_length=9)
    with pytest.raises(ValueError, match="context_length must be an integer of at least 1, not 0"):
        TrainConfig(context_length=0)


# Copies, moves, files


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_frozen_too_and_learns_by_itself(duplicate):
    model = adapted()
    twin = duplicate(model)
    assert [p.trainable for p in twin.parameters()] == [p.trainable for p in model.parameters()]
    want = gradients(model)
    assert all(np.array_equal(grad, want[name]) for name, grad in gradients(twin).items())
    assert not any(
        np.shares_memory(p.value, q.value) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )


def test_on_a_device_it_computes_the_same_and_adapters_are_made_there():
    host, device = make(np.float32), make(np.float32).to(to_device)
    for model in (host, device):
        add_lora(model, 2, rng=1)
        for p in model.parameters():
            if p.trainable:
                p.value = p.value + 1
    moved = copy.deepcopy(host).to(to_device)
    assert moved.flat.grad is None
    loss, logits = CrossEntropy(), host(IDS)
    loss.forward(logits, TARGETS)
    host.backward(loss.backward())
    for model in (device, moved):
        model(to_device(IDS))
        model.backward(to_device(loss.backward()))
        for p, q in zip(model.parameters(), host.parameters(), strict=True):
            assert type(p.value) is StrictArray
            if p.trainable:
                assert np.array_equal(to_host(p.grad), q.grad)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of a model with adapters, the model, and its optimiser."""
    model = make(np.float32)
    add_lora(model, 2, 3.0, rng=1)
    run = trainer(model, 1)
    run.run()
    checkpoint.save(tmp_path / "it", model, run.optimizer)
    return tmp_path / "it", model, run.optimizer


def test_a_checkpoint_holds_the_merged_model_and_beside_it_what_training_goes_on_from(saved):
    folder, model, optimizer = saved
    checkpoint.check(folder)
    ordinary, _ = checkpoint.load(folder)
    want = merged_state(model)
    assert all(np.array_equal(value, want[name]) for name, value in ordinary.state_dict().items())
    again = make(np.float32)
    checkpoint.load_adapters(folder, again)
    assert all(np.array_equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
    assert {lora.scale for lora in loras(again).values()} == {1.5}
    restored = AdamW(again.parameters())
    checkpoint.load_optimizer(folder, restored)
    assert restored.t == 6
    assert all(np.array_equal(value, optimizer.state_dict()[name]) for name, value in restored.state_dict().items())


def test_adapters_are_refused_beside_another_model_than_theirs(saved, tmp_path):
    folder, model, _ = saved
    other = make(np.float32, rng=5)
    with pytest.raises(CheckpointError, match="trained beside another model"):
        checkpoint.load_adapters(folder, other)
    assert loras(other) == {} and other.flat.grad is not None
    checkpoint.save(tmp_path / "plain", other, AdamW(other.parameters()))
    with pytest.raises(CheckpointError, match="plain holds no adapters"):
        checkpoint.load_adapters(tmp_path / "plain", make(np.float32))
    state = {p.name: p.value.copy() for p in model.parameters() if p.trainable}
    before = model.state_dict()
    for wrong in ({}, {name: value[:1] for name, value in state.items()}, state | {"C": np.ones(1, np.float32)}):
        with pytest.raises(ValueError, match="adapters don't fit this model, which has 28"):
            load_adapter_state(model, wrong)
    assert all(np.array_equal(value, before[name]) for name, value in model.state_dict().items())
