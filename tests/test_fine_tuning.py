"""train_shakespeare.py --init: a trained model learns on, whole or by adapters, and can be stopped like any other."""

import json
import shutil
import sys

import numpy as np
import pytest
from running import SCRIPTS, TEXT, run

from numpygpt import checkpoint, pretrained
from numpygpt.config import TransformerConfig
from numpygpt.model import TransformerLM
from numpygpt.tokenizer import CharTokenizer

sys.path.insert(0, str(SCRIPTS))
import train_shakespeare

MODES = {"whole": [], "lora": ["--lora", 2, "--lora-alpha", 3]}
modes = pytest.mark.parametrize("mode", MODES)
SIZES = ["--d-model", 16, "--num-layers", 1, "--num-heads", 2, "--context-length", 32, "--batch-size", 4]
FLAGS = [
    "--steps",
    8,
    "--eval-interval",
    4,
    "--sample-length",
    20,
    "--context-length",
    12,
    "--lr",
    0.01,
    "--accumulate",
    2,
]


def train(*args):
    return run("train_shakespeare.py", *args)


@pytest.fixture(scope="module")
def base(text, tmp_path_factory):
    """A trained model, with dropout."""
    out = tmp_path_factory.mktemp("base") / "run"
    result = train("--corpus", text, "--out", out, *SIZES, "--steps", 20, "--dropout", 0.1, "--sample-length", 0)
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope="module")
def tuned(base, text, tmp_path_factory):
    """What became of it, in each mode: the folder of a run and what the script said."""
    runs = {}
    for mode, flags in MODES.items():
        out = tmp_path_factory.mktemp(mode) / "run"
        runs[mode] = out, train("--init", base, "--corpus", text, "--out", out, *FLAGS, *flags)
        assert runs[mode][1].returncode == 0, runs[mode][1].stderr
    return runs


@modes
def test_the_loss_on_the_text_falls(tuned, mode):
    out, result = tuned[mode]
    first = float(result.stdout.split("before the first step: ")[1].split("\n")[0])
    last = float(result.stdout.split("\nvalidation loss: ")[1].split("\n")[0])
    assert last < first
    assert ("frozen, and" in result.stdout) == (mode == "lora")
    flags = json.loads((out / "config.json").read_text())
    assert (flags["d_model"], flags["dropout"], flags["context_length"], flags["lr"]) == (16, 0.1, 12, 0.01)


@modes
def test_a_resumed_run_ends_on_the_same_bits(tuned, mode, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(tuned[mode][0], out)
    shutil.rmtree(out / "step-00000008")
    result = train("--resume", "--out", out, "--sample-length", 20)
    assert result.returncode == 0, result.stderr
    assert "step-00000004" in result.stderr and "before the first step" not in result.stdout
    assert result.stdout.split("a sample:")[1] == tuned[mode][1].stdout.split("a sample:")[1]
    for name in ("model.safetensors", "training.safetensors", "tokenizer.json"):
        same = [(folder / "step-00000008" / name).read_bytes() for folder in (tuned[mode][0], out)]
        assert same[0] == same[1], name


def test_its_checkpoints_are_ordinary_models(base, tuned):
    names = [list(checkpoint.load(folder)[0].state_dict()) for folder in (base, tuned["whole"][0], tuned["lora"][0])]
    assert names[0] == names[1] == names[2]
    model = checkpoint.load(tuned["lora"][0])[0]
    assert model.config == checkpoint.load(base)[0].config  # the window was a matter of training
    result = run("sample.py", tuned["lora"][0], "--length", 5)
    assert result.returncode == 0, result.stderr


def test_adapters_need_the_model_that_they_began_with(base, tuned, text, tmp_path):
    out, moved = tmp_path / "run", base.with_name("moved")
    shutil.copytree(tuned["lora"][0], out)
    shutil.rmtree(out / "step-00000008")
    other = checkpoint.load(base)[0]
    other.flat.value += 1
    base.rename(moved)
    try:
        state = {**checkpoint.load(moved)[1]}
        checkpoint.save(base / "step-00000020", other, state=state, tokenizer=CharTokenizer.train(TEXT))
        result = train("--resume", "--out", out)
        assert result.returncode == 2
        assert "were trained beside another model than the one given" in result.stderr
        assert result.stderr.count("error: ") == 1 and "Traceback" not in result.stderr
    finally:
        shutil.rmtree(base)
        moved.rename(base)
    assert train("--resume", "--out", out).returncode == 0


# In this process


@pytest.fixture
def main(monkeypatch, capsys):
    """A function that runs the script here: its status, what it printed and what it complained of."""

    def main_with(*flags):
        monkeypatch.setattr(sys, "argv", ["train_shakespeare.py", *map(str, flags)])
        try:
            status = train_shakespeare.main()
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return main_with


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--d-model", 16], "--d-model is settled by the model of --init"),
        (["--dropout", 0.5], "--dropout is settled"),
        (["--tokenizer", "char"], "--tokenizer is settled"),
        (["--context-length", 33], "--context-length 33 is more than the 32 of --init"),
        (["--context-length", 0], "context_length"),
        (["--lora", 0], "rank must be an integer of at least 1, not 0"),
        (["--lora", 17], "rank 17 is more than a map of 16 to 16"),
        (["--lora", 2, "--lora-alpha", 0], "alpha must be a positive number, not 0.0"),
        (["--eval-tokens", 0], "eval_tokens"),
        (["--lora-alpha", 2], "--lora-alpha goes with --lora"),
        (["--init", "glorot", "--lora", 2], "--lora adapts a trained model, and --init glorot is none"),
    ],
)
def test_a_flag_that_contradicts_the_model_is_refused_in_one_line(main, base, text, tmp_path, flags, named):
    out = tmp_path / "out"
    status, printed, errors = main("--init", base, "--corpus", text, "--out", out, *flags)
    assert status == 2 and printed == ""
    assert named in errors and errors.startswith("error: ") and errors.count("\n") == 1
    assert not out.exists()


