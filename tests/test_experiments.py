"""The experiments: verdicts follow from numbers, kinds are of one size, and each study measures what it says.

What comes out of a study is never asserted, but for what must come out.
"""

import math
import os
import re
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from running import SCRIPTS, run

sys.path.insert(0, str(SCRIPTS))
import experiments
from numpygpt.gradcheck import gradcheck
from numpygpt.layers.attention import ScaledDotProductAttention
from numpygpt.layers.linear import Linear
from numpygpt.model import TransformerConfig, TransformerLM
from numpygpt.train import TrainConfig, Trainer
from studies import MODULES, STUDIES
from studies import page as pages
from studies.bias_correction import StepLength, uncorrected
from studies.equal import count_parameters, equalised
from studies.gelu_dropout import GRID, average_of_dropout
from studies.linear_std import shrink
from studies.norm_kind import mean_shares, time_ratios
from studies.norm_position import gradient_norms
from studies.position import GROUPS, losses_by_position
from studies.preactivation import preactivations
from studies.runs import curve, spaced
from studies.score_scale import UnscaledAttention
from studies.setting import Setting
from studies.verdict import HOLDS, REFUTED, UNDECIDED, Claim, Criterion, interval, student_quantile

DOCS = SCRIPTS.parent / "docs"
TRAINING = [name for name in MODULES if name != "gelu-dropout"]


FLAGS = ["--quick", "--seeds", 3, "--steps", 2]


@pytest.fixture(scope="module")
def made(text, tmp_path_factory):
    """The folder of a user's run of all studies at the smallest scale, and what it printed."""
    pytest.importorskip("matplotlib", reason='needs pip install -e ".[plot]"')
    folder = tmp_path_factory.mktemp("made") / "claims"
    result = run("experiments.py", "all", *FLAGS, "--jobs", 1, "--corpus", text, "--out", folder)
    assert result.returncode == 0, result.stderr
    return folder, result.stdout


@pytest.fixture(scope="module")
def measured(made):
    """What every study kept."""
    return pages.numbers_in(made[0])


def small_trainer(seed=0, **fields):
    config = TransformerConfig(
        **{"vocab_size": 7, "context_length": 8, "d_model": 8, "num_layers": 2, "num_heads": 2} | fields
    )
    tokens = np.random.default_rng(seed).integers(7, size=300)
    train = TrainConfig(steps=5, batch_size=3, warmup_steps=0, weight_decay=0, beta2=0.999)
    return Trainer(TransformerLM(config, rng=seed), tokens[:200], tokens[200:], train, threads=1)


def samples(numbers):
    return numbers["samples"]


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (1000, 1.962)])
def test_student_s_quantiles(degrees, quantile):
    assert student_quantile(degrees) == pytest.approx(quantile, abs=6e-4)


def test_the_interval_of_a_mean():
    mean, low, high = interval([1.0, 2.0, 3.0])
    assert mean == pytest.approx(2)
    assert (low, high) == pytest.approx((2 - 4.3027 / math.sqrt(3), 2 + 4.3027 / math.sqrt(3)), abs=1e-4)
    assert interval([0.5, 0.5, 0.5]) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="two"):
        interval([1.0])


@pytest.mark.parametrize(
    ("bounds", "holding", "refuting", "undecided"),
    [
        ({"high": 0}, [-1, -1.1, -0.9], [1, 1.1, 0.9], [-1, 0.2, -0.1]),
        ({"low": 0}, [1, 1.1, 0.9], [-1, -1.1, -0.9], [1, -0.2, 0.1]),
        ({"low": -0.1, "high": 0.1}, [0.01, 0, -0.01], [0.3, 0.31, 0.29], [0.1, 0.11, 0.09]),
        ({"low": -0.1, "high": 0.1}, [0.0, 0, 0], [-0.3, -0.31, -0.29], [0.0, -5, 5]),  # wider than the range
        ({"low": 0.5, "ratio": True}, [1, 1.1, 1.2], [0.1, 0.12, 0.11], [0.01, 1, 100]),
    ],
)
def test_the_three_verdicts(bounds, holding, refuting, undecided):
    criterion = Criterion("a made-up quantity", samples, **bounds)
    for values, verdict in ((holding, HOLDS), (refuting, REFUTED), (undecided, UNDECIDED)):
        assert criterion.verdict({"samples": values}) == verdict


