"""The check of a device: on a stand-in for a GPU all is right, and one that computes wrongly is found out."""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import strict_array
from running import SCRIPTS, run
from strict_array import StrictArray, to_device

sys.path.insert(0, str(SCRIPTS))
import check_device
from device_check import cases, compare, machine, training
from numpygpt.layers import GELU, CrossEntropy

HERE = Path(__file__).parent
FEW = ("linear, bias", "gelu, tanh", "cross-entropy")


def verdicts(output):
    """The last cell of each row by the first."""
    cells = [line.strip("| ").split("|") for line in output.splitlines() if line.startswith("| ")]
    return {row[0].strip(): row[-1].strip() for row in cells[2:]}


@pytest.fixture
def check(monkeypatch, capsys):
    """Run the script in this process on the stand-in, with few layers; return its status and what it printed."""
    monkeypatch.syspath_prepend(HERE / "stand_in")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(machine, "mover", lambda device: to_device)
    monkeypatch.setattr(compare, "LAYERS", {name: cases.LAYERS[name] for name in FEW})
    monkeypatch.setattr(compare, "CONFIGS", {"gpt2": cases.CONFIGS["gpt2"]})
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "")

    def check(*flags):
        monkeypatch.setattr(sys, "argv", ["check_device.py", "--size", "S", "--steps", "0", *map(str, flags)])
        try:
            status = check_device.main()
        except SystemExit as end:
            status = end.code
        return status, capsys.readouterr()

    yield check
    sys.modules.pop("cupy", None)


