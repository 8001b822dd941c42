import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from strict_array import to_device

from numpygpt.config import TransformerConfig
from numpygpt.data import sequential_batches
from numpygpt.layers import CrossEntropy
from numpygpt.model import TransformerLM
from numpygpt.progress import progress_bar
from numpygpt.train import TrainConfig, Trainer

ROOT = Path(__file__).parents[1]
TOKENS = np.tile(np.arange(7), 40)  # each token tells the next


def make_trainer(dropout=0.0, threads=1, **options):
    config = TransformerConfig(vocab_size=7, context_length=8, d_model=16, num_layers=2, num_heads=2, dropout=dropout)
    train_config = TrainConfig(**{"steps": 30, "batch_size": 4, "lr": 1e-2, **options})
    return Trainer(TransformerLM(config, rng=0), TOKENS[:200], TOKENS[200:], train_config, threads)


def test_training_learns_what_can_be_learned():
    trainer = make_trainer(steps=60)
    before = trainer.evaluate()
    assert trainer.run() < 0.1 < 1.5 < before
    assert trainer.step == 60


def test_the_same_seed_gives_the_same_bits():
    one, other = make_trainer(dropout=0.2), make_trainer(dropout=0.2)
    assert one.run() == other.run()
    assert np.array_equal(one.model.flat.value, other.model.flat.value)
    assert make_trainer(dropout=0.2, seed=1).run() != one.evaluate()


def test_evaluation_is_the_mean_over_every_token_and_leaves_the_mode():
    trainer = make_trainer(dropout=0.5, batch_size=3)
    trainer.model.train()
    loss = trainer.evaluate()
    assert trainer.model.training
    losses = []
    trainer.model.eval()
    for inputs, targets in sequential_batches(trainer.validation_tokens, 1, 8):
        for t in range(targets.shape[1]):
            logits = trainer.model.forward(inputs[:, : t + 1])[:, -1]
            losses.append(CrossEntropy().forward(logits, targets[:, t]))
    assert len(losses) == trainer.validation_tokens.size - 1
    assert loss == pytest.approx(np.mean(losses), abs=1e-5)


def test_the_loss_reported_is_that_before_the_update():
    trainer = make_trainer()
    untouched = TransformerLM(trainer.model.config, rng=0)
    loss = trainer.train_step()["loss"]
    rng = np.random.default_rng(trainer.config.seed)
    starts = rng.integers(200 - 8, size=4)
    windows = TOKENS[starts[:, None] + np.arange(9)]
    assert loss == CrossEntropy().forward(untouched.forward(windows[:, :-1]), windows[:, 1:])


def test_ctrl_c_ends_the_run_after_the_step_under_way():
    trainer = make_trainer()
    step = trainer.train_step

    def step_and_interrupt():
        if trainer.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    trainer.train_step = step_and_interrupt
    handler = signal.getsignal(signal.SIGINT)
    assert trainer.run() is None
    assert trainer.step == 5
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_step_that_is_not_finite_stops_the_run_and_changes_nothing():
    trainer = make_trainer()
    trainer.train_step()
    weights = trainer.model.flat.value.copy()
    backward = trainer.model.backward

    def poisoned(dlogits):
        backward(dlogits)
        trainer.model.lm_head.weight.grad[2, 3] = np.nan

    trainer.model.backward = poisoned
    with pytest.raises(FloatingPointError, match=r"in step 2 the gradient of lm_head\.weight"):
        trainer.run()
    assert trainer.step == 1
    assert np.array_equal(trainer.model.flat.value, weights)


def test_a_short_run_has_a_whole_schedule():
    for steps in (1, 5, 300, 2000):
        config = TrainConfig(steps=steps)
        rates = [config.learning_rate(step) for step in range(steps + 1)]
        assert 0 < rates[0] <= max(rates) == config.lr
        assert rates[-1] == pytest.approx(config.lr / 10)
    assert np.argmax([TrainConfig(steps=2000).learning_rate(step) for step in range(2000)]) == 99
    assert np.argmax([TrainConfig(steps=300).learning_rate(step) for step in range(300)]) == 29


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(TrainConfig)])
def test_a_bad_setting_is_named(field, unchecked):
    with pytest.raises(ValueError, match=field):
        TrainConfig(**{field: -1})