def test_a_ratio_is_judged_by_its_logarithm():
    mean, low, high = Criterion("a ratio", samples, ratio=True).interval({"samples": [1, 2, 4]})
    assert mean == pytest.approx(2)
    assert low * high == pytest.approx(4)
    assert low > 0


def test_a_claim_holds_if_all_criteria_do_and_is_refuted_by_one():
    holds, refuted = ({"low": 0}, {"high": 0})
    for bounds, verdict in (
        ([holds, holds], HOLDS),
        ([holds, refuted], REFUTED),
        ([holds, {"low": 1}], UNDECIDED),
        ([refuted, {"low": 1}], REFUTED),
    ):
        claim = Claim("", "", tuple(Criterion("", samples, **b) for b in bounds))
        assert claim.verdict({"samples": [1, 1.1, 0.9]}) == verdict


def test_what_refutes_and_what_was_seen_are_said_in_words():
    assert Criterion("x", samples, high=0).refuted_if == "x is above 0"
    assert Criterion("x", samples, low=0.5).refuted_if == "x is below 0.5"
    assert Criterion("x", samples, -0.02, 0.02).refuted_if == "x is outside -0.02 to 0.02"
    assert Criterion("x", samples).seen({"samples": [1, 2, 3]}) == "x: 2 (-0.484 to 4.48)"


@pytest.mark.parametrize("name", TRAINING)
def test_at_full_scale_kinds_are_of_one_size_to_a_hundredth(name, monkeypatch, text):
    """Those of one depth, where depths differ."""

    class Stop(Exception):
        """Nothing is trained."""

    def stop(setting, kinds, watch=None):
        raise Stop(kinds)

    monkeypatch.setattr(MODULES[name], "train_kinds", stop)
    tokens = np.zeros(1000, np.uint16)
    with pytest.raises(Stop) as stopped:
        STUDIES[name].measure(Setting(tokens, tokens, 65))
    (kinds,) = stopped.value.args
    depths = {kind.config.num_layers for kind in kinds.values()}
    assert len(kinds) >= 2
    for depth in depths:
        sizes = [count_parameters(kind.config) for kind in kinds.values() if kind.config.num_layers == depth]
        assert max(sizes) <= 1.01 * min(sizes)


def test_a_size_that_cannot_be_met_is_named():
    small = TransformerConfig(vocab_size=5, context_length=4, d_model=4, num_layers=1, num_heads=1)
    long = TransformerConfig(5, 400, 4, 1, 1, positions="learned")
    assert equalised({"small": small, "again": small})["again"] == small
    with pytest.raises(ValueError, match="long has"):
        equalised({"small": small, "long": long})


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_ends_with_a_table_and_verdicts(name, measured):
    study, numbers = STUDIES[name], measured[name]
    assert "| -" in study.table(numbers)
    assert len({claim.text for claim in study.claims}) == len(study.claims) > 1
    for claim in study.claims:
        assert claim.verdict(numbers) in (HOLDS, REFUTED, UNDECIDED)
        for criterion in claim.criteria:
            assert len(criterion.samples(numbers)) == 3  # seeds or rounds
            assert criterion.low > -math.inf or criterion.high < math.inf
            assert np.isfinite(criterion.interval(numbers)).all()
    if name in TRAINING:
        assert all(len(losses) == 3 and min(losses) > 0 for losses in numbers["losses"].values())
        assert numbers["losses"].keys() == numbers["parameters"].keys() == numbers["curves"].keys()


