"""Every script that runs a model takes --device cuda: on a strict stand-in for CuPy it does what it does on the CPU.

The stand-in computes with NumPy, so all that is written must be the same to the last bit. A GPU rounds otherwise, and
none has been seen: what is shown is that no script asks CuPy for what it hasn't got, or mixes the two sides.
"""

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from running import SCRIPTS, run

from numpygpt import checkpoint, device
from numpygpt.gradcheck import gradcheck
from numpygpt.layers import Linear

TESTS = Path(__file__).parent
STAND_IN = TESTS / "stand_in"
SIZES = ("--d-model", 16, "--num-layers", 1, "--num-heads", 2, "--context-length", 8)
FLAGS = ("--steps", 6, "--eval-interval", 3, "--batch-size", 4, "--accumulate", 2, "--dropout", 0.1, "--threads", 1)
TRAIN = (*SIZES, *FLAGS, "--sample-length", 12)


def on_stand_in(script, *args, gpus=1, **kwargs):
    """Run a script as `run` does, where CuPy is the stand-in."""
    path = os.pathsep.join(map(str, filter(None, (STAND_IN, TESTS, os.environ.get("PYTHONPATH")))))
    return run(script, *args, env={**os.environ, "PYTHONPATH": path, "STAND_IN_GPUS": str(gpus)}, **kwargs)


def both(script, *args):
    """Run a script on the CPU and on the stand-in; return what each printed."""
    printed = {}
    for name, start in (("cpu", run), ("cuda", on_stand_in)):
        result = start(script, *(str(arg).replace("DEVICE", name) for arg in args), "--device", name)
        assert result.returncode == 0, result.stderr
        printed[name] = result.stdout.replace(name, "DEVICE")
    return printed


def weights(run):
    return checkpoint.load(run)[0].flat.value.tobytes()


def metrics(run):
    """All metrics but the times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in line.items() if name != "tokens_per_s"} for line in lines]


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """Two finished runs, "cpu" and "cuda", in a folder, and what they printed."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, both("train_shakespeare.py", "--corpus", text, "--out", folder / "DEVICE", *TRAIN)


def test_training(trained):
    folder, printed = trained
    assert printed["cuda"] == printed["cpu"]
    assert "a sample:" in printed["cuda"]
    assert weights(folder / "cuda") == weights(folder / "cpu")
    assert metrics(folder / "cuda") == metrics(folder / "cpu")
    assert json.loads((folder / "cuda" / "config.json").read_text())["device"] == "cuda"


def test_a_run_that_was_killed_goes_on_where_it_was_and_ends_on_the_same_bits(trained, tmp_path):
    folder = trained[0]
    out = Path(shutil.copytree(folder / "cuda", tmp_path / "run"))
    shutil.rmtree(out / "step-00000006")  # killed after the last but one save
    result = on_stand_in("train_shakespeare.py", "--out", out, "--resume")
    assert result.returncode == 0, result.stderr
    assert "resuming" in result.stderr
    assert weights(out) == weights(folder / "cpu")
    assert metrics(out) == metrics(folder / "cpu")


def test_a_run_stays_on_its_device(trained):
    result = on_stand_in("train_shakespeare.py", "--out", trained[0] / "cuda", "--resume", "--device", "cpu")
    assert result.returncode == 2
    assert "--device is cuda in the run" in result.stderr


def test_fine_tuning_with_adapters(trained, tmp_path):
    flags = ("--init", trained[0] / "cpu", "--lora", 2, "--steps", 2, "--batch-size", 2, "--sample-length", 3)
    text = json.loads((trained[0] / "cpu" / "config.json").read_text())["corpus"]
    printed = both("train_shakespeare.py", "--corpus", text, "--out", tmp_path / "DEVICE", "--threads", 1, *flags)
    assert printed["cuda"] == printed["cpu"]
    assert weights(tmp_path / "cuda") == weights(tmp_path / "cpu")


def test_byte_pairs(text, tmp_path):
    pytest.importorskip("tokenizers")
    flags = ("--tokenizer", "bpe", "--vocab-size", 300, "--positions", "learned", "--tie-embeddings", "--steps", 2)
    printed = both("train_shakespeare.py", "--corpus", text, "--out", tmp_path / "DEVICE", *TRAIN, *flags)
    assert printed["cuda"] == printed["cpu"]
    assert weights(tmp_path / "cuda") == weights(tmp_path / "cpu")


