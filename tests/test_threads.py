"""A batch shared by threads or processes: the gradients of one, the same bits at every run; errors come out."""

import functools
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from numpygpt import forks, threads
from numpygpt.config import TransformerConfig
from numpygpt.forks import Forks, WorkerLost
from numpygpt.layers.feedforward import GLU
from numpygpt.layers.norm import RMSNorm
from numpygpt.model import TransformerLM
from numpygpt.module import Parameter
from numpygpt.replica import Replica, SharedGradient, Turns
from numpygpt.threads import BrokenOff, Threads, one_blas_thread, usable_cores
from numpygpt.train import TrainConfig, Trainer

TOKENS = np.random.default_rng(0).integers(0, 7, 300)
TEAMS = [Threads, pytest.param(Forks, marks=pytest.mark.skipif(not forks.pay(), reason="there are no forks here"))]


@pytest.fixture(params=TEAMS)
def team(request, monkeypatch):
    """Let trainers use the one kind of team or the other."""
    monkeypatch.setattr(forks, "pay", lambda: request.param is Forks)
    return request.param


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


class Worker:
    """One of a team, for a test."""

    def __init__(self, number, barrier=None, failing=()):
        self.number, self.barrier, self.failing, self.calls = number, barrier, failing, 0

    def meet(self, x):
        self.barrier.wait(timeout=30)  # passed by all at once, or by none
        return self.number, x, self.where()

    def work(self):
        if self.number in self.failing:
            raise ValueError(f"no {self.number}")
        time.sleep(0.05)
        raise BrokenOff  # as one that waited for the failing ones: never the error that comes out

    def count(self):
        self.calls += 1
        return self.calls

    def be_picky(self):
        if self.number:
            raise Picky("this", "that")

    def where(self):
        return os.getpid(), threading.get_ident(), blas_threads()


def start(kind, workers):
    team = kind()
    team.start(workers)
    return team


@pytest.mark.parametrize("kind", TEAMS)
def test_each_worker_works_at_once_with_the_others_and_answers_in_order(kind):
    barrier = multiprocessing.get_context("fork").Barrier(3) if kind is Forks else threading.Barrier(3)
    team = start(kind, [Worker(i, barrier) for i in range(3)])
    for x in range(3):
        answers = team.call("meet", [(x,), (x + 1,), (x + 2,)])
        assert [answer[:2] for answer in answers] == [(0, x), (1, x + 1), (2, x + 2)]
    places = [place for *_, place in answers]
    assert places[0][:2] == (os.getpid(), threading.get_ident())
    assert len({place[:2] for place in places}) == 3
    assert all(blas <= {1} for *_, blas in places)


@pytest.mark.parametrize("kind", TEAMS)
def test_fewer_parts_than_workers_go_to_the_first(kind):
    team = start(kind, [Worker(i) for i in range(3)])
    assert [team.call("count", [()] * n) for n in (1, 3, 2)] == [[1], [2, 1, 1], [3, 2]]


@pytest.mark.parametrize("kind", TEAMS)
@pytest.mark.parametrize("failing", [{0}, {2}, {1, 2}])
def test_an_error_of_a_worker_comes_out_when_all_have_ended(kind, failing):
    team = start(kind, [Worker(i, failing=failing) for i in range(3)])
    for _ in range(2):  # and the team is as good as before
        with pytest.raises(ValueError, match=f"no {min(failing)}"):
            team.call("work", [()] * 3)
    assert team.call("count", [()] * 3) == [1] * 3


class Picky(Exception):
    """An error that can't be made again from its own arguments."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@pytest.mark.skipif(not forks.pay(), reason="there are no forks here")
def test_an_error_in_a_process_keeps_its_traceback_in_a_note_and_one_that_cannot_travel_its_name():
    team = start(Forks, [Worker(0, failing={1}), Worker(1, failing={1})])
    with pytest.raises(ValueError, match="no 1") as caught:
        team.call("work", [()] * 2)
    assert "in work" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="Picky: this and that") as caught:
        team.call("be_picky", [()] * 2)
    assert "in be_picky" in caught.value.__notes__[0]


@pytest.mark.skipif(not forks.pay(), reason="there are no forks here")
def test_a_process_that_is_ended_from_outside_is_said_to_be_gone():
    team = start(Forks, [Worker(0), Worker(1)])
    pid = team.call("where", [()] * 2)[1][0]
    os.kill(pid, signal.SIGTERM)  # which it leaves to the first process
    assert team.call("where", [()] * 2)[1][0] == pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="ended from outside"):
        team.call("count", [()] * 2)
    with pytest.raises(WorkerLost, match="make a new trainer"):
        team.call("count", [()] * 2)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(not forks.pay(), reason="there are no forks here")
def test_the_processes_end_with_their_team():
    team = start(Forks, [Worker(0), Worker(1), Worker(2)])
    pids = [pid for pid, *_ in team.call("where", [()] * 3)][1:]
    assert all(map(alive, pids))
    del team
    gc.collect()
    assert not any(map(alive, pids))


HOLDER = """
import os, time
from numpygpt.forks import Forks
class Worker:
    def pid(self): return os.getpid()
    def sleep(self): time.sleep(60)