def test_what_must_come_out_does(measured):
    """Also of a few steps of small models: equations, and the ways in which kinds differ."""
    verdicts = {claim.text: claim.verdict(measured[name]) for name, s in STUDIES.items() for claim in s.claims}
    for begin in ("Uncorrected, the first step", "The mean of x, kept with", "Not divided, in a wide head"):
        (verdict,) = [v for text, v in verdicts.items() if text.startswith(begin)]
        assert verdict == HOLDS
    for name in TRAINING:
        losses = [tuple(seeds) for seeds in measured[name]["losses"].values()]
        assert len(set(losses)) == len(losses)  # no two kinds are the same, none with two seeds
        assert all(len(set(seeds)) == 3 for seeds in losses)


def test_the_page_has_every_claim_with_its_verdict_and_its_picture(made, measured, text):
    folder, printed = made
    assert printed.endswith(f"Saved {folder}.md\n")
    written = folder.with_suffix(".md").read_text(encoding="utf-8")
    headings = {pages.anchor(line[3:]) for line in written.splitlines() if line.startswith("## ")}
    assert len(headings) == len(STUDIES)
    assert set(re.findall(r"\(#([^)]*)\)", written)) == headings
    for name, study in STUDIES.items():
        assert f"](claims/{name}.svg)" in written
        assert f"    python scripts/experiments.py {name} --corpus {text} --seeds 3 --steps 2 --quick\n" in written
        for claim in study.claims:
            (row,) = [line for line in written.splitlines() if line.startswith(f"| {claim.text} ")]
            verdict = claim.verdict(measured[name])
            assert f" {verdict} " in row
            for out in (written, printed):
                assert f"- **{verdict}**" in out.split(f"**{claim.text}**")[1].split("\n\n")[1]
        picture = (folder / f"{name}.svg").read_text(encoding="utf-8")
        assert ElementTree.fromstring(picture).tag.endswith("svg")
        assert len(picture) < 60_000
        assert "mathdefault" not in picture


def test_several_processes_measure_the_same_and_it_is_drawn_the_same_again(monkeypatch, made, text, tmp_path):
    folder = tmp_path / "again"
    result = run("experiments.py", "score-scale", *FLAGS, "--jobs", 2, "--corpus", text, "--out", folder)
    assert result.returncode == 0, result.stderr
    for name in ("score-scale.json", "score-scale.svg"):
        assert (folder / name).read_bytes() == (made[0] / name).read_bytes()
    page = (tmp_path / "again.md").read_bytes()
    (folder / "score-scale.svg").unlink()
    (tmp_path / "again.md").unlink()
    assert call(monkeypatch, "--redraw", "--out", folder) == 0
    assert (folder / "score-scale.svg").read_bytes() == (made[0] / "score-scale.svg").read_bytes()
    assert (tmp_path / "again.md").read_bytes() == page


def test_the_page_in_the_docs_is_what_its_numbers_say():
    kept = pages.numbers_in(DOCS / "experiments")
    assert kept.keys() == STUDIES.keys()
    assert (DOCS / "experiments.md").read_text(encoding="utf-8") == pages.page(kept, "experiments")
    for name in kept:
        assert len((DOCS / "experiments" / f"{name}.svg").read_bytes()) < 60_000


def call(monkeypatch, *flags):
    """Run the script in this process; return the exit status."""
    monkeypatch.setattr(sys, "argv", ["experiments.py", *map(str, flags)])
    try:
        return experiments.main()
    except SystemExit as end:
        return end.code