@pytest.mark.parametrize("field", ["steps", "batch_size", "eval_interval", "seed", "warmup_steps"])
def test_a_fraction_of_a_step_is_refused(field, unchecked):
    with pytest.raises(ValueError, match=rf"{field}.*1\.5"):
        TrainConfig(**{field: 1.5})


def test_an_evaluation_that_is_told_to_stop_gives_no_loss():
    trainer = make_trainer()
    assert trainer.evaluate(stop=lambda: True) is None


def test_each_evaluation_is_reported_before_the_run_goes_on():
    trainer, seen = make_trainer(eval_interval=10), []
    final = trainer.run(after_evaluation=lambda loss: seen.append((trainer.step, loss)))
    assert [step for step, _ in seen] == [10, 20, 30]
    assert seen[-1][1] == final


def test_a_warmup_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match="warmup_steps 11"):
        TrainConfig(steps=10, warmup_steps=11)


def test_a_progress_bar_writes_seldom_where_the_output_is_no_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert progress_bar(3, file=Terminal()).mininterval < 1  # second
    assert progress_bar(3, file=io.StringIO()).mininterval == 10


@pytest.mark.parametrize(
    "layer", ["token_embeddings", "layers.0.attn.v_proj", "layers.1.ffn.w2", "ln_final", "lm_head"]
)
@pytest.mark.parametrize(("dropout", "threads"), [(0.0, 1), (0.3, 1), (0.3, 3)])
@pytest.mark.filterwarnings("error")
def test_a_loss_that_is_not_finite_names_the_first_layer_whose_output_is_not(layer, dropout, threads):
    trainer = make_trainer(dropout, threads)
    trainer.train_step()
    dict(trainer.model.named_parameters())[f"{layer}.weight"].value[...] = np.inf
    weights = trainer.model.flat.value.copy()
    with pytest.raises(FloatingPointError, match=rf"in step 2 the output of {layer} is not finite"):
        trainer.train_step()
    assert np.array_equal(trainer.model.flat.value, weights)
    with pytest.raises(FloatingPointError, match=rf"after step 1 is .*: the output of {layer} is not finite"):
        trainer.evaluate()
    modules = [module for model in trainer.replicas.models for module in model.modules()]
    assert not any({"forward", "backward"} & vars(module).keys() for module in modules)


def test_a_gradient_that_is_not_finite_is_named_where_backward_met_it_first():
    trainer = make_trainer()
    w2 = trainer.model.layers[1].ffn.w2
    backward = w2.backward
    w2.backward = lambda dy: backward(dy * np.float32(np.nan))  # from here on every gradient is
    with pytest.raises(FloatingPointError, match=r"in step 1 the gradient of layers\.1\.ffn\.w2\.weight"):
        trainer.run()


@pytest.mark.parametrize("ignore", [None, 0])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_wrong_target_changes_neither_weights_nor_optimizer_and_the_next_step_is_as_ever(threads, ignore):
    trainer, untroubled = (make_trainer(threads=threads, accumulate=2) for _ in range(2))
    trainer.loss, untroubled.loss = (CrossEntropy(ignore_index=ignore) for _ in range(2))
    inputs, targets = np.arange(32).reshape(4, 8) % 7, np.arange(1, 33).reshape(4, 8) % 7
    wrong = targets.copy()
    wrong[3, 7] = 7
    with pytest.raises(IndexError, match=r"target 7 is outside 0\.\.6"):
        trainer.update(inputs, wrong)
    assert (trainer.step, trainer.optimizer.t) == (0, 0)
    assert np.array_equal(trainer.model.flat.value, untroubled.model.flat.value)
    assert not any(moments.any() for moments in (*trainer.optimizer.m, *trainer.optimizer.v))
    assert trainer.update(inputs, targets) == untroubled.update(inputs, targets)
    assert np.array_equal(trainer.model.flat.value, untroubled.model.flat.value)