def test_one_table_of_all_layers_models_ids_and_trainings():
    folders = [HERE.parent, HERE, HERE / "stand_in", os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    result = run("check_device.py", "--size", "S", "--steps", 3, "--without-pytorch", env=environment)
    assert result.returncode == 0, result.stderr
    assert re.match(r"a stand-in; driver for CUDA 13\.0; CuPy 14\.2\.0 with CUDA 12\.9; NumPy 2\.\S+; ", result.stdout)
    found = verdicts(result.stdout)
    assert list(found) == [
        *cases.LAYERS,
        *(f"model, {name}" for name in [*cases.CONFIGS, "size S"]),
        *(f"{what} out of range" for what in ("token id", "target", "position")),
        *(f"3 steps of S, numpygpt, {where}" for where in ("CPU", "GPU")),
    ]
    assert set(found.values()) == {"ok", "ok: IndexError", "the reference"}
    cpu, gpu = [line.split("|") for line in result.stdout.splitlines() if "steps of S" in line]
    assert not cpu[2].strip() and float(gpu[2].split(",")[0]) < 1e-6
    assert float(cpu[5]) > 0 and float(gpu[5]) > 0


def test_a_device_that_computes_wrongly_is_found_out(check, monkeypatch):
    right = StrictArray.__array_ufunc__

    def wrong(self, ufunc, method, *inputs, **kwargs):
        result = right(self, ufunc, method, *inputs, **kwargs)
        return result * np.float32(1 + 3e-5) if ufunc is np.tanh else result

    monkeypatch.setattr(StrictArray, "__array_ufunc__", wrong)
    status, printed = check()
    assert status == 1
    found = verdicts(printed.out)
    assert found["gelu, tanh"] == "WRONG: above 1e-05"
    assert found["linear, bias"] == found["cross-entropy"] == found["model, size S"] == "ok"


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_found_out(check, monkeypatch, wrong):
    backward = GELU.backward
    monkeypatch.setattr(
        GELU, "backward", lambda self, dy: backward(self, dy) * (1 if type(dy) is np.ndarray else wrong)
    )
    status, printed = check()
    assert (status, verdicts(printed.out)["gelu, tanh"]) == (1, "WRONG: above 1e-05")


@pytest.mark.parametrize(
    ("module", "kind"), [("embedding", "token id"), ("cross_entropy", "target"), ("position", "position")]
)
def test_a_device_that_wraps_ids_in_silence_is_found_out(check, monkeypatch, module, kind):
    monkeypatch.setattr(f"numpygpt.layers.{module}.check_ids", lambda *_: None)
    status, printed = check()
    wrong = {name: verdict for name, verdict in verdicts(printed.out).items() if "WRONG" in verdict}
    assert (status, wrong) == (1, {f"{kind} out of range": f"WRONG: {kind} -1 is taken"})


def test_a_call_that_the_device_lacks_is_named_and_the_rest_goes_on(check, monkeypatch):
    monkeypatch.setattr(strict_array, "UFUNCS", strict_array.UFUNCS - {"tanh"})
    status, printed = check()
    found = verdicts(printed.out)
    assert status == 1
    assert found["gelu, tanh"].startswith("WRONG: TypeError: ") and "tanh" in found["gelu, tanh"]
    assert found["cross-entropy"] == "ok"


def test_a_loss_that_stays_on_the_device_is_found_out(check, monkeypatch):
    right = CrossEntropy.forward

    def forward(self, logits, targets):
        loss = right(self, logits, targets)
        return to_device(np.array([loss])) if type(logits) is StrictArray else loss

    monkeypatch.setattr(CrossEntropy, "forward", forward)
    status, printed = check()
    assert status == 1 and "WRONG" in verdicts(printed.out)["cross-entropy"]


def test_results_of_another_kind_are_named():
    ones = np.ones(2, np.float32)
    for device, host, named in (
        (ones, ones, "a ndarray, where a StrictArray should be left"),
        (to_device(1.0), 1.0, "a StrictArray, where the CPU has a float"),
        (np.float64(1), 1.0, "a float64, where the CPU has a float"),
        (to_device(ones), None, "a StrictArray, where the CPU has a NoneType"),
        (to_device(ones.astype(np.float64)), ones, r"float64 \(2,\), where the CPU has float32 \(2,\)"),
        (to_device(ones[:1]), ones, r"float32 \(1,\), where the CPU has float32 \(2,\)"),
    ):
        with pytest.raises(compare.Unlike, match=named):
            compare.difference([device], [host], StrictArray)


def test_differences_are_relative_to_the_largest_number_of_all():
    host = [np.array([1.0, -4.0]), np.array([1e-9])]
    device = [to_device(host[0]), to_device(np.array([-4e-8]))]
    assert compare.difference(device, host, StrictArray) == pytest.approx(1.025e-8)
    assert compare.difference([to_device(0.0)], [np.array(0.0)], StrictArray) == 0
    assert compare.difference([None], [None], StrictArray) is None


def rows(monkeypatch, *results):
    """The rows of as many trainings as there are results: lists of losses, or errors."""
    given = iter(results)

    def run_child(*_, **__):
        result = next(given)
        if isinstance(result, Exception):
            raise result
        return {"losses": result, "times_s": [9.0] * 20 + [1.0] * (len(result) - 20)}

    monkeypatch.setattr(training, "run_child", run_child)
    size = check_device.make_size("tiny", 1, 2, 8, 4, 2, 11)
    return list(training.trainings(size, 30, list(training.TRAININGS)[: len(results)]))


@pytest.mark.parametrize(
    ("change", "right"),
    [({0: 5e-5}, True), ({25: 0.09}, True), ({19: 2e-4}, False), ({29: 0.11}, False), ({29: np.nan}, False)],
)
def test_losses_must_stay_by_those_of_the_cpu(monkeypatch, change, right):
    losses = [3.0] * 30
    cpu, gpu = rows(monkeypatch, losses, [x + change.get(i, 0) for i, x in enumerate(losses)])
    assert not cpu.fault and cpu.ms == "1,000.0"
    assert gpu.fault == ("" if right else "above 1e-04, or 0.1 in all")


def test_a_training_that_fails_is_wrong_if_it_is_ours(monkeypatch):
    failed = training.ChildFailed("no memory")
    *ours, torch = rows(monkeypatch, [3.0] * 30, failed, failed)
    assert [row.fault for row in ours] == ["", "no memory"]
    assert (torch.fault, torch.remark) in {("", "failed: no memory"), ("", 'no torch: pip install -e ".[bench]"')}


def test_without_pytorch_its_rows_say_so(monkeypatch):
    monkeypatch.setattr(training, "installed", lambda package: False)
    *_, eager, compiled = rows(monkeypatch, *[[3.0] * 30] * 4)
    assert eager.remark == compiled.remark == 'no torch: pip install -e ".[bench]"'


@pytest.mark.parametrize("error", [ImportError, ValueError])
def test_without_cupy_or_a_gpu_there_is_one_line(check, monkeypatch, error):
    def mover(device):
        raise error(f"{device} can't be had")

    monkeypatch.setattr(machine, "mover", mover)
    status, printed = check()
    assert (status, printed.out, printed.err) == (2, "", "error: cuda can't be had\n")


@pytest.mark.parametrize(("flags", "named"), [(["--steps", "-1"], "steps.*-1"), (["--size", "XL"], "XL")])
def test_a_mistake_is_named_in_one_line(check, flags, named):
    status, printed = check(*flags)
    assert status == 2 and re.search(named, printed.err) and not printed.out
