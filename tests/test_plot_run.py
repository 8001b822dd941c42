"""The script that draws runs: what is in its pictures, and what it refuses."""

import json
import os
import sys

import numpy as np
import pytest
from running import SCRIPTS, run

pytest.importorskip("matplotlib", reason='needs pip install -e ".[plot]"')
pytest.importorskip("uniplot", reason='needs pip install -e ".[plot]"')
sys.path.insert(0, str(SCRIPTS))
import plot_run


def write(folder, losses, per_character=None, every=10):
    """Write the log of a run that was evaluated now and then."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step, loss in enumerate(losses, 1):
            row = {"step": step, "loss": float(loss)}
            if step % every == 0:
                row["validation_loss"] = loss + 0.5
                if per_character:
                    row["validation_loss_per_character"] = per_character * (loss + 0.5)
            file.write(json.dumps(row) + "\n")
    return folder


@pytest.fixture
def runs(tmp_path):
    """Two runs whose folders are named alike; one counts by characters, and wrote half a line."""
    one = write(tmp_path / "one" / "run", np.linspace(6, 2, 40), 0.5)
    with (one / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    return one, write(tmp_path / "other" / "run", np.linspace(4, 2, 60))


@pytest.fixture
def draw(tmp_path, monkeypatch, capsys):
    """Run the script in this process, which is quicker: returns status, output and errors."""
    monkeypatch.chdir(tmp_path)

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["plot_run.py", *map(str, args)])
        try:
            status = plot_run.main()
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return call


def test_a_picture_and_a_text_are_drawn(runs, tmp_path):
    out = tmp_path / "new" / "loss.png"
    result = run("plot_run.py", *runs, runs[0], "--terminal", "--out", out)
    assert result.returncode == 0, result.stderr
    *text, saved = result.stdout.splitlines()
    assert saved == f"Saved {out}"
    names = [os.path.join("one", "run"), os.path.join("other", "run") + " (per token)"]
    assert [result.stdout.count(name) for name in names] == [2, 2]  # training and validation
    assert result.stderr.count("\n") == 1
    assert f"{os.path.join('other', 'run')} is drawn in nats a token" in result.stderr
    assert "nats a character" in result.stdout
    assert "\x1b" not in result.stdout
    assert max(map(len, text)) <= 80
    assert len(text) < 24
    content = out.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert 10_000 < len(content) < 300_000
    assert os.listdir(out.parent) == ["loss.png"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere there is always a display")
@pytest.mark.parametrize(("display", "flags", "text"), [("", [], 1), (":0", [], 0), ("", ["--no-terminal"], 0)])
def test_text_is_for_those_without_a_display(draw, runs, monkeypatch, display, flags, text):
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    status, output, errors = draw(runs[1], *flags)
    assert status == 0, errors
    assert output.endswith("Saved loss.png\n")
    assert ("nats a token" in output) == text
    assert os.path.exists("loss.png")


def test_all_losses_of_a_run_are_counted_by_characters(runs):
    drawn = plot_run.load(runs[0], "")
    np.testing.assert_allclose(drawn.training, [np.arange(1, 41), np.linspace(3, 1, 40)])
    np.testing.assert_allclose(drawn.validation, [[10, 20, 30, 40], np.linspace(3, 1, 40)[9::10] + 0.25])
    assert drawn.smoothed[1, 0] == 3
    assert 1 < drawn.smoothed[1, -1] < 2


def test_long_curves_are_smoothed_and_then_thinned(tmp_path):
    losses = np.random.default_rng(0).uniform(1, 2, 9001)
    drawn = plot_run.load(write(tmp_path, losses), "")
    average = plot_run.Smoothed()
    for loss in losses:
        average.add(loss)
    assert drawn.training.shape == drawn.smoothed.shape == (2, 1801)
    assert drawn.training[:, -1].tolist() == [9001, losses[-1]]
    assert drawn.smoothed[1, -1] == average.value


@pytest.mark.parametrize("every", [1, 50])
def test_a_bad_start_leaves_room_for_the_rest(tmp_path, every):
    losses = np.linspace(3, 2, 100)
    losses[:3] = 50
    bottom, top = plot_run.limits([plot_run.load(write(tmp_path, losses, every=every), "")])
    assert 1.8 < bottom < 2
    assert 2.9 < top < 3.6


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_run_of_one_step_is_drawn(tmp_path):
    drawn = [plot_run.load(write(tmp_path, [3]), "a $name$")]
    plot_run.picture(drawn).savefig(tmp_path / "loss.png")
    assert "a $name$, training" in plot_run.text(drawn)
    assert "validation" not in plot_run.text(drawn)


@pytest.mark.parametrize(
    ("content", "flags", "named"),
    [
        (None, [], "isn't there"),
        ("", [], "first step"),
        ('{"step": 1, "loss": 2.5}', [], "first step"),  # no line is whole yet
        ('{"step": 1}\n', [], "'loss'"),
        ('{"step": 1, "loss": "a"}\n', [], "'a'"),
        ('{"step": 1, "loss": NaN}\n', [], "finite"),
        ('{"step": 1, "loss": 2.5}\n', ["--out", "loss.pdf"], "loss.pdf must end in .png"),
        ('{"step": 1, "loss": 2.5}\n', ["--out", "metrics.jsonl/loss.png"], "metrics.jsonl"),
    ],
)
def test_a_mistake_is_named_in_one_line_and_nothing_written(draw, tmp_path, content, flags, named):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    before = os.listdir(tmp_path)
    status, output, errors = draw(tmp_path, *flags)
    assert status == 2
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert named in errors
    assert flags or str(tmp_path) in errors
    assert output == ""
    assert os.listdir(tmp_path) == before


@pytest.mark.parametrize("library", ["matplotlib", "uniplot"])
def test_without_a_library_the_extra_is_named(runs, tmp_path, library):
    (tmp_path / f"{library}.py").write_text("raise ImportError")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    out = tmp_path / "new" / "loss.png"
    result = run("plot_run.py", *runs, "--terminal", "--out", out, env={**os.environ, "PYTHONPATH": path})
    assert result.returncode == 2
    assert result.stderr == f'error: this needs the package {library}: pip install -e ".[plot]"\n'
    assert result.stdout == ""
    assert not out.parent.exists()