def gradients(accumulate, dropout=0.0, ignore=None):
    trainer = make_trainer(dropout, batch_size=5, accumulate=accumulate)
    inputs, targets = np.arange(40).reshape(5, 8) % 7, np.arange(1, 41).reshape(5, 8) % 7
    if ignore is not None:
        trainer.loss = CrossEntropy(ignore_index=ignore)
        targets[0, :] = targets[1, 2:] = targets[2, 0] = ignore  # no two parts count as many
    trainer.model.zero_grad()
    return trainer.add_gradients(inputs, targets), trainer.model.flat.grad


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("ignore", [None, -1])
@pytest.mark.parametrize("accumulate", [2, 3, 5])
def test_a_batch_in_parts_has_the_loss_and_gradients_of_the_whole(accumulate, dropout, ignore):
    whole_loss, whole = gradients(1, dropout, ignore)
    loss, parts = gradients(accumulate, dropout, ignore)
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("counted", [0, 1, 16])
def test_loss_and_gradients_of_a_batch_are_those_of_the_model_also_if_no_token_counts(counted):
    trainer, direct, loss = make_trainer(), make_trainer().model, CrossEntropy(ignore_index=-1)
    trainer.loss = CrossEntropy(ignore_index=-1)
    inputs, targets = TOKENS[:16].reshape(2, 8), np.full(16, -1)
    targets[:counted] = 3
    targets = targets.reshape(2, 8)
    want = loss.forward(direct.forward(inputs), targets)
    direct.backward(loss.backward())
    assert trainer.add_gradients(inputs, targets) == pytest.approx(want)
    np.testing.assert_allclose(trainer.model.flat.grad, direct.flat.grad, rtol=1e-5)
    assert direct.flat.grad.any() == bool(counted)


def test_a_batch_goes_to_where_the_model_is():
    host, trainer = make_trainer(), make_trainer()
    model = trainer.model.to(to_device)
    device = Trainer(model, trainer.train_tokens, trainer.validation_tokens, trainer.config)
    assert device.train_step() == host.train_step()
    assert device.evaluate() == host.evaluate()


def test_a_loss_that_is_not_finite_is_refused_and_its_gradient_is_forgotten():
    trainer, other, batch = make_trainer(), make_trainer(), (TOKENS[None, :8], TOKENS[None, 1:9])
    gain = trainer.model.ln_final.weight.value
    gain[...] = np.inf
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        trainer.add_gradients(*batch)
    gain[...] = 1
    assert trainer.update(*batch) == other.update(*batch)
    assert trainer.model.flat.value.tobytes() == other.model.flat.value.tobytes()


def test_more_parts_than_sequences_are_refused():
    with pytest.raises(ValueError, match=r"accumulate 5 .*batch_size 4"):
        TrainConfig(batch_size=4, accumulate=5)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_run_gone_on_with_takes_the_same_steps(threads):
    options = {"steps": 20, "dropout": 0.2, "accumulate": 2, "eval_interval": 5, "threads": threads}
    whole, first, second = (make_trainer(**options) for _ in range(3))
    rows = {whole: [], first: [], second: []}
    whole.run(after_step=rows[whole].append)
    for _ in range(10):
        rows[first].append({"step": first.step + 1, **first.train_step()})
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.run(after_step=rows[second].append)
    assert np.array_equal(second.model.flat.value, whole.model.flat.value)
    for name, moment in whole.optimizer.state_dict().items():
        assert np.array_equal(second.optimizer.state_dict()[name], moment)
    assert second.state_dict()["generators"] == whole.state_dict()["generators"]
    same = ("step", "loss", "lr", "grad_norm")
    assert [[row[k] for k in same] for row in rows[first] + rows[second]] == [[r[k] for k in same] for r in rows[whole]]


