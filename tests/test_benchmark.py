"""The benchmark: all contenders compute the same, and what it prints follows from what it measured.

What it measures is never asserted.
"""

import contextlib
import dataclasses
import importlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from running import SCRIPTS, run

sys.path.insert(0, str(SCRIPTS))
import benchmark
from benchmarks import bound, decoding, growth, profiling, race, report, runner, sizes, timing
from numpygpt.data import split
from numpygpt.layers.cross_entropy import CrossEntropy
from numpygpt.model import TransformerLM
from numpygpt.train import TrainConfig, Trainer

SLOW = [("compile", "default"), ("compile", "gpt2"), ("jax", "gpt2")]
TINY = (1, 2, 8, 4, 2, 11)  # layers, heads, width, context, batch, vocabulary


def main(monkeypatch, *flags, tiny=("S", "M")):
    """Run the script in this process, its sizes tiny and its rounds short; return the exit status."""
    monkeypatch.setattr(sizes, "SHAPES", dict.fromkeys(tiny, TINY))
    monkeypatch.setattr(benchmark, "SHAPES", sizes.SHAPES)
    monkeypatch.setattr(decoding, "SHAPES", sizes.SHAPES)
    monkeypatch.setattr(race, "SHAPES", sizes.SHAPES)
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--seconds", "0", "--threads", "1", *map(str, flags)])
    try:
        return benchmark.main()
    except SystemExit as end:
        return end.code


def losses(contender, dress, steps=40):
    size = sizes.make_size("tiny", *TINY, dress=dress)
    module, function, _ = timing.CONTENDERS[contender]
    make_step = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    step = make_step(size, TransformerLM(size.config, rng=0).state_dict(), 1)
    return [step() for _ in range(steps)]


def timings(contender, *steps_s, results=()):
    return [runner.Timing("S", contender, i, list(results), 9.0, [s, s, 99 * s], 80, 40) for i, s in enumerate(steps_s)]


@pytest.mark.parametrize("dress", sizes.DRESSES)
@pytest.mark.parametrize("contender", ["torch", "compile", "jax"])
@pytest.mark.usefixtures("one_torch_thread")
def test_the_contenders_losses_are_ours(contender, dress, request):
    """For longer than a run compares them: in three steps a wrong clipping or decay doesn't tell."""
    if (contender, dress) in SLOW and not request.config.getoption("deep"):
        pytest.skip("compiling takes long: --deep")
    for package in timing.CONTENDERS[contender].needs:
        pytest.importorskip(package)
    expected = losses("numpygpt", dress)
    assert expected[-1] < expected[0] - 0.01
    np.testing.assert_allclose(losses(contender, dress), expected, atol=1e-5, rtol=0)


def test_one_command_prints_one_table_and_writes_every_time_down(monkeypatch, capsys, tmp_path):
    order = ["numpygpt", "bound"]
    flags = ["--sizes", "M", "S", "--contenders", *order, "--rounds", 1, "--json", tmp_path / "raw.json"]
    assert main(monkeypatch, *flags) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("| M", "| S"))]
    expected = [(size, contender) for size in "MS" for contender in order]
    assert [(row[1], row[3]) for row in rows] == expected
    raw = json.loads((tmp_path / "raw.json").read_text(encoding="utf-8"))
    assert [(t["size"], t["contender"]) for t in raw] == expected
    assert [len(t["times_s"]) for t in raw] == [timing.LEAST] * 4