def test_the_list_says_what_would_refute(monkeypatch, capsys):
    assert call(monkeypatch, "--list") == 0
    out = " ".join(capsys.readouterr().out.split())
    for name, study in STUDIES.items():
        assert f"{name}: {study.title}" in out
        for claim in study.claims:
            assert claim.text in out
            assert all(f"refuted if {criterion.refuted_if}" in out for criterion in claim.criteria)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "no study"),
        (["prenorm"], "'prenorm'"),
        (["all", "--list"], "--list"),
        (["activation", "--redraw"], "--redraw"),
        (["--redraw"], "holds no numbers"),
        (["activation", "--seeds", "2"], "at least 3"),
        (["activation", "--seeds", "x"], "--seeds"),
        (["activation", "--steps", "0"], "steps"),
        (["activation", "--jobs", "0"], "jobs"),
        (["activation", "--corpus", "no/such.txt"], "no/such.txt"),
        (["activation", "--out", "short.txt"], "short.txt is no folder"),
        (["activation", "--corpus", "short.txt"], "16 needs 17"),
        (["activation", "--seed", "3"], "--seed"),
        (["activation", "--out", "broken"], "activation.json"),
    ],
)
def test_a_mistake_is_named_in_one_line_and_nothing_written(monkeypatch, capsys, tmp_path, text, flags, named):
    monkeypatch.setattr(experiments, "check_can_draw", lambda: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("To be, or not to be")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "activation.json").write_text("{")
    before = sorted(os.listdir())
    flags = flags if "--corpus" in flags else ["--corpus", text, *flags]
    assert call(monkeypatch, "--quick", *flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert named in err
    assert err.count("\n") == 1
    assert sorted(os.listdir()) == before


def test_without_matplotlib_the_extra_is_named_before_anything_is_measured(monkeypatch, capsys, tmp_path, text):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert call(monkeypatch, "activation", "--corpus", text, "--out", tmp_path / "out") == 2
    assert capsys.readouterr().err == 'error: this needs the package matplotlib: pip install -e ".[plot]"\n'
    assert not (tmp_path / "out").exists()


def test_attention_that_is_not_divided(unchecked):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 5, 6))
    expected = ScaledDotProductAttention().forward(q * math.sqrt(6), k, v, causal=1)
    np.testing.assert_allclose(UnscaledAttention().forward(q, k, v, causal=1), expected)
    gradcheck(UnscaledAttention(), q, k, v, raise_on_failure=True)
    x = q.astype(np.float32)
    layer = UnscaledAttention()
    assert layer.forward(x, x, x).dtype == np.float32
    assert {d.dtype for d in layer.backward(x)} == {np.dtype(np.float32)}


def test_the_other_start_of_linear_maps():
    one, other = small_trainer().model, small_trainer()
    shrink(other)
    pairs = list(zip(one.named_modules(), other.model.modules(), strict=True))
    linear = [(a, b) for (_, a), b in pairs if isinstance(a, Linear)]
    assert len(linear) == 2 * 7 + 1
    for a, b in linear:
        np.testing.assert_allclose(b.weight.value, a.weight.value * math.sqrt(2 / sum(a.weight.shape)), rtol=1e-6)
    np.testing.assert_array_equal(one.token_embeddings.weight.value, other.model.token_embeddings.weight.value)


def test_steps_without_the_correction():
    """Those of constant gradients are as the formula says, also later ones."""
    on, off = small_trainer(), small_trainer()
    uncorrected(off)
    for step in (1, 2, 3):
        for trainer in (on, off):
            before = trainer.model.flat.value.copy()
            trainer.model.flat.grad[...] = 0.01
            trainer.optimizer.step()
            trainer.moved = before - trainer.model.flat.value
        factor = (1 - 0.9**step) / math.sqrt(1 - 0.999**step)
        np.testing.assert_allclose(off.moved, factor * on.moved, rtol=1e-3)


def test_the_length_of_a_step():
    trainer, length = small_trainer(), StepLength()
    before = trainer.model.flat.value.copy()
    assert length(trainer) == 0
    trainer.train_step()
    assert length(trainer) == pytest.approx(float(np.linalg.norm(trainer.model.flat.value - before)), rel=1e-5)


def test_losses_by_position_have_the_mean_of_an_evaluation():
    trainer = small_trainer(context_length=32)
    tokens = trainer.validation_tokens
    in_groups = losses_by_position(trainer)
    assert len(in_groups) == GROUPS == 16
    expected, windows = 0.0, 0
    for start in range(0, 32, 2):
        whole = (len(tokens) - start - 1) // 32
        trainer.validation_tokens = tokens[start : start + 32 * whole + 1]
        expected, windows = expected + whole * trainer.evaluate(), windows + whole
    assert np.mean(in_groups) == pytest.approx(expected / windows, rel=1e-5)


