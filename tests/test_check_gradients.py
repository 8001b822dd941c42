"""The script that checks every gradient: all of them are in it, a wrong one shows, and so does your own layer."""

import os
import re
import sys

import pytest
from running import SCRIPTS, run

from numpygpt import layers

sys.path.insert(0, str(SCRIPTS))
import check_gradients

MY_LAYERS = """
import numpy as np


class Cube:
    factor = 3

    def forward(self, x):
        self.x = x
        return x**3

    def backward(self, dy):
        return self.factor * self.x**2 * dy


class Wrong(Cube):
    factor = 2


class Raises(Cube):
    def backward(self, dy):
        return dy["x"]


class Scale:
    def __init__(self, dtype):
        self.w, self.dw = np.arange(1, 4, dtype=dtype), np.zeros(3, dtype)

    def forward(self, x):
        self.x = x
        return self.w * x

    def backward(self, dy):
        self.dw += np.sum(self.x * dy, axis=0)
        return self.w * dy


def right():
    return Cube(), np.arange(1.0, 4.0)


def wrong():
    return Wrong(), np.arange(1.0, 4.0)


def drawn(rng):
    return Cube(), rng.standard_normal((2, 3))


def with_parameters(rng, dtype=np.float64):
    return Scale(dtype), rng.standard_normal((2, 3)).astype(dtype), {"parameters": {"w": "dw"}}


def in_float32(rng):
    return with_parameters(rng, np.float32)


def raises():
    return Raises(), np.arange(3.0)


def of_integers():
    return Cube(), np.arange(3.0, dtype=np.float16)


number = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mine")
    (path / "my_layers.py").write_text(MY_LAYERS)
    return path


def check(folder, function, *args):
    return run("check_gradients.py", "--layer", f"my_layers:{function}", *args, cwd=folder)


def test_every_layer_and_the_model_are_checked():
    assert set(check_gradients.LAYERS) == {*layers.__all__, "TransformerLM"}


@pytest.mark.parametrize("name", check_gradients.LAYERS)
def test_ours_are_right_and_drawn_with_other_numbers_each_time(name, unchecked):
    reports = list(check_gradients.reports_of_ours(name, 3, 0, "cpu"))
    assert all(report.ok and not report.skipped for report in reports)
    assert len({str(report) for report in reports}) == 3


def test_the_table_and_the_verdict():
    result = run("check_gradients.py", "--draws", 2)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.rstrip("\n").split("\n")
    assert [line.split()[0] for line in lines[1:-2]] == list(check_gradients.LAYERS)
    assert all(line.endswith(" s  ok") and "%" in line for line in lines[1:-2])
    assert re.fullmatch(r"every gradient is right \(\d+ s\)", lines[-1])  # no colours: this isn't a terminal


def test_one_of_ours_alone():
    lines = run("check_gradients.py", "--only", "RMSNorm", "--draws", 2, "--seed", 7).stdout.split("\n")
    assert [line.split()[:3] for line in lines[1:2]] == [["RMSNorm", "2", "4"]]


def test_your_own_layer_is_checked_and_its_report_shown(folder):
    result = check(folder, "right")
    assert result.returncode == 0, result.stderr
    assert "every gradient is right" in result.stdout
    assert re.search(r"^input 0 +complex step +3 of 3 elements .* ok$", result.stdout, re.MULTILINE)


def test_a_wrong_gradient_ends_with_status_1(folder):
    result = check(folder, "wrong")
    assert result.returncode == 1 and not result.stderr
    assert "1 of 1 wrong" in result.stdout
    assert "WRONG is 0.6667 times what it should be" in result.stdout


@pytest.mark.parametrize(("function", "draws"), [("right", 1), ("drawn", 4), ("with_parameters", 4), ("in_float32", 4)])
def test_a_function_that_takes_a_generator_is_drawn_from_again(folder, function, draws):
    result = check(folder, function, "--draws", 4)
    assert result.returncode == 0, result.stdout
    assert result.stdout.split("\n")[1].split()[1] == str(draws)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--layer", "my_layers"], "must be package.module:function, not 'my_layers'"),
        (["--layer", "no_such_module:f"], "No module named 'no_such_module'"),
        (["--layer", "my_layers:absent"], "has no attribute 'absent'"),
        (["--layer", "my_layers:number"], "number must be a function"),
        (["--layer", "my_layers:of_integers"], "input 0 is float16"),
        (["--layer", "my_layers:raises"], "my_layers.py, line 22"),
        (["--draws", "0"], "draws must be an integer of at least 1, not 0"),
        (["--seed", "-1"], "seed.*-1"),
        (["--only", "Lineal"], "invalid choice: 'Lineal'"),
    ],
)
def test_a_mistake_is_named_without_a_traceback(folder, args, named):
    result = run("check_gradients.py", *args, cwd=folder)
    assert result.returncode == 2 and re.search(named, result.stderr) and "Traceback" not in result.stderr
    assert not result.stdout.count(" ok")


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
@pytest.mark.parametrize(("function", "colour"), [("right", "\x1b[32mok"), ("wrong", "\x1b[31mWRONG")])
def test_the_verdict_is_green_or_red_in_a_terminal(folder, function, colour):
    import subprocess

    def output(**environment):
        parent, child = os.openpty()
        command = [sys.executable, SCRIPTS / "check_gradients.py", "--layer", f"my_layers:{function}"]
        clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        subprocess.run(command, stdout=child, cwd=folder, env={**clean, **environment}, timeout=60)
        os.close(child)
        text = os.read(parent, 100_000).decode()
        os.close(parent)
        return text

    assert colour in output() and "\x1b" not in output(NO_COLOR="1")