teams = [Forks(), Forks()]
for team in teams: team.start([Worker(), Worker()])
print(*(team.call("pid", [()] * 2)[1] for team in teams), flush=True)
{end}
"""


@pytest.mark.skipif(not forks.pay(), reason="there are no forks here")
@pytest.mark.parametrize("end", ["", "raise KeyError", "os.kill(os.getpid(), 9)", "os._exit(3)"])
def test_the_processes_end_with_the_first_however_it_ends(end):
    program = subprocess.run([sys.executable, "-c", HOLDER.format(end=end)], capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in program.stdout.split()]  # all there is: the pipe of the output is closed by all
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, pids))


@pytest.mark.skipif(not forks.pay(), reason="there are no forks here")
def test_a_call_that_is_given_up_ends_the_team(monkeypatch):
    team = start(Forks, [Worker(0), Worker(1)])

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(forks, "_try", interrupt)  # as if Ctrl-C came between two lines
        with pytest.raises(KeyboardInterrupt):
            team.call("count", [()] * 2)
    with pytest.raises(WorkerLost, match="make a new trainer"):
        team.call("count", [()] * 2)


@pytest.mark.skipif(not forks.pay(), reason="there are no forks here")
def test_shared_memory_is_one_in_all_processes_and_other_memory_is_not():
    class Writer:
        def __init__(self, ours, own):
            self.ours, self.own = ours, own

        def write(self, i):
            self.ours[i] = self.own[i] = i

    given = np.full((2, 2), 7, np.float32)
    ours, own = forks.shared(given), given.copy()
    assert ours.dtype == np.float32 and np.array_equal(ours, given)
    start(Forks, [Writer(ours, own), Writer(ours, own)]).call("write", [(0,), (1,)])
    assert ours.tolist() == [[0, 0], [1, 1]]
    assert own.tolist() == [[0, 0], [7, 7]]
    assert forks.shared(np.zeros((0, 3))).shape == (0, 3)


def blas_threads():
    """Return the threads of NumPy's BLAS (what another library brings along later is none of our business)."""
    return {library["num_threads"] for library in threads._controller().info() if library["user_api"] == "blas"}


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


@pytest.fixture
def turns(monkeypatch):
    """Of 3 replicas at two parameters, the first of one block, the second of two rows and of one."""
    monkeypatch.setattr("numpygpt.module.BLOCK", 2)
    parameters = [Parameter(np.zeros(2)), Parameter(np.zeros(3))]
    assert parameters[1].blocks() == [slice(0, 2), slice(2, 3)]
    return Turns(parameters, 3, Threads())


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_replicas_have_their_turns_at_each_parameter_in_order(turns, replicas):
    order = []
    turns.begin(replicas)

    def take(number):
        for parameter, blocks in ((1, 1), (1, 1), (0, 1), (1, 2)):  # the last, of a tied one, is for both its blocks
            with turns.turn(parameter, number, blocks):
                order.append((parameter, blocks, number))

    in_threads(*(functools.partial(take, number) for number in range(replicas)))
    assert [n for p, _, n in order if p == 0] == [*range(replicas)]
    assert [n for p, blocks, n in order if (p, blocks) == (1, 2)] == [*range(replicas)]
    ones = [n for p, blocks, n in order if (p, blocks) == (1, 1)]
    for k in range(len(ones)):  # nobody at a block that the one before hasn't left
        counts = [ones[: k + 1].count(n) for n in range(replicas)]
        assert counts == sorted(counts, reverse=True)
    assert all(order.index((1, 2, n)) > i for n in range(replicas) for i, o in enumerate(order) if o == (1, 1, n))
    if replicas > 1:  # a second use comes after everybody's first
        last_first_use = max(i for i, o in enumerate(order) if o == (1, 1, replicas - 1))
        assert order.index((1, 2, 0)) > last_first_use


def test_nobody_waits_in_a_round_of_none(turns):
    turns.begin(0)

    def take():
        with turns.turn(1, 2, 2):
            pass

    in_threads(take)


