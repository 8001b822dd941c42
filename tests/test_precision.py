"""Mixed precision: products in halves and nothing else, a loss scale that shows nowhere, steps skipped by overflow."""

import json
import shutil
import threading
import types

import numpy as np
import pytest
from running import run
from strict_array import to_device
from test_device import CONFIGS, make_model

from numpygpt import forks, precision
from numpygpt.config import TransformerConfig
from numpygpt.einsum import einsum
from numpygpt.layers import CrossEntropy
from numpygpt.model import TransformerLM
from numpygpt.precision import LossScale, matmul, products_in
from numpygpt.train import Skipped, TrainConfig, Trainer

U = 2.0**-11  # the largest relative error of rounding to a half
TOKENS = np.tile(np.arange(7), 40)  # each token tells the next


def make_trainer(dtype="float16", threads=1, move=None, dropout=0.0, **options):
    config = TransformerConfig(vocab_size=7, context_length=8, d_model=16, num_layers=2, num_heads=2, dropout=dropout)
    model = TransformerLM(config, rng=0)
    train_config = TrainConfig(**{"steps": 30, "batch_size": 4, "lr": 1e-2, "dtype": dtype, **options})
    return Trainer(model.to(move) if move else model, TOKENS[:200], TOKENS[200:], train_config, threads)


def everything(trainer):
    """All that a step changes, but for the loss scale and the batches drawn."""
    arrays = [trainer.model.flat.value, *trainer.optimizer.m, *trainer.optimizer.v]
    return trainer.step, trainer.optimizer.t, *(array.tobytes() for array in arrays)


def halves(a, b):
    with products_in("float16"):
        return matmul(*(np.array(x, np.float32) for x in (a, b)))


# Products


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        ([1 + 2**-12, -1], [1, 1], 0),  # the first operand is rounded
        ([1, 1], [1 + 2**-12, -1], 0),  # the second
        ([1, 2**-12], [1, 1], 1),  # the sum
        ([2048, 1, 1], [1, 1, 1], 2050),  # but no part of it: 2048 + 1 would be 2048
        ([256, 256], [256, -255], 256),  # nor is one too large
        ([1, 1], [1 + 2**-10, -1], 2**-10),
        ([256], [256], np.inf),
        ([2**-25], [1], 0),
        ([2**-24], [1], 2**-24),
    ],
)
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@np.errstate(over="ignore")
def test_operands_and_result_are_rounded_and_sums_are_not(a, b, want, batch):
    y = halves(np.broadcast_to(a, (*batch, 2, len(a))), np.broadcast_to(np.transpose([b, b]), (*batch, len(b), 2)))
    assert y.dtype == np.float32
    assert y.tolist() == np.full((*batch, 2, 2), want).tolist()


@pytest.mark.parametrize(
    ("notation", "a", "b"),
    [
        ("...i,oi->...o", (3, 4, 40), (9, 40)),
        ("...o,...i->oi", (3, 4, 9), (3, 4, 40)),
        ("...td,...sd->...ts", (3, 4, 5, 30), (3, 4, 6, 30)),
        ("...ts,...se->...te", (3, 4, 5, 6), (3, 4, 6, 7)),
    ],
)
def test_a_contraction_is_the_exact_one_of_rounded_operands_to_rounding(notation, a, b):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in (a, b))
    with products_in("float16"):
        y = einsum(notation, a, b)
    rounded = [x.astype(np.float16).astype(float) for x in (a, b)]
    exact, largest = einsum(notation, *rounded), einsum(notation, *map(np.abs, rounded))
    assert y.dtype == np.float32
    assert np.array_equal(y, y.astype(np.float16))
    assert np.all(np.abs(y - exact) <= U * np.abs(exact) + 40 * 2.0**-24 * largest)  # 40 terms at most
    assert np.abs(y - einsum(notation, a, b)).max() > 1e-4


@pytest.mark.parametrize(
    ("notation", "dtypes"),
    [
        ("ik,kj->ij", (np.float64, np.float64)),
        ("ik,kj->ij", (np.float32, np.float64)),
        ("ik,kj->ij", (np.float64, np.float32)),
        ("...c,...c->...", (np.float32, np.float32)),
        ("...c,...c->c", (np.float32, np.float32)),
    ],
)
def test_what_is_no_product_of_float32_arrays_is_as_ever(notation, dtypes):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((4, 4)).astype(dtype) for dtype in dtypes)
    with products_in("float16"):
        y = einsum(notation, a, b)
    want = einsum(notation, a, b)
    assert y.dtype == want.dtype
    assert np.array_equal(y, want)