def test_a_model_that_sees_one_token_has_the_same_loss_in_every_group():
    """Each token is a target in every group: with the same before it, the loss is the same."""
    trainer = small_trainer(context_length=32, positions="none")
    for block in trainer.model.layers:
        block.attn.output_proj.weight.value *= 0
    trainer.validation_tokens = np.tile(np.arange(7), 40)
    in_groups = losses_by_position(trainer)
    np.testing.assert_allclose(in_groups, np.mean(in_groups), rtol=0.02)


def test_the_share_of_the_mean():
    trainer = small_trainer()
    trainer.train_step()
    norms = [module for module in trainer.model.modules() if type(module).__name__ == "RMSNorm"]
    x = np.random.default_rng(0).standard_normal((3, 4, 8))
    norms[0].forward(x + 2)
    norms[1].forward(x - x.mean(axis=-1, keepdims=True))
    shares = mean_shares(trainer)
    assert len(shares) == len(norms) == 5
    assert 0.6 < shares[0] < 0.95  # 4 / (4 + 1), or so
    assert shares[1] == pytest.approx(0, abs=1e-12)


def test_the_mean_of_the_pre_activations():
    for ffn in ("relu", "swiglu"):
        trainer = small_trainer(ffn=ffn)
        for block in trainer.model.layers:
            block.ln2.weight.value = np.zeros(8)
            block.ln2.weight.value[0] = 1  # W1 is given one feature of either sign
            block.ffn.w1.weight.value = np.abs(block.ffn.w1.weight.value)
        mean, share = preactivations(trainer)
        given = [block.ffn.w1.saved[..., 0] for block in trainer.model.layers]
        assert share == pytest.approx(np.mean([np.mean(x > 0) for x in given]), abs=1e-6)
        assert mean * np.mean([np.mean(x) for x in given]) > 0


def test_gradients_by_block():
    trainer = small_trainer()
    trainer.train_step()
    first, last, w2 = gradient_norms(trainer)
    blocks = trainer.model.layers
    assert w2 == pytest.approx(float(np.linalg.norm(blocks[1].ffn.w2.weight.grad)), rel=1e-5)
    for block, norm in zip(blocks, (first, last), strict=True):
        assert norm**2 == pytest.approx(sum(float(np.sum(p.grad**2)) for p in block.parameters()), rel=1e-4)


def test_the_average_of_dropout_keeps_the_large_and_drops_the_small():
    average = average_of_dropout(2000, np.random.default_rng(0)) / GRID
    assert average[0] < 0.01
    assert average[-1] > 0.99
    assert np.mean(average) == pytest.approx(0.5, abs=0.02)


def test_timed_calls_take_turns_and_the_ratio_is_the_second_s(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr("studies.norm_kind.time.perf_counter", lambda: now[0])

    def taking(name, seconds):
        def call():
            order.append(name)
            now[0] += seconds

        return call

    assert time_ratios({"a": taking("a", 2.0), "b": taking("b", 1.0)}, 2, 2) == [0.5, 0.5]
    assert "".join(order) == "ab" + "baab" * 2


def test_curves_are_means_of_pieces():
    steps, losses = curve([[float(i) for i in range(100)], [float(i) + 2 for i in range(100)]])
    assert len(steps) == 25
    assert (steps[0], losses[0]) == (2.5, 2.5)
    assert (steps[-1], losses[-1]) == (98.5, 98.5)
    assert curve([[3.0]]) == [[1.0], [3.0]]


def test_looks_are_from_the_first_step_to_the_last():
    assert spaced(1) == (1,)
    assert spaced(200)[0] == 1
    assert spaced(200)[-1] == 200
    assert len(spaced(200)) == 10
