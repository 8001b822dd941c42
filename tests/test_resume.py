"""Runs that end badly and go on: other processes, killed, on full disks, with damaged files."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from running import SCRIPTS, TEXT, run

from numpygpt import checkpoint, durable


def flags(line):
    return line.split()


SMALL = flags("--d-model 16 --num-layers 1 --num-heads 2 --context-length 16 --batch-size 4 --sample-length 0")
# Dropout and parts, so that their generators and sums must go on too.
FLAGS = SMALL + flags("--steps 20 --eval-interval 5 --dropout 0.2 --accumulate 3")


def train(*args, **kwargs):
    return run("train_shakespeare.py", *args, **kwargs)


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A run that nothing befell."""
    out = tmp_path_factory.mktemp("whole") / "run"
    result = train("--corpus", text, "--out", out, *FLAGS)
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture
def stopped(whole, tmp_path):
    """The same run as a death after step 15 leaves it, the log half a line further."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "step-00000020")
    log = out / "metrics.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:18])[:-10])
    return out


def same(one, other):
    """Whether two runs ended on the same bits (weights, moments, generators) by the same steps."""

    def steps(run):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if k != "tokens_per_s"} for row in rows]

    last = [checkpoint.checkpoints(run)[0] for run in (one, other)]
    files = all(
        (last[0] / name).read_bytes() == (last[1] / name).read_bytes()
        for name in ("model.safetensors", "training.safetensors", "tokenizer.json")
    )
    return files and steps(one) == steps(other)


@pytest.mark.parametrize("step", [10, 15])
def test_a_resumed_run_ends_on_the_same_bits(whole, stopped, step):
    """The numbers of karpathy/nanoGPT#467: 20 steps are 10, a restart and 10."""
    if step == 10:
        shutil.rmtree(stopped / "step-00000015")
    result = train("--resume", "--out", stopped)
    assert result.returncode == 0, result.stderr
    assert "resuming from" in result.stderr
    assert f"step-000000{step}" in result.stderr
    assert same(whole, stopped)
    assert checkpoint.load(stopped)[1]["trainer"]["best_loss"] > 0


def test_the_sample_of_a_resumed_run_is_that_of_one_that_never_stopped(text, tmp_path):
    flags = [*SMALL, "--steps", 10, "--eval-interval", 5, "--seed", 7, "--sample-length", 40]
    first = train("--corpus", text, "--out", tmp_path, *flags)
    shutil.rmtree(tmp_path / "step-00000010")
    again = train("--resume", "--out", tmp_path, "--sample-length", 40)
    sample, sample_again = (result.stdout.split("a sample:")[1] for result in (first, again))
    assert len(sample) > 40
    assert sample == sample_again


def test_resuming_a_finished_run_changes_nothing(whole, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    result = train("--resume", "--out", out, "--sample-length", 10)
    assert result.returncode == 0, result.stderr
    assert "validation loss: " in result.stdout
    assert same(whole, out)


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(whole, stopped):
    path = stopped / "step-00000015" / "training.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    result = train("--resume", "--out", stopped)
    assert result.returncode == 0, result.stderr
    assert f"{path} is damaged" in result.stderr
    assert "cut off within or before the tensor v." in result.stderr
    assert f"moved to {stopped / 'damaged-step-00000015'}" in result.stderr
    assert "resuming from" in result.stderr
    assert "step-00000010" in result.stderr
    assert same(whole, stopped)


@pytest.mark.skipif(sys.platform == "win32", reason="no kill -9 there")
def test_a_run_killed_again_and_again_ends_on_the_same_bits(whole, text, tmp_path):
    out, rng = tmp_path / "run", random.Random(0)
    slow = [*FLAGS, "--keep", "2"]
    command = [sys.executable, SCRIPTS / "train_shakespeare.py", "--out", out]
    for _ in range(3):
        arguments = ["--resume"] if checkpoint.checkpoints(out) else ["--corpus", text, *slow]
        with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            for line in process.stdout:
                if line.startswith(b"model:"):  # the last line before the first step
                    break
            time.sleep(0.2 * rng.random())
            process.send_signal(signal.SIGKILL)
        found, damaged = checkpoint.newest_whole(out)
        assert damaged == {}
    result = train("--out", out, *(["--resume"] if found else ["--corpus", text, *slow]))
    assert result.returncode == 0, result.stderr
    assert same(whole, out)


@pytest.mark.skipif(sys.platform == "win32", reason="no limits there")
def test_a_full_disk_ends_the_run_with_what_was_saved(whole, stopped):
    import resource

    size = 20_000  # of a file: less than the weights
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))}
    result = train("--resume", "--out", stopped, **limit)
    assert result.returncode == 1
    assert "stopped after step 20" in result.stderr
    assert "the checkpoint of step 15" in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in stopped.iterdir() if path.name.startswith(".tmp")] == []
    assert train("--resume", "--out", stopped).returncode == 0
    assert same(whole, stopped)


