"""Several ranks train as one process does: the same losses and weights to rounding, whoever fails or stops."""

import contextlib
import subprocess
import sys
import threading

import numpy as np
import pytest
from thread_ranks import on_ranks

from numpygpt import ranks
from numpygpt.adapters import add_lora
from numpygpt.config import TransformerConfig
from numpygpt.data import random_batch
from numpygpt.layers.cross_entropy import CrossEntropy
from numpygpt.model import TransformerLM
from numpygpt.ranks import Ranks, RanksDiffer
from numpygpt.train import TrainConfig, Trainer

TOKENS = np.random.default_rng(0).integers(0, 7, 300)


def make_trainer(ranks=None, threads=1, dtype=np.float64, train=None, **config):
    sizes = {"vocab_size": 7, "context_length": 8, "d_model": 16, "num_layers": 2, "num_heads": 2}
    model = TransformerLM(TransformerConfig(**sizes, **config), dtype=dtype, rng=0)
    options = TrainConfig(**{"steps": 4, "batch_size": 5, "eval_interval": 2, **(train or {})})
    return Trainer(model, TOKENS[:200], TOKENS[200:], options, threads, ranks)


def trained(ranks=None, **options):
    """Return a trainer at the end of its run, the metrics of its steps and the losses of its evaluations."""
    trainer, metrics, losses = make_trainer(ranks, **options), [], []
    trainer.run(metrics.append, losses.append)
    for step in metrics:
        del step["tokens_per_s"]
    return trainer, metrics, losses