def test_on_a_device_halves_are_multiplied_as_they_are_and_on_the_host_as_float32(monkeypatch):
    seen = []
    spy = {"matmul": lambda a, b: seen.append({a.dtype, b.dtype}) or np.matmul(a, b)}
    monkeypatch.setattr(precision, "np", types.SimpleNamespace(**vars(np) | spy))
    x = np.ones((2, 2), np.float32)
    with products_in("float16"):
        assert matmul(x, x).dtype == matmul(to_device(x), to_device(x)).dtype == np.float32
    assert seen == [{np.dtype(np.float32)}, {np.dtype(np.float16)}]


def in_halves():
    return matmul(np.full((1, 1), 1 + 2**-12, np.float32), np.ones((1, 1), np.float32)).item() == 1


def test_products_are_in_halves_within_the_block_and_in_its_thread_alone():
    seen = []
    assert not in_halves()
    with pytest.raises(KeyError), products_in("float16"):
        assert in_halves()
        other = threading.Thread(target=lambda: seen.append(in_halves()))
        other.start()
        other.join()
        with products_in("float32"):
            assert not in_halves()
        assert in_halves()
        raise KeyError
    assert not in_halves()
    assert seen == [False]


def test_another_dtype_is_refused():
    for make in (lambda: products_in("float8").__enter__(), lambda: TrainConfig(dtype="float8")):
        with pytest.raises(ValueError, match="dtype must be float32 or float16, not 'float8'"):
            make()
    assert not in_halves()


# Gradients


def gradients(model, dtype, scale=1.0, weight=1.0):
    """The flat gradient of a batch's loss times `weight`, and how many products it takes."""
    rng, loss = np.random.default_rng(2), CrossEntropy(ignore_index=-1)
    ids, targets = rng.integers(0, 13, (3, 8)), rng.integers(-1, 13, (3, 8))
    model.zero_grad()
    with products_in(dtype), np.errstate(over="ignore", invalid="ignore"):
        loss.forward(model.forward(ids), targets)
        model.backward(loss.backward(scale * weight))
    return model.flat.grad / scale / weight


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_gradients_are_those_of_float32_to_the_rounding_of_products(options, monkeypatch):
    model, count, multiply = make_model(**options | {"dropout": 0.0}), [0], np.matmul
    want = gradients(model, "float32")

    def counting(*args):
        count[0] += 1
        return multiply(*args)

    monkeypatch.setattr(np, "matmul", counting)
    got = gradients(model, "float16", 2.0**8)
    assert got.dtype == np.float32
    all_products = 3 * count[0] * U  # each rounds two operands and a result; more than a chain of them all would add up
    for p in model.parameters():
        difference, norm = (np.linalg.norm(x[p.offset : p.offset + p.size]) for x in (got - want, want))
        assert difference <= all_products * norm + U * np.linalg.norm(want), p.name  # those of keys' biases are zero
    assert np.linalg.norm(got - want) > U / 2 * np.linalg.norm(want)


def test_small_gradients_vanish_in_halves_unless_the_loss_is_scaled():
    model, tiny = make_model(dropout=0.0), 1e-6  # as in a mean over a million times as many tokens
    want = gradients(model, "float32", 1.0, tiny)
    lost, kept = (
        np.linalg.norm(gradients(model, "float16", scale, tiny) - want) / np.linalg.norm(want)
        for scale in (1.0, 2.0**16)
    )
    assert kept < 20 * U
    assert lost > 0.5


# Training


def test_training_learns_what_can_be_learned_as_in_float32():
    half, single = (make_trainer(dtype, steps=60) for dtype in ("float16", "float32"))
    assert half.run() < 0.1
    assert half.evaluate() == pytest.approx(single.run(), rel=0.1)
    assert not np.array_equal(half.model.flat.value, single.model.flat.value)
    arrays = [half.model.flat.value, half.model.flat.grad, *half.optimizer.m, *half.optimizer.v]
    assert {array.dtype for array in arrays} == {np.dtype(np.float32)}


