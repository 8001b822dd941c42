import dataclasses
import io
import os
import signal

import numpy as np
import pytest

from numpygpt.config import TransformerConfig
from numpygpt.data import sequential_batches
from numpygpt.layers import CrossEntropy
from numpygpt.model import TransformerLM
from numpygpt.train import TrainConfig, Trainer, progress_bar

TOKENS = np.tile(np.arange(7), 40)  # each token tells the next


def make_trainer(dropout=0.0, **options):
    config = TransformerConfig(vocab_size=7, context_length=8, d_model=16, num_layers=2, num_heads=2, dropout=dropout)
    train_config = TrainConfig(**{"steps": 30, "batch_size": 4, "lr": 1e-2, **options})
    return Trainer(TransformerLM(config, rng=0), TOKENS[:200], TOKENS[200:], train_config)


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
    loss = trainer.train_step()
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
    with pytest.raises(FloatingPointError, match=r"lm_head\.weight"):
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
def test_a_bad_setting_is_named(field):
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