def altered(tmp_path, body):
    """The training script with something done to it first."""
    path = tmp_path / "altered.py"
    path.write_text(
        f"""
import os, signal, sys
sys.path.insert(0, {str(SCRIPTS)!r})
import train_shakespeare
from numpygpt import cli
from numpygpt.train import Trainer
{body}
cli.run(train_shakespeare.main)
"""
    )
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="no limits there")
def test_a_full_disk_at_ctrl_c_is_said_in_one_line(stopped, tmp_path):
    import resource

    size = 20_000
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))}
    body = """
step = Trainer.train_step
Trainer.train_step = lambda self: os.kill(os.getpid(), signal.SIGINT) or step(self)
"""
    script = altered(tmp_path, body)
    result = run(script, "--resume", "--out", stopped, **limit)
    assert result.returncode == 1
    assert "stopped after step 16" in result.stderr
    assert "the checkpoint of step 15" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals can't be sent to another process there")
def test_a_broken_off_evaluation_is_logged_once_and_its_checkpoint_is_kept_if_it_is_the_best(text, tmp_path):
    body = """
losses = {5: 3.0, 10: 1.0, 15: 2.0, 20: 2.5}
def evaluate(self, stop=lambda: False):
    if self.step == 10 and "--resume" not in sys.argv:
        os.kill(os.getpid(), signal.SIGINT)
    return None if stop() else losses[self.step]
Trainer.evaluate = evaluate
"""
    script, out = altered(tmp_path, body), tmp_path / "run"
    result = run(script, "--corpus", text, "--out", out, *FLAGS)
    assert result.returncode == 130, result.stderr
    assert "Stopped after step 10 of 20" in result.stdout
    log = out / "metrics.jsonl"
    with log.open("a") as file:
        file.write('{"step": 10, "loss": 1.5, "validation_loss": 1.0}\n')  # as a run that went on and died leaves it
    result = run(script, "--resume", "--out", out, "--keep", 1)
    assert result.returncode == 0, result.stderr
    assert "The lowest was 1.0000; that checkpoint is kept too" in result.stdout
    assert "20/20" in result.stderr
    assert [path.name for path in checkpoint.checkpoints(out)] == ["step-00000020", "step-00000010"]
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert rows[9]["validation_loss"] == 1.0
    assert "lr" in rows[9]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["--config", "config.json"], "leave out --config"),
        (["--keep", "0"], "keep"),
        (["--minutes", "nan"], "minutes"),
        (["--sample-length", "-1"], "sample_length"),
        (["--lr", "0.5"], "--lr is 0.003 in the run"),
        (["--steps", "40"], "--steps is 20"),
        (["--corpus", "plays"], "--corpus is"),
        (["--bias", "--d-model", "16"], "--bias is False"),
    ],
)
def test_a_flag_that_does_not_fit_the_run_is_refused_by_name(stopped, changed, named):
    (stopped / "step-00000020").mkdir()  # a damaged checkpoint is not moved yet
    before = sorted(path.name for path in stopped.iterdir())
    result = train("--resume", "--out", stopped, *changed)
    assert result.returncode == 2
    assert named in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(path.name for path in stopped.iterdir()) == before


def test_flags_that_fit_may_be_given_again(whole, stopped, text):
    result = train("--resume", "--out", stopped, "--corpus", text, *FLAGS, "--keep", 1)
    assert result.returncode == 0, result.stderr
    assert same(whole, stopped)


def test_a_run_goes_on_with_its_tokens_whatever_becomes_of_the_text(whole, stopped, text):
    content = text.read_text(encoding="utf-8")
    tokens = stopped / "tokens.bin"
    try:
        text.write_text(content[:-40], encoding="utf-8")
        moved = tokens.rename(tokens.with_name("elsewhere"))
        result = train("--resume", "--out", stopped)
        assert result.returncode == 2
        assert f"--corpus {text} doesn't hold any more what {stopped / 'step-00000015'} was trained on" in result.stderr
        assert not tokens.exists()
        moved.rename(tokens)
        assert train("--resume", "--out", stopped).returncode == 0
    finally:
        text.write_text(content, encoding="utf-8")
    assert same(whole, stopped)