def test_norm_moments_and_loss_are_those_of_the_true_gradient():
    half, single = (make_trainer(dtype, grad_clip=0.5, accumulate=2) for dtype in ("float16", "float32"))
    metrics, want = half.train_step(), single.train_step()
    assert want["grad_norm"] > 0.5
    assert metrics["loss"] == pytest.approx(want["loss"], rel=10 * U)
    assert metrics["grad_norm"] == pytest.approx(want["grad_norm"], rel=20 * U)
    for moments in ("m", "v"):
        for got, true in zip(getattr(half.optimizer, moments), getattr(single.optimizer, moments), strict=True):
            assert np.linalg.norm(got - true) <= 40 * U * np.linalg.norm(true)
    assert half.evaluate() != single.evaluate() == pytest.approx(half.evaluate(), rel=10 * U)


def test_a_step_that_overflows_is_skipped_and_said(capfd):
    trainer, same_batches = make_trainer(threads=2), make_trainer("float32", threads=2)
    trainer.train_step()
    same_batches.train_step()
    trainer.loss_scale.value, before = 2.0**34, everything(trainer)
    with pytest.raises(Skipped, match="step 2 skipped: gradients overflow float16 at loss scale 17179869184; now 858"):
        trainer.update(TOKENS[None, :8], TOKENS[None, 1:9])
    assert everything(trainer) == before
    assert (trainer.loss_scale.value, trainer.loss_scale.skipped_steps) == (2.0**33, 1)
    assert capfd.readouterr().err == ""
    metrics = trainer.train_step()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"step 2 skipped: gradients overflow float16 at loss scale {2**33}; now {2**32}"
    assert trainer.step == trainer.optimizer.t == 2
    assert metrics["skipped_steps"] == 1 + len(lines) > 2
    assert metrics["loss_scale"] == trainer.loss_scale.value == 2.0 ** (34 - 1 - len(lines))
    for _ in lines:  # each had a batch of its own
        same_batches.train_step()
    assert same_batches.train_step() and same_batches.rng.bit_generator.state == trainer.rng.bit_generator.state


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_never_gets_finite_ends_the_run_and_is_named(dtype, capfd):
    trainer = make_trainer(dtype)
    w2 = trainer.model.layers[1].ffn.w2
    backward, before = w2.backward, everything(trainer)
    w2.backward = lambda dy: backward(dy * np.float32(np.nan))
    with pytest.raises(FloatingPointError, match=r"in step 1 the gradient of layers\.1\.ffn\.w2\.weight is not finite"):
        trainer.run()
    assert everything(trainer) == before
    assert trainer.loss_scale.value == 1
    assert capfd.readouterr().err.count("skipped: gradients overflow") == (16 if dtype == "float16" else 0)


def test_a_loss_that_is_not_finite_is_no_fault_of_the_scale():
    trainer = make_trainer()
    trainer.model.layers[0].ffn.w1.weight.value[...] = 1e5  # beyond the largest half
    with pytest.raises(FloatingPointError, match=r"in step 1 the output of layers\.0\.ffn\.w1 is not finite"):
        trainer.train_step()
    assert (trainer.loss_scale.value, trainer.loss_scale.skipped_steps) == (precision.START, 0)
    with pytest.raises(FloatingPointError, match=r"the validation loss .* layers\.0\.ffn\.w1"):
        trainer.evaluate()


def test_the_scale_is_doubled_after_good_steps_in_a_row(monkeypatch):
    monkeypatch.setattr(precision, "PATIENCE", 3)
    scale, seen = LossScale("float16"), []
    for made in (1, 1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 1):
        seen.append(np.log2(scale.value))
        scale.step_made() if made else scale.step_skipped()
    assert seen == [16, 16, 16, 17, 17, 17, 16, 16, 16, 15, 14, 14, 14, 15]
    assert scale.skipped_steps == 3
    assert scale.inverse() == 2.0**-15
    trainer, rows = make_trainer(steps=7), []
    trainer.loss_scale.value = 2.0**8
    trainer.run(after_step=rows.append)
    assert [row["loss_scale"] for row in rows] == [2.0**8] * 3 + [2.0**9] * 3 + [2.0**10]
    assert {row["skipped_steps"] for row in rows} == {0}
    single = make_trainer("float32", steps=7)
    single.run(after_step=rows.append)
    assert (single.loss_scale.value, "loss_scale" in rows[-1], "loss_scale" in single.state_dict()) == (1, False, False)