def test_one_that_waits_in_a_round_broken_off_is_told_and_the_next_round_is_a_new_one(turns):
    told = []
    turns.begin(3)

    def wait():
        with pytest.raises(BrokenOff), turns.turn(0, 2, 1):
            pass
        told.append(True)

    with turns.turn(0, 0, 1), turns.turn(1, 0, 1):
        pass  # and replica 1 never comes
    in_threads(functools.partial(turns.broken.fill, True), wait)
    assert told == [True]
    turns.mend()
    assert not turns.broken[0]
    passed = [[sum(gate.acquire(timeout=0) for _ in range(5)) for gate in gates] for gates in turns.gates]
    assert passed == [[1, 0, 0], [2, 0, 0]]


@pytest.mark.parametrize("rows", [None, np.array([2, 0])])
def test_what_replicas_add_to_a_shared_gradient_is_added_in_turn(turns, rows):
    grad = np.zeros(3)
    turns.begin(2)

    def add(number):
        shared = SharedGradient(grad, turns, 1, number)
        for x in ([1e20, -1e20], [1.0, 1.0])[number]:
            if rows is None:
                shared += np.full(3, x)
            else:
                shared[rows] += np.full(2, x)

    in_threads(functools.partial(add, 0), functools.partial(add, 1))
    assert grad.tolist() == ([1, 1, 1] if rows is None else [1, 0, 1])  # the first 1 is lost beside 1e20


def test_a_block_may_be_added_while_the_replica_before_is_at_the_next(turns):
    grad = np.zeros(3)
    turns.begin(2)
    first, second = (SharedGradient(grad, turns, 1, number) for number in (0, 1))
    first[slice(0, 2)] += np.full(2, 1.0)
    in_threads(lambda: second.add(slice(0, 2), np.full(2, 10.0), 1))
    first[slice(2, 3)] += np.full(1, 1.0)
    second[slice(2, 3)] += np.full(1, 10.0)
    assert grad.tolist() == [11, 11, 11]