@pytest.mark.parametrize("damage", [lambda c: b"", lambda c: c[:-1], lambda c: c[:-1] + b"\0", lambda c: None])
def test_lost_tokens_are_made_again_from_the_text(whole, stopped, damage):
    tokens = stopped / "tokens.bin"
    content = damage(tokens.read_bytes())
    tokens.unlink()
    if content is not None:
        tokens.write_bytes(content)
    result = train("--resume", "--out", stopped)
    assert result.returncode == 0, result.stderr
    assert same(whole, stopped)
    assert tokens.read_bytes() == (whole / "tokens.bin").read_bytes()


def test_a_file_of_tokens_is_a_corpus_with_the_tokenizer_beside_it(whole, tmp_path):
    out, corpus = tmp_path / "run", ["--corpus", whole / "tokens.bin"]
    result = train(*corpus, "--out", out, *FLAGS)
    assert result.returncode == 0, result.stderr
    assert f"{len(TEXT):,} characters" in result.stdout
    assert not (out / "tokens.bin").exists()
    weights = [checkpoint.load(folder)[0].flat.value for folder in (whole, out)]
    assert np.array_equal(*weights)
    assert train("--resume", "--out", out).returncode == 0
    for wrong in (["--tokenizer", "char"], ["--vocab-size", 300]):
        result = train(*corpus, *wrong, "--out", tmp_path / "another", *FLAGS)
        assert result.returncode == 2
        assert f"{whole / 'tokens.bin'} has a tokenizer beside it" in result.stderr
        assert not (tmp_path / "another").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="no such lock there")
def test_two_runs_are_not_in_one_folder(stopped, text):
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with durable.locked(stopped):
        result = train("--resume", "--out", stopped)
    assert result.returncode == 2
    assert f"another program is at work in {stopped}" in result.stderr
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


def test_a_new_run_does_not_touch_an_old_one(whole, text):
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    result = train("--corpus", text, "--out", whole, *FLAGS)
    assert result.returncode == 2
    assert "--resume" in result.stderr
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


def test_a_run_that_cannot_begin_leaves_the_tokens_that_were_there_and_nothing_of_killed_ones(text, tmp_path):
    flags = ["--corpus", text, "--out", tmp_path, *SMALL, "--steps", 2]
    (tmp_path / ".tmp-tokens.bin-x").touch()  # kill -9 while the corpus was encoded
    (tmp_path / "tokens.bin").write_bytes(b"of someone else")
    result = train(*flags, "--context-length", 5000)
    assert result.returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.bin"]
    assert (tmp_path / "tokens.bin").read_bytes() == b"of someone else"
    result = train(*flags, "--lr", "1e30")
    assert result.returncode == 1
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp")]
    assert train(*flags).returncode == 0


def test_there_must_be_something_to_resume(tmp_path):
    result = train("--resume", "--out", tmp_path / "missing")
    assert result.returncode == 2
    assert f"{tmp_path / 'missing'} holds no checkpoint to go on from: leave out --resume" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_config_of_a_run_makes_it_again(whole, tmp_path):
    out = tmp_path / "again"
    result = train("--config", whole / "config.json", "--out", out)
    assert result.returncode == 0, result.stderr
    assert same(whole, out)


def test_minutes_end_a_run_that_can_go_on(text, tmp_path):
    out = tmp_path / "run"
    result = train("--corpus", text, "--out", out, *SMALL, "--steps", 10**6, "--minutes", 0.005)
    assert result.returncode == 0, result.stderr
    assert "validation loss: " in result.stdout
    first = checkpoint.load(out)[1]["step"]
    assert 0 < first < 10**6
    assert train("--resume", "--out", out, "--minutes", 0.005).returncode == 0
    assert checkpoint.load(out)[1]["step"] > first


def test_the_folder_of_a_run_and_each_checkpoint_can_be_sampled(whole):
    for folder in (whole, whole / "step-00000015"):
        result = run("sample.py", folder, "--length", 5)
        assert result.returncode == 0, result.stderr


def test_the_newest_and_the_best_are_kept(whole):
    kept = {int(path.name[5:]): checkpoint.load(path)[1] for path in checkpoint.checkpoints(whole)}
    assert {10, 15, 20} <= kept.keys()
    assert min(state["validation_loss"] for state in kept.values()) == kept[20]["trainer"]["best_loss"]