def test_a_run_gone_on_with_after_a_skip_takes_the_same_steps(monkeypatch):
    monkeypatch.setattr(precision, "PATIENCE", 2)  # so that the scale comes to where it overflows again and again
    monkeypatch.setattr(precision, "START", 2.0**24)
    options = {"steps": 24, "dropout": 0.2, "accumulate": 2}
    whole, first, second = (make_trainer(**options) for _ in range(3))
    rows = [whole.train_step() for _ in range(24)]
    assert rows[0]["skipped_steps"] < rows[9]["skipped_steps"] < rows[-1]["skipped_steps"]
    again = [first.train_step() for _ in range(10)]
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    again += [second.train_step() for _ in range(14)]
    assert again == rows
    assert everything(second) == everything(whole)
    assert second.state_dict() == whole.state_dict()


def test_threads_and_processes_give_the_same_bits(monkeypatch):
    runs = []
    for pay, dtype in [(False, "float16"), (forks.pay(), "float16"), (False, "float32")]:
        monkeypatch.setattr(forks, "pay", lambda pay=pay: pay)
        trainer = make_trainer(dtype, threads=2, dropout=0.3)
        metrics = [trainer.train_step() for _ in range(3)]
        runs.append(([row["loss"] for row in metrics], trainer.evaluate(), everything(trainer)))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0] == pytest.approx(runs[0][0], rel=0.01)
    alone = make_trainer(dropout=0.0)
    assert [alone.train_step()["loss"] for _ in range(3)] != runs[0][0] == pytest.approx(runs[0][0], rel=0.5)


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_on_a_device_the_bits_are_those_of_the_host(options):
    text, config = np.arange(60) * 5 % 13, TrainConfig(steps=3, batch_size=2, dtype="float16")
    models = [make_model(move, **options) for move in (lambda x: x, to_device)]
    host, device = (Trainer(model, text, text[:20], config, threads=1) for model in models)
    for _ in range(3):
        assert host.train_step() == device.train_step()
    assert host.evaluate() == device.evaluate()
    here, there = ([t.model.flat.value, *t.optimizer.m, *t.optimizer.v] for t in (host, device))
    assert [array.tobytes() for array in here] == [array.get().tobytes() for array in there]


# The script


def test_a_run_in_halves_lowers_the_loss_as_one_in_float32_and_goes_on_as_it_began(text, tmp_path):
    sizes = "--d-model 16 --num-layers 1 --num-heads 2 --context-length 16 --batch-size 4 --sample-length 0"
    flags = [*sizes.split(), "--corpus", text, "--steps", 60, "--eval-interval", 30]
    losses = {}
    for dtype in ("float16", "float32"):
        result = run("train_shakespeare.py", *flags, "--dtype", dtype, "--out", tmp_path / dtype)
        assert result.returncode == 0, result.stderr
        losses[dtype] = float(result.stdout.split("\nvalidation loss: ")[1].split("\n")[0])
    assert losses["float16"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["float32"] < 2.6
    out, log = tmp_path / "float16", tmp_path / "float16" / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(row["loss_scale"] >= 1 and row["skipped_steps"] >= 0 for row in rows)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
    shutil.rmtree(out / "step-00000060")
    refused = run("train_shakespeare.py", "--resume", "--dtype", "float32", "--out", out)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "--dtype is float16 in the run" in refused.stderr
    result = run("train_shakespeare.py", "--resume", "--out", out)
    assert result.returncode == 0, result.stderr
    again = [json.loads(line) for line in log.read_text().splitlines()]
    assert [{**row, "tokens_per_s": 0} for row in again] == [{**row, "tokens_per_s": 0} for row in rows]


def test_another_dtype_is_refused_in_one_line():
    result = run("train_shakespeare.py", "--dtype", "float8")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "--dtype" in result.stderr and "float8" in result.stderr and "float16" in result.stderr