@pytest.mark.parametrize(
    "uses", ["whole", "blocks", "rows", "a block", "none", "blocks, then rows", "rows, then whole"]
)
def test_what_is_old_in_a_gradient_is_forgotten_when_the_first_adds(turns, uses):
    grad, expected = np.full(3, 7.0), np.zeros(3)
    turns.begin(1)
    shared = SharedGradient(grad, turns, 1, 0)
    shared.fresh = 0
    for use in uses.split(", then "):
        if use == "whole":
            shared += np.full(3, 1.0)
            expected += 1
        elif use == "rows":
            shared[np.array([2, 0])] += np.full(2, 1.0)
            expected[[2, 0]] += 1
        elif use != "none":
            for rows in [slice(0, 2), slice(2, 3)][: 2 if use == "blocks" else 1]:
                shared[rows] += np.full(rows.stop - rows.start, 1.0)
                expected[rows] += 1
    shared.finish()
    assert np.array_equal(grad, expected)


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
def test_gradients_are_those_of_one_thread(team, rows, count, config):
    accumulate = {"batch_size": rows, "accumulate": min(rows, 2)}
    one, many = (make_trainer(n, train=accumulate, **config) for n in (1, count))
    for seed in range(2):  # the second adds to the first
        losses = [trainer.add_gradients(*batch(rows, seed)) for trainer in (one, many)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-12)
        np.testing.assert_allclose(many.model.flat.grad, one.model.flat.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("config", [{}, {"tie_embeddings": True, "positions": "learned"}])
def test_a_step_forgets_the_gradients_before_it_also_in_many_blocks(team, config, monkeypatch):
    monkeypatch.setattr("numpygpt.module.BLOCK", 40)
    one, many = (make_trainer(n, **config) for n in (1, 3))
    assert len(many.model.lm_head.weight.blocks()) == 4
    for seed in range(3):
        for trainer in (one, many):
            trainer.replicas.zero_grad()
            trainer.add_gradients(*batch(5, seed))
        np.testing.assert_allclose(many.model.flat.grad, one.model.flat.grad, rtol=1e-9, atol=1e-12)


def test_a_gradient_that_nothing_is_added_to_is_zero(team, monkeypatch):
    monkeypatch.setattr(RMSNorm, "backward", lambda self, dy: dy)
    trainer = make_trainer(2)
    trainer.model.flat.grad[...] = 7
    trainer.replicas.zero_grad()
    trainer.add_gradients(*batch(5))
    zero = {p.name for p in trainer.model.parameters() if not p.grad.any()}
    assert zero == {p.name for p in trainer.model.parameters() if not p.decays}


@pytest.mark.parametrize("count", [2, 3])
def test_the_same_number_of_threads_gives_the_same_bits(team, count):
    runs = [make_trainer(count, np.float32, dropout=0.3, tie_embeddings=True) for _ in range(3)]
    losses = {trainer.run() for trainer in runs}
    assert len(losses) == 1
    assert len({trainer.model.flat.value.tobytes() for trainer in runs}) == 1


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_thread_that_is_late_changes_nothing(team, late, monkeypatch):
    prompt = make_trainer(3, np.float32)
    prompt.add_gradients(*batch(5))
    train = Replica.add_gradients

    def slow(self, *args):
        time.sleep(0.25 * (self.number == late))  # longer than the others' patience
        return train(self, *args)

    monkeypatch.setattr(Replica, "add_gradients", slow)
    other = make_trainer(3, np.float32)
    other.add_gradients(*batch(5))
    assert np.array_equal(prompt.model.flat.grad, other.model.flat.grad)


def test_replicas_share_weights_tables_and_gradient(team):
    trainer = make_trainer(2)
    model, replicas = trainer.model, trainer.replicas.models
    for replica in replicas:
        assert replica is not model
        assert np.shares_memory(replica.flat.value, model.flat.value)
        assert np.shares_memory(replica.flat.grad, model.flat.grad)
        assert replica.layers[0].attn.q_rope.turn is model.layers[0].attn.q_rope.turn
    trainer.add_gradients(*batch(2))
    assert not any("saved" in vars(module) for module in [*model.modules(), trainer.loss])


def test_replicas_drop_other_features(monkeypatch):
    monkeypatch.setattr(forks, "pay", lambda: False)  # to see what each has drawn
    trainer = make_trainer(2, dropout=0.5)
    trainer.add_gradients(*batch(2))
    masks = [[m.saved for m in replica.modules() if hasattr(m, "p")] for replica in trainer.replicas.models]
    assert len(masks[0]) == 5
    assert not any(np.array_equal(a, b) for a, b in zip(*masks, strict=True))


def test_threads_and_processes_give_the_same_bits(monkeypatch):
    weights = []
    for pay in {False, forks.pay()}:
        monkeypatch.setattr(forks, "pay", lambda pay=pay: pay)
        trainer = make_trainer(3, np.float32, dropout=0.3, tie_embeddings=True)
        trainer.run()
        weights.append(trainer.model.flat.value.tobytes())
    assert len(set(weights)) == 1


def test_one_replica_is_the_model_itself():
    trainer = make_trainer(1)
    assert trainer.replicas.models == [trainer.model]


def test_a_failing_thread_lets_the_others_go_and_the_next_step_is_whole(team, monkeypatch):
    whole = make_trainer(3)
    backward = GLU.backward

    def fail(self, dy):
        if dy.shape[0] == 1:  # the last of three parts of five sequences
            raise RuntimeError("out of paper")
        return backward(self, dy)

    monkeypatch.setattr(GLU, "backward", fail)
    trainer = make_trainer(3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of paper"):
            trainer.add_gradients(*batch(5))
    for each in (trainer, whole):
        each.optimizer.zero_grad()
        each.add_gradients(*batch(6))  # of which no part is of one sequence
    assert np.array_equal(trainer.model.flat.grad, whole.model.flat.grad)


KILLED = """
import os, sys, time
import numpy as np
from numpygpt.config import TransformerConfig
from numpygpt.layers.linear import Linear
from numpygpt.model import TransformerLM
from numpygpt.replica import Replica
from numpygpt.train import TrainConfig, Trainer

first, plain = os.getpid(), Linear.backward

def backward(self, dy):  # of a step's first gradient, for which the others wait: the first too, as it is a tied one
    if (os.getpid() == first) == (sys.argv[1] == "first"):
        time.sleep(0.5)
        os.kill(os.getpid(), 9)
    return plain(self, dy)

Linear.backward = backward
Replica.pid = lambda self: os.getpid()
config = TransformerConfig(7, 8, 16, 2, 2, tie_embeddings=True)
trainer = Trainer(TransformerLM(config, rng=0), np.arange(200) % 7, np.arange(80) % 7, TrainConfig(), threads=3)
print(*trainer.replicas.call("pid", [()] * 3), flush=True)
trainer.train_step()
"""


@pytest.mark.skipif(not forks.pay(), reason="there are no forks here")
@pytest.mark.parametrize("victim", ["first", "others"])
def test_nobody_waits_for_a_turn_that_a_killed_process_will_never_give(victim):
    program = subprocess.run([sys.executable, "-c", KILLED, victim], capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in program.stdout.split()]
    assert len(pids) == 3
    assert program.returncode == (-signal.SIGKILL if victim == "first" else 1)
    assert victim == "first" or "ended from outside" in program.stderr
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, pids))


def test_the_validation_loss_is_that_of_one_thread(team):
    losses = [make_trainer(count, dropout=0.4).evaluate() for count in (1, 3)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def test_two_models_train_at_once_in_one_process(team):
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