@pytest.mark.parametrize(("count", "size"), [(5, 1), (5, 2), (6, 3), (7, 5), (3, 3), (1, 4)])
def test_each_row_belongs_to_one_rank(count, size):
    shares = on_ranks(size, lambda ranks: list(range(count))[ranks.rows(count)])
    assert [row for share in shares for row in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_share_of_a_batch_is_that_of_the_whole_batch():
    whole = random_batch(TOKENS, 5, 8, np.random.default_rng(1))
    rng = np.random.default_rng(1)
    part = random_batch(TOKENS, 5, 8, rng, slice(1, 3))
    assert all(np.array_equal(a, b[1:3]) for a, b in zip(part, whole, strict=True))
    other = np.random.default_rng(1)
    random_batch(TOKENS, 5, 8, other)
    assert rng.bit_generator.state == other.bit_generator.state


def test_ranks_read_the_batch_of_one_process_each_row_once(monkeypatch):
    monkeypatch.setattr(Trainer, "update", lambda self, *batch: self.batches.append(batch) or {})

    def batches(ranks=None):
        trainer = make_trainer(ranks)
        trainer.batches = []
        for _ in range(3):
            trainer.train_step()
        return trainer.batches

    for whole, *shares in zip(batches(), *on_ranks(3, batches), strict=True):
        for rows, parts in zip(whole, zip(*shares, strict=True), strict=True):
            assert np.array_equal(rows, np.concatenate(parts))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("options", [{}, {"train": {"accumulate": 2}}, {"threads": 2, "tie_embeddings": True}], ids=str)
def test_ranks_train_as_one_does(size, options):
    one, metrics, losses = trained(**options)
    for trainer, its_metrics, its_losses in on_ranks(size, lambda ranks: trained(ranks, **options)):
        for ours, theirs in zip(its_metrics, metrics, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-12)
        assert its_losses == pytest.approx(losses, rel=1e-12)
        np.testing.assert_allclose(trainer.model.flat.value, one.model.flat.value, rtol=1e-9, atol=1e-12)


def test_all_ranks_have_the_same_bits_at_every_run():
    runs = [on_ranks(3, lambda ranks: trained(ranks, dtype=np.float32)) for _ in range(2)]
    first, metrics, losses = runs[0][0]
    for trainer, its_metrics, its_losses in runs[0] + runs[1]:
        assert trainer.model.flat.value.tobytes() == first.model.flat.value.tobytes()
        assert (its_metrics, its_losses) == (metrics, losses)


@pytest.mark.parametrize("counted", [[0, 1, 1, 1, 1], [1, 0, 0, 1, 0], [0, 0, 0, 0, 0]])
def test_a_mean_is_over_the_counted_tokens_of_all_ranks(counted):
    ids = np.random.default_rng(3).integers(0, 7, (5, 9))
    inputs, targets = ids[:, :-1], np.where(np.array(counted, bool)[:, None], ids[:, 1:], -1)

    def update(ranks=None):
        trainer = make_trainer(ranks)
        trainer.loss = CrossEntropy(ignore_index=-1)
        rows = slice(None) if ranks is None else ranks.rows(5)
        return trainer.update(inputs[rows], targets[rows]), trainer.model.flat.grad

    metrics, grad = update()
    for its_metrics, its_grad in on_ranks(2, update):
        assert its_metrics == pytest.approx(metrics, rel=1e-12)
        np.testing.assert_allclose(its_grad, grad, rtol=1e-9, atol=1e-14)


def test_a_batch_with_less_than_a_sequence_for_each_is_refused():
    with pytest.raises(ValueError, match="batch_size 5 is less than a sequence for each of 6 ranks"):
        on_ranks(6, make_trainer)


# What fails or stops on one


def test_what_is_raised_on_one_is_raised_on_all():
    def run(ranks):
        def fail_on_the_second():
            if ranks.rank == 1:
                raise FloatingPointError("too large")
            return ranks.rank

        with pytest.raises(FloatingPointError, match="too large") as caught:
            ranks.together(fail_on_the_second)
        with pytest.raises(OSError, match="no room"):
            ranks.from_first(lambda: (_ for _ in ()).throw(OSError("no room")))
        assert ranks.together(lambda: ranks.rank) == [0, 1, 2]
        assert ranks.from_first(lambda: [ranks.rank]) == [0]
        return caught.value

    errors = on_ranks(3, run)
    assert "fail_on_the_second" in "".join(errors[0].__notes__)  # where it happened


def test_a_rank_that_differs_is_named():
    def check(ranks):
        ranks.check_alike({"--lr": 1.0, "--steps": None, "--beta1": float("nan")})
        ranks.check_alike({"--lr": 1.0 + (ranks.rank == 2)})

    with pytest.raises(RanksDiffer, match=r"^--lr is 1\.0 on rank 0, but 2\.0 on rank 2$"):
        on_ranks(3, check)


@pytest.mark.parametrize("adapters", [False, True])
def test_weights_that_differ_by_a_bit_are_found_out(adapters):
    def run(ranks):
        trainer = make_trainer(ranks)
        if adapters:  # they lie in a buffer of their own, beside frozen weights that stay the same
            add_lora(trainer.model, 2, rng=0)
        trainer.check_alike()
        if ranks.rank == 1:
            weight = trainer.model.buffers()[-1].value
            weight[-1] = np.nextafter(weight[-1], 9)
        with pytest.raises(RanksDiffer, match=r"the hash of the weights after step 0 is '.*' on rank 0, but '.*' on"):
            trainer.check_alike()

    on_ranks(2, run)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_and_names_the_layer(rank):
    def run(ranks):
        trainer = make_trainer(ranks)
        if ranks.rank == rank:
            trainer.model.layers[1].ffn.w2.weight.value[0, 0] = np.nan
        before = trainer.model.flat.value.copy()
        with pytest.raises(FloatingPointError, match=r"in step 1 the output of layers\.1\.ffn\.w2 is not finite"):
            trainer.run()
        assert trainer.step == 0 and trainer.model.flat.value.tobytes() == before.tobytes()

    on_ranks(2, run)


def test_a_validation_loss_that_is_not_finite_on_one_rank_stops_all():
    def run(ranks):
        trainer = make_trainer(ranks)
        if ranks.rank == 1:
            trainer.model.lm_head.weight.value[0, 0] = np.inf
        with pytest.raises(FloatingPointError, match="the validation loss after step 0"):
            trainer.evaluate()

    on_ranks(2, run)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_stop_before_the_step_for_which_one_is_told_to(rank, monkeypatch):
    told = {}  # by thread, how its rank is told

    @contextlib.contextmanager
    def stopping(quietly):
        yield told[threading.get_ident()]

    monkeypatch.setattr("numpygpt.train.stop_between_steps", stopping)

    def run(ranks):
        trainer = make_trainer(ranks, train={"steps": 9, "eval_interval": 9})
        told[threading.get_ident()] = lambda: ranks.rank == rank and trainer.step == 3
        return trainer.run(), trainer.step

    assert on_ranks(2, run) == [(None, 3)] * 2


def test_the_time_of_one_is_up_for_all():
    def run(ranks):
        trainer = make_trainer(ranks)
        trainer.run(minutes=1e-9 if ranks.rank else 60)
        return trainer.step

    assert on_ranks(2, run) == [1, 1]


def test_dropout_draws_apart_on_each_rank_and_goes_on_as_it_would():
    options = {"dropout": 0.3, "train": {"steps": 6, "eval_interval": 3}, "threads": 2}

    def run(ranks):
        whole = trained(ranks, **options)[0]
        first, second = make_trainer(ranks, **options), make_trainer(ranks, **options)
        for _ in range(3):
            first.timed_step()
        state = first.state_dict()
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        second.load_state_dict(state)
        second.run()
        return whole.model.flat.value, second.model.flat.value, state["generators"]

    results = on_ranks(2, run)
    for whole, resumed, generators in results:
        assert whole.tobytes() == resumed.tobytes() == results[0][0].tobytes()
        assert generators == results[0][2]
    assert {name.split(".")[0] for name in generators} == {"batches", "0", "1", "2", "3"}
    states = [str(state) for name, state in generators.items() if name.endswith(".dropout")]
    assert len(set(states)) == len(states)
    with pytest.raises(ValueError, match="generators"):
        make_trainer(**options).load_state_dict(dict(make_trainer().state_dict(), generators=generators))


# How ranks come together


def test_a_process_by_itself_is_alone(monkeypatch):
    for name in ranks.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    assert type(ranks.join()) is Ranks
    monkeypatch.setenv("PMI_SIZE", "1")
    assert type(ranks.join()) is Ranks


@pytest.mark.parametrize("name", ranks.LAUNCHED)
def test_a_launched_process_without_mpi4py_names_the_extra(name, monkeypatch):
    monkeypatch.setenv(name, "4")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(ImportError, match=r"mpi4py: pip install -e \"\.\[mpi\]\""):
        ranks.join()


def test_an_mpi_that_does_not_see_the_others_is_refused(monkeypatch):
    class MPI:
        class COMM_WORLD:
            size = 1

    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setitem(sys.modules, "mpi4py", MPI)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", MPI)
    with pytest.raises(ValueError, match="started 4 processes, but mpi4py sees 1"):
        ranks.join()


def test_without_a_launcher_mpi_is_not_imported():
    code = "import sys, numpygpt.ranks; numpygpt.ranks.join(); sys.exit('mpi4py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