def test_every_other_round_goes_backwards():
    assert list(runner.there_and_back("ab", 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_without_pytorch_there_are_times_and_no_ratios(monkeypatch, capsys):
    monkeypatch.setattr(runner, "installed", lambda package: False)
    assert main(monkeypatch, "--sizes", "S", "--contenders", "numpygpt", "torch", "jax", "--rounds", 1) == 0
    out = capsys.readouterr().out
    for name in ("torch", "jax"):
        assert f'{name} is skipped, as there is no {name}: pip install -e ".[bench]"\n' in out
    assert "times only" in out
    (row,) = [line.split() for line in out.splitlines() if line.startswith("| S")]
    assert row[5] == "-"


def test_a_contender_made_wrong_makes_the_run_void(tmp_path):
    """In the place of PyTorch's model there is ours with another learning rate: found after the first step."""
    pytest.importorskip("torch")
    scripts = shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    ours = (scripts / "benchmarks" / "ours.py").read_text(encoding="utf-8")
    assert "lr=LR," in ours
    (scripts / "benchmarks" / "pytorch.py").write_text(ours.replace("lr=LR,", "lr=2 * LR,"), encoding="utf-8")
    flags = ["--sizes", "S", "--contenders", "torch", "numpygpt", "--rounds", 1, "--seconds", 0, "--threads", 1]
    result = run(scripts / "benchmark.py", *flags)
    assert result.returncode == 1
    assert "the run is void: at S loss 2 of numpygpt is " in result.stderr.splitlines()[-1]
    assert "| S" not in result.stdout
    assert "Traceback" not in result.stderr


def test_losses_that_differ_or_are_not_finite_are_void():
    good = timings("torch", 1.0, results=[2.0, 1.9])
    runner.check_losses([*good, *timings("bound", 1.0), *timings("jax", 1.0, results=[2.0, 1.90009])])
    for wrong in ([2.0, 1.9002], [float("nan"), 1.9]):
        with pytest.raises(runner.Void, match="jax"):
            runner.check_losses([*timings("jax", 1.0, results=wrong), *good])


@pytest.mark.parametrize("end", [3, decoding.AGREE])
def test_texts_that_begin_differently_are_void(end):
    text = list(range(30))
    other = [*text[:end], 99, *text[end + 1 :]]
    checked = [
        *timings("numpygpt", 1.0, results=[[text, text]]),
        *timings("transformers", 1.0, results=[[text, other]]),
    ]
    with pytest.raises(runner.Void) if end < decoding.AGREE else contextlib.nullcontext():
        decoding.check_texts(checked)


def test_a_contender_that_fails_is_named_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(runner, "SCRIPTS", "/nowhere")
    assert main(monkeypatch, "--sizes", "S", "--contenders", "numpygpt", "--rounds", 1) == 1
    assert "error: numpygpt failed at S: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--sizes", "XL"], "XL"),
        (["--contenders", "tensorflow"], "tensorflow"),
        (["--rounds", "0"], "rounds"),
        (["--rounds", "x"], "--rounds"),
        (["--seconds", "-1"], "--seconds"),
        (["--seconds", "nan"], "--seconds"),
        (["--threads", "0"], "threads"),
        (["--threads", "1000000"], "1000000"),
        (["--grow", "depth"], "depth"),
        (["--grow", "width", "--decode"], "--decode"),
        (["--decode", "--dress", "gpt2"], "--dress"),
        (["--profile", "S", "--contenders", "torch"], "--contenders"),
        (["--plot", "x.png"], "--plot"),
        (["--race", "x.txt", "--json", "raw.json"], "--json"),
        (["--race", "x.txt", "--dress", "gpt2"], "--dress"),
        (["--race", "x.txt", "--decode"], "--decode"),
        (["--json", "no/such/folder/raw.json"], "no/such/folder"),
        (["--json", "."], "."),
        (["--round", "3"], "--round"),
    ],
)
def test_a_mistake_is_named_in_one_line(monkeypatch, capsys, flags, named):
    assert main(monkeypatch, *flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert named in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("dress", sizes.DRESSES)
def test_the_operations_of_the_products(dress):
    """6 N n for the linear maps and 12 L n T D for attention; the embeddings are looked up."""
    size = sizes.make_size("tiny", 3, 2, 8, 5, 7, 11, dress)
    weights = TransformerLM(size.config).state_dict()
    looked_up = {"positions.embeddings.weight"} | (set() if size.config.tie_embeddings else {"token_embeddings.weight"})
    matrices = sum(w.size for name, w in weights.items() if w.ndim == 2 and name not in looked_up)
    assert size.tokens == 35
    assert bound.flops(size) == 6 * matrices * 35 + 12 * 3 * 35 * 5 * 8


def test_the_bound_does_three_products_for_each_of_forward(monkeypatch):
    done = []
    matmul = np.matmul

    def counted(a, b, out):
        done.append(2 * out.size * a.shape[-1])
        return matmul(a, b, out=out)

    size = sizes.make_size("tiny", *TINY)
    step = bound.make_step(size, {}, 1)
    monkeypatch.setattr(np, "matmul", counted)
    step()
    assert sum(done) == bound.flops(size)


def test_ratios_are_of_one_round_and_their_median_is_shown():
    done = [*timings("numpygpt", 3.0, 2.0, 8.0), *timings("torch", 1.0, 2.0, 2.0), *timings("jax", 1.0)]
    assert report.ratios(done, "numpygpt") == [3.0, 1.0, 4.0]
    assert report.ratios(done, "jax") == [1.0]
    assert report.ratios(done, "torch", "jax") == [1.0]
    assert report.spread([3.0, 1.0, 4.0]) == "3.00 (1.00..4.00)"
    assert report.spread([3.0]) == "3.00"
    assert report.spread([]) == "-"


def test_the_table():
    size = sizes.make_size("S", *TINY)
    done = [*timings("torch", 0.5, 0.25), *timings("jax", 0.25, 0.25)]
    head, rule, torch, jax = report.training_table([size], done).splitlines()[:4]
    assert len({len(line) for line in (head, rule, torch, jax)}) == 1
    cells = [cell.strip() for cell in jax.split("|")[1:-1]]
    assert cells == ["S", "jax", "0.75 (0.50..1.00)", "250.0", "32", "0", "80", "40", "8.8"]


def test_growth_is_drawn(tmp_path):
    pytest.importorskip("matplotlib").use("agg")
    values = {what: [int(size.name) for size in growth.grown_sizes(what, "default")] for what in growth.GROWN}
    assert values == {"context": [64, 128, 256, 512, 1024, 2048], "width": [128, 256, 512, 1024]}
    assert {size.tokens for what in growth.GROWN for size in growth.grown_sizes(what, "default")} == {2048}
    done = [t for n in (64, 128) for c in ("numpygpt", "torch") for t in timings(c, n / 64)]
    done = [dataclasses.replace(t, size=str(64 * (1 + i // 2))) for i, t in enumerate(done)]
    assert growth.growth_table("context", done).splitlines()[3].split()[1:6:2] == ["128", "2,000.0", "2,000.0"]
    growth.plot("context", done, tmp_path / "below" / "plot.png")
    assert (tmp_path / "below" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_profile_names_every_layer_and_its_parts_add_up(monkeypatch, capsys):
    assert main(monkeypatch, "--profile", "S") == 0
    by_layer, by_kind = capsys.readouterr().out.split("\n", 1)[1].split("\n\n")
    modules = {type(module).__name__ for module in TransformerLM(sizes.make_size("S", *TINY).config).modules()}
    forward = {line.split()[1]: line.split("|")[2].strip() for line in by_layer.splitlines()[2:]}
    assert {*modules, "CrossEntropy"} <= {layer for layer, ms in forward.items() if ms}
    kinds = {line.split("|")[1].strip(): float(line.split("|")[2]) for line in by_kind.splitlines()[2:]}
    assert kinds.keys() >= {profiling.PRODUCTS, profiling.AROUND, profiling.LAYERS, profiling.OPTIMISER}
    assert kinds.pop("a step") == pytest.approx(sum(kinds.values()), abs=0.05)


def test_a_stopwatch_takes_what_was_inside_from_what_was_outside(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 10.0])
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: next(now))
    watch = profiling.Stopwatch()

    class Layer:
        def forward(self):
            product()

    product = watch.wrap(lambda: None, profiling.PRODUCTS)
    Layer.forward = watch.wrap(Layer.forward, profiling.LAYERS)
    Layer().forward()
    assert watch.seconds == {
        ("Layer", "forward", profiling.PRODUCTS): 2.0,
        ("Layer", "forward", profiling.LAYERS): 8.0,
    }


@pytest.mark.usefixtures("one_torch_thread")
def test_both_write_the_same_text(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    monkeypatch.setattr(decoding, "NEW", 6)
    monkeypatch.setattr(decoding, "SHAPES", {"M": (2, 2, 16, 4, 2, 50), "G": TINY})
    one, several, *_ = decoding.decoding_sizes()
    assert (one.batch_size, several.batch_size) == (1, 16)
    sizes.save_weights(several, tmp_path / "weights.npz")
    written = {}
    for contender in decoding.WRITERS:
        fields = dataclasses.asdict(several)
        made = decoding.measure_decoding(contender, fields, tmp_path / "weights.npz", 1, 0)
        written[contender] = made["results"]
    assert written.pop("bound") == []
    assert written["numpygpt"] == written["transformers"]
    assert [len(text) for text in written["numpygpt"][0]] == [6] * 16


MEMORY = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from benchmarks.timing import peak_mb
from numpygpt import forks

class Writer:
    def grow(self, megabytes):
        shared[:] = 1
        self.own = np.ones(megabytes * 2**17)  # of 8 bytes

shared = forks.shared(np.zeros(100 * 2**17))
team = forks.Forks()
team.start([Writer(), Writer(), Writer()])
before = peak_mb()
team.call("grow", [(0,), (150,), (120,)])
print(peak_mb() - before)
del team
print(peak_mb() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what processes share")
def test_the_memory_of_processes_is_counted_and_what_they_share_once():
    # In a process of its own: here, peaks of other tests may be higher than what is measured.
    result = subprocess.run([sys.executable, "-c", MEMORY, SCRIPTS], capture_output=True, text=True, timeout=60)
    grown, left = map(float, result.stdout.split())
    assert 250 < grown < 300
    assert left < 10


OURS_SMALL = ["--steps", "3", "--warmup-steps", "1", "--d-model", "8", "--num-layers", "1", "--context-length", "4"]
SHORT = race.Schedule(steps=3, warmup_steps=1, eval_interval=2, eval_batches=1)


def test_a_race_of_both_recipes(monkeypatch, capsys, text):
    pytest.importorskip("torch")
    monkeypatch.setattr(race, "SEEDS", (5,))
    monkeypatch.setattr(race, "RECIPE", [*race.RECIPE, *OURS_SMALL])
    monkeypatch.setattr(race, "SCHEDULE", SHORT)
    assert main(monkeypatch, "--race", text) == 0
    out = capsys.readouterr().out
    (row,) = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("| 5 ")]
    _, theirs, ours, ratio, *losses = map(float, row)
    assert ratio == pytest.approx(ours / theirs, abs=0.1)  # the seconds are rounded
    assert all(2 < loss < 4 for loss in losses)  # ln 27 = 3.3, of its characters
    assert "\nmedian ratio: " in out


def test_both_orders_of_a_race_and_its_table(monkeypatch, text):
    monkeypatch.setattr(race, "run_theirs", lambda corpus, seed, size, threads: race.Finish("nanoGPT", seed, 80, 1.9))
    monkeypatch.setattr(race, "run_ours", lambda corpus, seed, threads: race.Finish("numpygpt", seed, 8 + seed, 1.8))
    done = list(race.run_race(str(text), 1))
    assert [f.contender for f in done] == ["nanoGPT", "numpygpt", "numpygpt", "nanoGPT", "nanoGPT", "numpygpt"]
    assert [f.seed for f in done] == [0, 0, 1, 1, 2, 2]
    lines = race.race_table(done).splitlines()
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == ["1", "80.0", "9.0", "0.113", "1.9000", "1.8000"]
    assert lines[-1] == "median ratio: 0.11 (0.10..0.12)"


@pytest.mark.usefixtures("one_torch_thread")
def test_their_loss_over_the_held_out_tenth_is_taken_as_ours(monkeypatch, text):
    """Untrained, the two models are one, and so must be its loss."""
    monkeypatch.setattr(race, "SHAPES", {"S": TINY})
    size = race.their_size(str(text))
    _, held_out = split(race.encode(str(text))[1], size.config.context_length)
    model = TransformerLM(size.config, rng=np.random.default_rng(3))
    config = TrainConfig(batch_size=size.batch_size)
    plan = dataclasses.asdict(dataclasses.replace(SHORT, steps=0, warmup_steps=0))
    theirs = race.train_theirs(str(text), 3, dataclasses.asdict(size), plan, 1)
    assert theirs["loss"] == pytest.approx(Trainer(model, held_out, held_out, config, 1).evaluate(), abs=1e-5)


@pytest.mark.usefixtures("one_torch_thread")
def test_their_gelu_is_exact(monkeypatch, text):
    """With weights so large that the other one would tell."""
    torch, pytorch = pytest.importorskip("torch"), importlib.import_module("benchmarks.pytorch")
    monkeypatch.setattr(race, "SHAPES", {"S": TINY})
    config = race.their_size(str(text)).config
    weights = {name: 20 * w for name, w in TransformerLM(config, rng=0).state_dict().items()}
    inputs, targets = next(sizes.batches(sizes.Size("S", config, 2)))
    theirs = pytorch.make_model(config, weights)(torch.from_numpy(inputs), torch.from_numpy(targets)).item()
    ours = {}
    for ffn in ("gelu", "gelu_tanh"):
        model = TransformerLM(dataclasses.replace(config, ffn=ffn))
        model.load_state_dict(weights)
        ours[ffn] = CrossEntropy().forward(model.forward(inputs), targets)
    assert theirs == pytest.approx(ours["gelu"], abs=1e-5)
    assert abs(theirs - ours["gelu_tanh"]) > 3e-5


def test_their_model_is_nanogpts(text):
    """Its README counts 0.80 million parameters, positions left out, of 65 characters; these are 27."""
    size = race.their_size(str(text))
    names = {name.rpartition(".")[2] for name in TransformerLM(size.config).state_dict()}
    assert names == {"weight"}  # and no bias
    d = size.config.d_model
    count = sum(w.size for w in TransformerLM(size.config).state_dict().values()) - 64 * d
    assert (count + (65 - size.config.vocab_size) * d) / 1e6 == pytest.approx(0.80, abs=0.005)
    rates = [race.SCHEDULE.learning_rate(step) for step in (0, 99, 1050, 2000)]
    assert rates == pytest.approx([1e-5, 1e-3, 5.5e-4, 1e-4])


def test_a_race_without_a_winner(monkeypatch, capsys, text):
    monkeypatch.setattr(benchmark, "warnings_of_load", list)
    monkeypatch.setattr(benchmark, "installed", lambda package: True)
    monkeypatch.setattr(race, "run_theirs", lambda corpus, seed, *_: race.Finish("nanoGPT", seed, 80, float("nan")))
    assert main(monkeypatch, "--race", text) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: the run is void: with seed 0 the loss of nanoGPT is nan"
    assert main(monkeypatch, "--race", "no/such/file") == 2
    assert "error: cannot read no/such/file" in capsys.readouterr().err
    monkeypatch.setattr(benchmark, "installed", lambda package: False)
    assert main(monkeypatch, "--race", text) == 2
    assert 'there is no torch: pip install -e ".[bench]"' in capsys.readouterr().err
