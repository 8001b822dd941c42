"""The scripts as a user runs them: other processes, small models, wrong input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from running import SCRIPTS, TEXT, run

from numpygpt import checkpoint
from numpygpt.train import TrainConfig

sys.path.insert(0, str(SCRIPTS))
from training.flags import RECIPES, given_flags, make_parser, parse_arguments, words

SMALL = ["--d-model", "16", "--num-layers", "1", "--num-heads", "2", "--context-length", "16", "--batch-size", "4"]


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    result = run("train_shakespeare.py", "--corpus", text, "--out", out, "--steps", 30, *SMALL)
    assert result.returncode == 0, result.stderr
    return out, result


def newest(run):
    return checkpoint.checkpoints(run)[0] / "model.safetensors"


def test_training_reports_the_validation_loss_and_a_sample(trained):
    _, result = trained
    loss = float(result.stdout.split("\nvalidation loss: ")[1].split("\n")[0])
    assert 0 < loss < 3.3  # ln 27, of its characters
    assert len(result.stdout.split("a sample:\n")[1]) > 500
    assert "30/30" in result.stderr
    assert "tokens_per_s=" in result.stderr
    assert "loss=" in result.stderr
    assert "lr=" in result.stderr


def test_sampling_goes_on_from_the_prompt_and_repeats_with_the_seed(trained):
    out, _ = trained
    first, second = (run("sample.py", out, "--prompt", "To be", "--length", 40, "--seed", 3) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("To be")
    assert len(first.stdout.rstrip("\n")) >= 40
    assert first.stdout == second.stdout
    other = run("sample.py", out, "--prompt", "To be", "--length", 40, "--seed", 4)
    assert other.stdout != first.stdout


def test_a_text_ends_before_a_stop_string(trained):
    out, _ = trained
    whole = run("sample.py", out, "--prompt", "To be", "--length", 60, "--seed", 3).stdout
    written = whole.removeprefix("To be")
    stop = written[10:13]
    result = run("sample.py", out, "--prompt", "To be", "--length", 60, "--seed", 3, "--stop", "@@", "--stop", stop)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "To be" + written[: written.index(stop)] + "\n"


def test_several_prompts_go_on_each_by_itself(trained):
    out, _ = trained
    prompts = ["To be", "n", "Whether 'tis nobler in the mind"]
    flags = [flag for prompt in prompts for flag in ("--prompt", prompt)]
    result = run("sample.py", out, *flags, "--length", 20, "--temperature", 0)
    assert result.returncode == 0, result.stderr
    alone = [run("sample.py", out, "--prompt", p, "--length", 20, "--temperature", 0).stdout for p in prompts]
    assert result.stdout == f"{'-' * 40}\n".join(alone)


def test_explain_shows_what_each_character_was_drawn_from_and_then_the_text(trained):
    out, _ = trained
    flags = ["--prompt", "To be", "--length", 6, "--seed", 3, "--top-k", 3]
    text = run("sample.py", out, *flags).stdout
    result = run("sample.py", out, *flags, "--explain")
    assert result.returncode == 0, result.stderr
    *tables, last = result.stdout.split("\n\n", 6)
    assert last == text
    for table, character in zip(tables, text[5:], strict=False):
        rows = table.splitlines()
        assert len(rows) == 3
        assert [row for row in rows if row.startswith("-> " + repr(character))]
        percents = [float(row.split(" %")[0].split()[-1]) for row in rows]
        assert percents == sorted(percents, reverse=True)
        assert abs(sum(percents) - 100) < 0.2
        assert [row.count("#") for row in rows] == [pytest.approx(p * 0.4, abs=0.6) for p in percents]


def test_text_is_shown_as_it_comes(trained):
    out, _ = trained
    command = [sys.executable, SCRIPTS / "sample.py", out, "--prompt", "To be", "--length", "1000000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.read(7).startswith("To be")
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == ""


def test_the_same_flags_train_the_same_weights(trained, text, tmp_path):
    out, _ = trained
    run("train_shakespeare.py", "--corpus", text, "--out", tmp_path, "--steps", 30, *SMALL)
    assert newest(out).read_bytes() == newest(tmp_path).read_bytes()


def test_every_dress_trains(text, tmp_path):
    gpt2 = "--norm layernorm --ffn gelu_tanh --positions learned --bias --tie-embeddings --init gpt2 --dropout 0.1"
    original = "--norm layernorm --norm-position post --ffn relu --positions sinusoidal --num-kv-heads 1"
    for name, flags in (("gpt2", gpt2), ("original", original)):
        args = ["--corpus", text, "--out", tmp_path / name, "--steps", 2, *SMALL, *flags.split()]
        result = run("train_shakespeare.py", *args)
        assert result.returncode == 0, result.stderr
        assert "validation loss: " in result.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="signals can't be sent to another process there")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_between_steps_saves_and_says_so(text, tmp_path, number):
    args = ["--corpus", text, "--out", tmp_path, "--steps", "1000000", "--eval-interval", "1000000", *SMALL]
    command = [sys.executable, SCRIPTS / "train_shakespeare.py", *map(str, args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("model:"):  # the last line before the first step
                break
        time.sleep(1)
        os.kill(process.pid, number)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Stopped after step" in stdout
    assert "Stopping after this step" in stderr
    assert "Traceback" not in stderr
    assert run("sample.py", tmp_path, "--length", 5).returncode == 0


def test_a_diverging_run_names_step_and_layer_and_keeps_the_last_checkpoint(text, tmp_path):
    args = ["--corpus", text, "--out", tmp_path, "--steps", 50, "--lr", "1e30", *SMALL]
    result = run("train_shakespeare.py", *args)
    assert result.returncode == 1
    assert "smaller --lr" in result.stderr
    assert "in step 2 the " in result.stderr
    assert "ln_final" in result.stderr
    assert "nothing was saved" in result.stderr
    assert "Warning" not in result.stderr
    assert "Traceback" not in result.stderr


def test_a_reader_that_goes_away_costs_no_training(text, tmp_path):
    args = ["--corpus", text, "--out", tmp_path, "--steps", "40", "--eval-interval", "10", *SMALL]
    command = [sys.executable, SCRIPTS / "train_shakespeare.py", *map(str, args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.readline()  # the last one before training
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait(timeout=60) != 0
    assert "Traceback" not in stderr
    assert run("sample.py", tmp_path, "--length", 5).returncode == 0


def test_a_folder_that_cannot_be_written_to_is_refused_before_training(text, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        result = run("train_shakespeare.py", "--corpus", text, "--out", out, *SMALL)
        assert result.returncode == 2
        assert str(tmp_path / "file") in result.stderr
        assert result.stdout == ""
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--d-model", "0"], "d_model"),
        (["--d-model", "-8"], "-8"),
        (["--d-model", "15", "--num-heads", "3"], "5"),  # an odd head width
        (["--num-heads", "5"], "num_heads 5"),
        (["--num-heads", "4", "--num-kv-heads", "3"], "num_kv_heads 3"),
        (["--context-length", "100000"], "100000"),  # longer than the text
        (["--dropout", "1.5"], "1.5"),
        (["--lr", "nan"], "nan"),
        (["--steps", "0"], "steps"),
        (["--threads", "0"], "threads"),
        (["--vocab-size", "300"], "--tokenizer bpe"),
        (["--ffn", "swish"], "swish"),
        (["--recipe", "slow"], "slow"),
        (["--corpus", "no/such/file"], "no/such/file"),
        (["--corpus", "."], "."),
        (["--sample-length", "-1"], "sample_length"),
        (["--d-model", "1000000000000"], "smaller"),
    ],
)
def test_a_mistake_in_training_is_named_without_a_traceback(text, tmp_path, flags, named):
    out = tmp_path / "out"
    result = run("train_shakespeare.py", "--corpus", text, "--out", out, *SMALL, *flags)
    assert result.returncode == 2
    assert named in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.py")))
def test_an_unknown_flag_is_named_in_one_line(script):
    result = run(script, "--wings", "folder")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert "--wings" in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[1]", "no config.json"),
        ("[" * 100_000, "no config.json"),
        ('{"wings": 2}', "wings"),
        ('{"resume": true}', "resume"),
        ('{"lr": "a"}', "--lr"),
        ('{"lr": [1]}', "--lr"),
        ('{"lr": {"a": 1}}', "--lr"),
        ('{"lr": true}', "--lr"),
        ('{"bias": 3}', "--bias"),
        ('{"steps": 2.5}', "--steps"),
        ('{"sample_length": 2.5}', "--sample-length"),
        ('{"tokenizer": "words"}', "--tokenizer"),
        ('{"recipe": "slow"}', "--recipe"),
    ],
)
def test_a_config_with_a_value_of_another_kind_is_refused_by_name(tmp_path, monkeypatch, capsys, content, named):
    path = tmp_path / "config.json"
    path.write_text(content)
    monkeypatch.setattr(sys, "argv", ["train_shakespeare.py", "--config", str(path)])
    with pytest.raises(SystemExit) as end:
        parse_arguments(make_parser(""))
    assert end.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: --config {path}")
    assert named in errors
    assert errors.count("\n") == 1


def test_what_is_null_in_a_config_is_as_if_it_were_not_there(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text('{"seed": null, "d_ff": null, "lr": 1e-5, "bias": true, "tie_embeddings": false, "corpus": "-x"}')
    monkeypatch.setattr(sys, "argv", ["train_shakespeare.py", "--config", str(path), "--lr", "0.5"])
    parser = make_parser("")
    args = parse_arguments(parser)
    assert (args.seed, args.d_ff, args.lr) == (0, None, 0.5)
    assert (args.bias, args.tie_embeddings, args.corpus) == (True, False, "-x")
    assert given_flags(parser) == {"config", "lr"}


def flags_of(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["train_shakespeare.py", *map(str, words)])
    return parse_arguments(make_parser(""))


def test_a_recipe_gives_the_flags_that_are_not_given(tmp_path, monkeypatch, capsys):
    path, fast = tmp_path / "config.json", RECIPES["fast"]
    assert vars(make_parser("").parse_args(words(fast))).items() >= fast.items()  # such flags there are
    assert vars(flags_of(monkeypatch, "--recipe", "fast")).items() >= fast.items()
    args = flags_of(monkeypatch, "--steps", 7, "--recipe", "fast")
    assert (args.steps, args.eval_interval) == (7, fast["eval_interval"])
    path.write_text('{"recipe": "fast", "steps": 8}')
    args = flags_of(monkeypatch, "--config", path, "--seed", 1)
    assert (args.steps, args.eval_interval, args.seed, args.recipe) == (8, fast["eval_interval"], 1, "fast")
    with pytest.raises(SystemExit):
        flags_of(monkeypatch, "--config", path, "--recipe", "fast")
    assert "--recipe and --config" in capsys.readouterr().err
    assert flags_of(monkeypatch).steps == TrainConfig.steps


def test_a_resumed_run_keeps_its_recipe(text, tmp_path):
    out = tmp_path / "run"
    flags = [*SMALL, "--corpus", text, "--steps", 6, "--warmup-steps", 2, "--eval-interval", 3]
    first = run("train_shakespeare.py", "--recipe", "fast", "--out", out, *flags)
    assert first.returncode == 0, first.stderr
    shutil.rmtree(out / "step-00000006")
    again = run("train_shakespeare.py", "--resume", "--out", out)
    assert again.returncode == 0, again.stderr
    assert again.stdout.split("a sample:")[1] == first.stdout.split("a sample:")[1]
    stored = json.loads((out / "config.json").read_text())
    assert (stored["recipe"], stored["steps"], "sample_length" in stored) == ("fast", 6, False)
    other = tmp_path / "other"
    assert run("train_shakespeare.py", "--out", other, *flags).returncode == 0
    refused = run("train_shakespeare.py", "--resume", "--recipe", "fast", "--out", other)
    assert refused.returncode == 2
    assert "--recipe is None in the run" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--prompt", "aπ"], "π"),
        (["--prompt", ""], "empty"),
        (["--temperature", "-1"], "-1"),
        (["--top-k", "0"], "top_k"),
        (["--top-p", "2"], "top_p"),
        (["--length", "-1"], "length"),
        (["--seed", "-1"], "seed"),
        (["--repetition-penalty", "1e-320"], "repetition_penalty"),
        (["--stop", ""], "--stop"),
        (["--explain", "--prompt", "a", "--prompt", "b"], "--explain"),
        (["--prompt", "a", "--prompt", ""], "empty"),
    ],
)
def test_a_mistake_in_sampling_is_named_without_a_traceback(trained, flags, named):
    out, _ = trained
    result = run("sample.py", out, *flags)
    assert result.returncode == 2
    assert named in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04 not one")
    for folder in (tmp_path, tmp_path / "missing"):
        result = run("sample.py", folder)
        assert result.returncode == 2
        assert str(folder) in result.stderr
        assert "Traceback" not in result.stderr


def test_another_tokenizer_of_equal_size_is_refused(trained, text, tmp_path):
    out, _ = trained
    other = tmp_path / "other.txt"
    other.write_text(TEXT.replace("q", "Q"), encoding="utf-8")
    run("train_shakespeare.py", "--corpus", other, "--out", tmp_path, "--steps", 1, *SMALL)
    (tmp_path / "model.safetensors").write_bytes(newest(out).read_bytes())
    result = run("sample.py", tmp_path)
    assert result.returncode == 2
    assert "tokenizer" in result.stderr


def test_byte_pairs_of_a_folder_of_texts_are_trained_and_sampled(text, tmp_path):
    pytest.importorskip("tokenizers", reason='needs pip install -e ".[bpe]"')
    bpe = ["--corpus", text.parent, "--tokenizer", "bpe", *SMALL]
    result = run("train_shakespeare.py", *bpe, "--vocab-size", 300, "--out", tmp_path, "--steps", 5)
    assert result.returncode == 0, result.stderr
    assert "tokens of 300 kinds" in result.stdout
    loss, per_character = (
        float(result.stdout.split(f"\n{name}: ")[1].split("\n")[0]) for name in ("validation loss", "a character")
    )
    assert 0 < per_character < loss
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (round(row["validation_loss"], 4), round(row["validation_loss_per_character"], 4)) == (loss, per_character)
    result = run("sample.py", tmp_path, "--prompt", "aπ", "--length", 20)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("aπ")
    for wrong, named in (("255", "255"), ("0", "0"), ("x", "x")):
        result = run("train_shakespeare.py", *bpe, "--vocab-size", wrong, "--out", tmp_path / "another")
        assert result.returncode == 2
        assert named in result.stderr
        assert "Traceback" not in result.stderr