@pytest.mark.parametrize(
    "flags", [("--prompt", "To be", "--prompt", "t", "--length", 20), ("--explain", "--length", 2)]
)
def test_sampling(trained, flags):
    printed = both("sample.py", trained[0] / "cpu", "--seed", 1, *flags)
    assert printed["cuda"] == printed["cpu"]


def test_a_trace(trained, tmp_path):
    both("trace.py", "--out", tmp_path / "DEVICE.html", "--text", "To be", "--num-kv-heads", 1)
    assert (tmp_path / "cuda.html").read_bytes() == (tmp_path / "cpu.html").read_bytes()
    both("trace.py", "--out", tmp_path / "DEVICE.html", "--text", "To be", "--model", trained[0] / "cpu")
    assert (tmp_path / "cuda.html").read_bytes() == (tmp_path / "cpu.html").read_bytes()


def test_a_conversation(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("jinja2")
    pytest.importorskip("tokenizers")
    import small_gguf

    path = small_gguf.write(tmp_path / "small.gguf", small_gguf.small_model())
    answers = {}
    for name, start in (("cpu", run), ("cuda", on_stand_in)):
        flags = ("--model", path, "--length", 5, "--seed", 0, "--device", name)
        result = start("chat.py", *flags, input="Hello\nthe inn\n")
        assert result.returncode == 0, result.stderr
        answers[name] = result.stdout
    assert answers["cuda"] == answers["cpu"]


def test_checking_gradients():
    result = on_stand_in("check_gradients.py", "--device", "cuda", "--draws", 1)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "every gradient is right" in result.stdout


@pytest.fixture
def cuda(monkeypatch):
    """The stand-in in this process."""
    monkeypatch.syspath_prepend(STAND_IN)
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    device.cupy_with_gpu.cache_clear()
    yield
    sys.modules.pop("cupy", None)
    device.cupy_with_gpu.cache_clear()


def test_a_wrong_gradient_on_the_device_shows(cuda):
    import check_gradients

    class Wrong(Linear):
        def backward(self, dy):
            self.weight.grad += 1
            return super().backward(dy)

    layer = check_gradients.OnDevice(Wrong(3, 2, dtype=np.float64, rng=0), "cuda")
    report = gradcheck(layer, np.random.default_rng(0).standard_normal((4, 3)))
    assert [row.name for row in report.rows if not row.ok] == ["weight"]


@pytest.mark.parametrize("name", ["position", "norm-position", "preactivation", "norm-kind", "bias-correction"])
def test_experiments(cuda, name):
    from studies import STUDIES
    from studies.setting import Setting
    from studies.study import rounded

    tokens = np.random.default_rng(0).integers(0, 9, 400).astype(np.uint16)
    numbers = {}
    for where in device.DEVICES:
        setting = Setting(tokens[:300], tokens[300:], 9, seeds=1, given_steps=2, quick=True, device=where)
        numbers[where] = rounded(STUDIES[name].measure(setting))
        for times in ("layer_ratios", "step_ratios"):
            numbers[where].pop(times, None)
    assert numbers["cuda"] == numbers["cpu"]


# A device that can't be had

WITHOUT = {
    "train_shakespeare.py": ("--out", "run"),
    "sample.py": ("run",),
    "chat.py": (),
    "trace.py": ("--out", "trace.html"),
    "check_gradients.py": (),
    "experiments.py": ("position", "--quick", "--out", "run"),
}


def refused(result, folder):
    """The one line that a script ended with, having written nothing."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert not list(folder.iterdir())
    return line


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
@pytest.mark.parametrize("script", WITHOUT)
def test_without_cupy_the_extras_are_named(script, tmp_path):
    if script == "experiments.py":
        pytest.importorskip("matplotlib")
    line = refused(run(script, *WITHOUT[script], "--device", "cuda", cwd=tmp_path), tmp_path)
    assert line == 'error: device "cuda" needs CuPy: pip install -e ".[cuda12]" or ".[cuda13]"'


@pytest.mark.parametrize("script", WITHOUT)
def test_without_a_gpu_the_reason_is_given_in_one_line(script, tmp_path):
    if script == "experiments.py":
        pytest.importorskip("matplotlib")
    line = refused(on_stand_in(script, *WITHOUT[script], "--device", "cuda", gpus=0, cwd=tmp_path), tmp_path)
    assert line.startswith('error: device "cuda" can\'t be used here: cudaErrorInsufficientDriver: CUDA driver version')
