"""A batch shared by threads: the gradients of one, the same bits at every run, and errors that come out."""

import functools
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

from numpygpt import threads
from numpygpt.config import TransformerConfig
from numpygpt.model import TransformerLM
from numpygpt.replica import SharedGradient, Turns
from numpygpt.threads import BrokenOff, Team, one_blas_thread, usable_cores
from numpygpt.train import TrainConfig, Trainer

TOKENS = np.random.default_rng(0).integers(0, 7, 300)


def make_trainer(count, dtype=np.float64, train=None, **config):
    sizes = {"vocab_size": 7, "context_length": 8, "d_model": 16, "num_layers": 2, "num_heads": 2}
    model = TransformerLM(TransformerConfig(**sizes, **config), dtype=dtype, rng=0)
    options = TrainConfig(**{"steps": 4, "batch_size": 5, "eval_interval": 2, **(train or {})})
    return Trainer(model, TOKENS[:200], TOKENS[200:], options, count)


def batch(rows, seed=0):
    ids = np.random.default_rng(seed).integers(0, 7, (rows, 9))
    return ids[:, :-1], ids[:, 1:]


# Threads


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "1000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
    ],
)
def test_the_cores_are_those_of_the_affinity_and_of_the_quota(files, cores, tmp_path, monkeypatch):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(threads, "CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert usable_cores() == cores


@given(st.integers(1, 5), st.integers(0, 12))
def test_work_that_is_shared_comes_back_in_order(size, items):
    assert Team(size).share(lambda i: i * i, list(range(items))) == [i * i for i in range(items)]


def test_each_part_has_a_thread_of_its_own():
    barrier = threading.Barrier(3)  # passed by three threads at once, or by none

    def work(i):
        barrier.wait(timeout=30)
        return i

    assert Team(3).map(work, range(3)) == [0, 1, 2]


@pytest.mark.parametrize("failing", [{0}, {2}, {1, 2}])
def test_an_error_in_a_thread_comes_out_when_all_have_ended(failing):
    ended = []

    def work(i):
        if i in failing:
            raise ValueError(f"no {i}")
        time.sleep(0.05)
        ended.append(i)
        raise BrokenOff  # as one that waited for the failing ones: never the error that comes out

    with pytest.raises(ValueError, match=f"no {min(failing)}"):
        Team(3).map(work, range(3))
    assert set(ended) == {0, 1, 2} - failing


def blas_threads():
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


def test_blas_has_one_thread_until_the_last_block_ends():
    before = blas_threads()
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with one_blas_thread():
            inside.set()
            leave.wait(timeout=30)

    other = threading.Thread(target=hold)
    with pytest.raises(KeyError), one_blas_thread():
        other.start()
        inside.wait(timeout=30)
        assert blas_threads() <= {1}
        raise KeyError
    assert blas_threads() <= {1}  # the other thread is still inside
    leave.set()
    other.join()
    assert blas_threads() == before


# Replicas


def in_threads(*functions):
    """Run each function in a thread, the last first, and see that all end."""
    runners = [threading.Thread(target=function, daemon=True) for function in functions[::-1]]
    for runner in runners:
        runner.start()
        time.sleep(0.01)  # those that have to wait are waiting now
    for runner in runners:
        runner.join(timeout=5)
        assert not runner.is_alive()


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_replicas_have_their_turns_in_order(replicas):
    turns, order = Turns(), []
    turns.begin(replicas)

    def take(number):
        for _ in range(2):
            turns.wait(number)
            order.append(number)
            turns.end()

    in_threads(*(functools.partial(take, number) for number in range(replicas)))
    assert order == [*range(replicas)] * 2


def test_nobody_waits_in_a_round_of_none():
    turns = Turns()
    turns.begin(0)
    in_threads(functools.partial(turns.wait, 0), functools.partial(turns.wait, 5))
    turns.end()


def test_one_that_waits_in_a_round_broken_off_is_told():
    turns, told = Turns(), []
    turns.begin(2)

    def wait():
        with pytest.raises(BrokenOff):
            turns.wait(1)
        told.append(True)

    in_threads(turns.break_off, wait)
    assert told == [True]
    turns.begin(1)
    turns.wait(0)  # the next round is a new one


@pytest.mark.parametrize("rows", [None, np.array([2, 0])])
def test_what_replicas_add_to_a_shared_gradient_is_added_in_turn(rows):
    turns, grad = Turns(), np.zeros(3)
    turns.begin(2)

    def add(number):
        shared = SharedGradient(grad, turns, number)
        for x in ([1e20, -1e20], [1.0, 1.0])[number]:
            if rows is None:
                shared += np.full(3, x)
            else:
                shared[rows] += np.full(2, x)

    in_threads(functools.partial(add, 0), functools.partial(add, 1))
    assert grad.tolist() == ([1, 1, 1] if rows is None else [1, 0, 1])  # the first 1 is lost beside 1e20


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tie_embeddings": True, "positions": "learned", "norm": "layernorm", "bias": True, "ffn": "gelu_tanh"},
        {"num_kv_heads": 1, "positions": "sinusoidal", "norm_position": "post"},
    ],
)
def test_gradients_are_those_of_one_thread(rows, count, config):
    accumulate = {"batch_size": rows, "accumulate": min(rows, 2)}
    one, many = (make_trainer(n, train=accumulate, **config) for n in (1, count))
    for seed in range(2):  # the second adds to the first
        losses = [trainer.add_gradients(*batch(rows, seed)) for trainer in (one, many)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-12)
        np.testing.assert_allclose(many.model.flat.grad, one.model.flat.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("count", [2, 3])
def test_the_same_number_of_threads_gives_the_same_bits(count):
    runs = [make_trainer(count, np.float32, dropout=0.3, tie_embeddings=True) for _ in range(3)]
    losses = {trainer.run() for trainer in runs}
    assert len(losses) == 1
    assert len({trainer.model.flat.value.tobytes() for trainer in runs}) == 1


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_thread_that_is_late_changes_nothing(late, monkeypatch):
    prompt, other = make_trainer(3, np.float32), make_trainer(3, np.float32)
    model = other.replicas.models[late]
    backward = model.backward

    def slow(dlogits):
        time.sleep(0.05)
        backward(dlogits)

    monkeypatch.setattr(model, "backward", slow)
    for trainer in (prompt, other):
        trainer.add_gradients(*batch(5))
    assert np.array_equal(prompt.model.flat.grad, other.model.flat.grad)


def test_replicas_share_weights_tables_and_gradient_and_drop_other_features():
    trainer = make_trainer(2, dropout=0.5)
    model, replicas = trainer.model, trainer.replicas.models
    for replica in replicas:
        assert replica is not model
        assert np.shares_memory(replica.flat.value, model.flat.value)
        assert np.shares_memory(replica.flat.grad, model.flat.grad)
        assert replica.layers[0].attn.q_rope.turn is model.layers[0].attn.q_rope.turn
    trainer.add_gradients(*batch(2))
    masks = [[m.saved for m in replica.modules() if hasattr(m, "p")] for replica in replicas]
    assert len(masks[0]) == 5
    assert not any(np.array_equal(a, b) for a, b in zip(*masks, strict=True))
    assert not any("saved" in vars(module) for module in [*model.modules(), trainer.loss])


def test_one_replica_is_the_model_itself():
    trainer = make_trainer(1)
    assert trainer.replicas.models == [trainer.model]


def test_a_failing_thread_lets_the_others_go_and_the_next_step_is_whole(monkeypatch):
    trainer, whole = make_trainer(3), make_trainer(3)
    with monkeypatch.context() as patch:

        def fail(dy):
            raise RuntimeError("out of paper")

        patch.setattr(trainer.replicas.models[1].layers[0].ffn, "backward", fail)
        with pytest.raises(RuntimeError, match="out of paper"):
            trainer.add_gradients(*batch(5))
    for each in (trainer, whole):
        each.optimizer.zero_grad()
        each.add_gradients(*batch(5))
    assert np.array_equal(trainer.model.flat.grad, whole.model.flat.grad)


def test_the_validation_loss_is_that_of_one_thread():
    losses = [make_trainer(count, dropout=0.4).evaluate() for count in (1, 3)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def test_two_models_train_at_once_in_one_process():
    alone, together = (
        [make_trainer(2, np.float32, dropout=0.1, train={"seed": seed}) for seed in range(2)] for _ in range(2)
    )
    for trainer in alone:
        trainer.run()
    runners = [threading.Thread(target=trainer.run) for trainer in together]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    for one, other in zip(alone, together, strict=True):
        assert other.step == 4
        assert np.array_equal(one.model.flat.value, other.model.flat.value)


def test_a_number_of_threads_that_makes_no_sense_is_refused():
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"threads must be an integer of at least 1, not {count}"):
            make_trainer(count)