def test_a_state_that_does_not_fit_is_refused():
    trainer, deeper = make_trainer(), make_trainer()
    state = deeper.state_dict()
    state["generators"]["layers.7.dropout1"] = state["generators"]["batches"]
    with pytest.raises(ValueError, match=r"layers\.7\.dropout1"):
        trainer.load_state_dict(state)
    with pytest.raises(ValueError, match=r"step 3.*has made 0"):
        trainer.load_state_dict({**make_trainer().state_dict(), "step": 3})
    with pytest.raises(ValueError, match=r"lacks \['best_step', 'unevaluated'\].*another version"):
        trainer.load_state_dict({key: make_trainer().state_dict()[key] for key in ("step", "best_loss", "generators")})


def test_each_step_is_reported_with_its_metrics():
    trainer, rows = make_trainer(steps=4, eval_interval=2), []
    final = trainer.run(after_step=rows.append)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    names = ["step", "loss", "lr", "grad_norm", "tokens_per_s"]
    assert [list(row) for row in rows] == [names, [*names, "validation_loss"]] * 2
    assert rows[-1]["validation_loss"] == final
    assert trainer.best_loss == min(rows[1]["validation_loss"], final)
    assert all(row["grad_norm"] > 0 and row["tokens_per_s"] > 0 for row in rows)


def test_a_run_of_some_minutes_ends_with_an_evaluation():
    trainer, evaluated = make_trainer(steps=10**6, eval_interval=10**6), []
    loss = trainer.run(after_evaluation=evaluated.append, minutes=0.3 / 60)
    assert 0 < trainer.step < 10**6
    assert evaluated == [loss]


def test_an_evaluation_that_was_broken_off_is_made_when_the_run_goes_on():
    options = {"steps": 20, "eval_interval": 10}
    whole, first, second = (make_trainer(**options) for _ in range(3))
    rows = {trainer: [] for trainer in (whole, first, second)}
    losses = []
    whole.run(rows[whole].append, losses.append)
    evaluate = first.evaluate
    first.evaluate = lambda stop: evaluate(lambda: True)  # as after Ctrl-C
    assert first.run(rows[first].append, losses.append) is None
    assert (first.step, first.reported, len(losses)) == (10, 9, 2)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.run(rows[second].append, losses.append) == losses[1]
    assert losses[2:] == losses[:2]
    assert (second.best_loss, second.best_step) == (whole.best_loss, whole.best_step)
    values = [
        [[v for k, v in row.items() if k != "tokens_per_s"] for row in trainer_rows]
        for trainer_rows in (rows[whole], rows[first] + rows[second])
    ]
    assert values[0] == values[1]


def test_an_evaluation_keeps_no_arrays_and_leaves_a_pending_backward():
    trainer = make_trainer()
    kept = [module for module in [*trainer.model.modules(), trainer.loss] if "saved" in vars(module)]
    trainer.evaluate()
    assert kept == [module for module in [*trainer.model.modules(), trainer.loss] if "saved" in vars(module)] == []
    batch = TOKENS[None, :8], TOKENS[None, 1:9]

    def gradient(between):
        trainer.model.zero_grad()
        trainer.loss.forward(trainer.model.forward(batch[0]), batch[1])
        between()
        trainer.model.backward(trainer.loss.backward())
        return trainer.model.flat.grad.copy()

    assert np.array_equal(gradient(lambda: None), gradient(trainer.evaluate))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_memory_stays_flat_while_training_and_evaluating():
    """In a process of its own, where nothing else takes memory."""
    code = """
import mmap, numpy as np
from numpygpt.config import TransformerConfig
from numpygpt.model import TransformerLM
from numpygpt.train import TrainConfig, Trainer

config = TransformerConfig(vocab_size=7, context_length=8, d_model=16, num_layers=2, num_heads=2, dropout=0.1)
options = TrainConfig(steps=300, batch_size=4, accumulate=2, eval_interval=10)
trainer = Trainer(TransformerLM(config, rng=0), np.arange(200) % 7, np.arange(80) % 7, options, threads=2)

def measure(metrics):
    if metrics["step"] % 100 == 0:
        print("bytes", int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE)

trainer.run(after_step=measure)
"""
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    sizes = [int(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("bytes")]
    assert len(sizes) == 3
    assert max(sizes) - sizes[0] < 2e6  # one batch's activations, kept at each step, would be 9 MB a hundred steps