def test_a_damaged_model_or_another_tokenizer_is_refused(main, base, text, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(base, broken)
    newest = checkpoint.find(broken)
    CharTokenizer.train(TEXT.replace("q", "Q")).save(newest)
    for named in ("another tokenizer", "damaged"):
        status, printed, errors = main("--init", broken, "--corpus", text, "--out", tmp_path / "out")
        assert status == 2 and printed == "" and str(broken) in errors and named in errors
        (newest / "model.safetensors").write_bytes(b"no")


@pytest.fixture
def asked(monkeypatch):
    """Stand in for models of others; the names that were asked for."""
    names = []

    def load(name):
        names.append(name)
        config = TransformerConfig(40, 300, 16, 1, 2, tie_embeddings=True, init="gpt2")
        return TransformerLM(config, rng=0).eval(), CharTokenizer.train(TEXT)

    monkeypatch.setattr(pretrained, "load", load)
    return names


@modes
def test_other_models_come_from_pretrained(main, asked, tmp_path, mode):
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text(2 * TEXT, encoding="utf-8")  # of which a tenth is a window of 256 and more
    options = ["--steps", 3, "--sample-length", 5, "--eval-tokens", 20, *MODES[mode]]
    status, _, errors = main("--init", "a-model", "--corpus", text, "--out", out, *options)
    assert status == 0, errors
    assert asked == ["a-model"]
    flags = json.loads((out / "config.json").read_text())
    assert flags["init"] == "a-model" and flags["tie_embeddings"] is True
    assert (flags["context_length"], flags["batch_size"]) == (256, 4)  # of the 300 tokens that the model takes
    assert flags["lr"] == (2e-3 if mode == "lora" else 1e-4)
    model, state = checkpoint.load(out)
    assert model.config.vocab_size == 40 and model.config.context_length == 300
    assert state["tokenizer"] == CharTokenizer.train(TEXT).fingerprint
    before = TransformerLM(model.config, rng=0).flat.value
    assert not np.array_equal(model.flat.value, before) and np.allclose(model.flat.value, before, atol=0.1)
    # the same run again, by its config
    again = tmp_path / "again"
    status, _, errors = main("--config", out / "config.json", "--out", again, "--sample-length", 0)
    assert status == 0, errors
    assert np.array_equal(checkpoint.load(again)[0].flat.value, model.flat.value)


def test_a_tokenizer_with_more_tokens_than_its_model_is_refused(main, monkeypatch, text, tmp_path):
    model = TransformerLM(TransformerConfig(5, 16, 16, 1, 2), rng=0)
    monkeypatch.setattr(pretrained, "load", lambda name: (model, CharTokenizer.train(TEXT)))
    status, _, errors = main("--init", "a-model", "--corpus", text, "--out", tmp_path / "out")
    assert status == 2 and "a-model has 5 tokens, its tokenizer" in errors
