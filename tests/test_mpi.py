"""A run under MPI's launcher, with real processes: equal to one process's, whoever is killed or told to stop."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from running import SCRIPTS, run

from numpygpt import checkpoint

pytest.importorskip("mpi4py")
TESTS = Path(__file__).parent
LAUNCHER = shutil.which("mpiexec") or pytest.skip("there is no mpiexec", allow_module_level=True)
FLAGS = "--steps 30 --d-model 16 --num-layers 1 --num-heads 2 --context-length 16 --batch-size 5 --eval-interval 10"
FLAGS += " --dropout 0.1 --threads 1 --sample-length 20"


def command(*args, python=(sys.executable,)):
    return [*python, str(SCRIPTS / "train_shakespeare.py"), *map(str, args)]


def launched(*args, ranks=2, **options):
    """Run the training script on so many ranks."""
    line = [LAUNCHER, "-n", str(ranks), *command(*args)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, **options)


def steps(folder):
    """Return the metrics of all steps, without what depends on the time."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["tokens_per_s"]
    return lines


def weights(folder):
    return checkpoint.load(folder)[0].flat.value


@pytest.fixture(scope="module")
def flags(text):
    return ["--corpus", text, *FLAGS.split()]


@pytest.fixture(scope="module")
def trained(flags, tmp_path_factory):
    out = tmp_path_factory.mktemp("mpi") / "run"
    result = launched(*flags, "--out", out)
    assert result.returncode == 0, result.stderr
    return out, result


def test_two_ranks_end_where_one_process_does(flags, trained, tmp_path):
    plain = [*flags, "--dropout", 0]  # which draws differently on each rank
    for name, result in (
        ("one", run("train_shakespeare.py", *plain, "--out", tmp_path / "one")),
        ("two", launched(*plain, "--out", tmp_path / "two")),
    ):
        assert result.returncode == 0, (name, result.stderr)
    for ours, theirs in zip(steps(tmp_path / "two"), steps(tmp_path / "one"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    np.testing.assert_allclose(weights(tmp_path / "two"), weights(tmp_path / "one"), rtol=1e-3, atol=1e-4)


def test_one_speaks_and_saves_for_all(trained):
    out, result = trained
    assert result.stdout.count("validation loss: ") == result.stdout.count("a sample:") == 1
    assert result.stderr.count(" 0/30 ") == 1
    assert checkpoint.load(out)[1]["ranks"] == 2
    assert sorted(path.name for path in out.iterdir())[:2] == ["config.json", "metrics.jsonl"]


def test_a_second_run_has_the_same_bits(flags, trained, tmp_path):
    assert launched(*flags, "--out", tmp_path / "again").returncode == 0
    assert steps(tmp_path / "again") == steps(trained[0])
    assert weights(tmp_path / "again").tobytes() == weights(trained[0]).tobytes()


def begun(out, flags):
    """Start a long run; return its process when it has saved twice, and the ids of its ranks' processes."""
    line = [LAUNCHER, "-n", "2", *command(*flags, "--steps", 100_000, "--out", out)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(checkpoint.checkpoints(out)) < 2:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    found = subprocess.run(["pgrep", "-f", f"{sys.executable} .*train_shakespeare.py.*{out}"], capture_output=True)
    return process, sorted(pid for pid in map(int, found.stdout.split()) if pid != process.pid)


@pytest.mark.skipif(not shutil.which("pgrep"), reason="there is no pgrep to find the ranks with")
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_all_and_harms_no_checkpoint(killed, flags, tmp_path):
    process, pids = begun(tmp_path / "run", flags)
    ranks = pids[-2:]  # besides the launcher's own helpers
    os.kill(ranks[killed], signal.SIGKILL)
    written = "".join(process.communicate(timeout=30))
    assert process.returncode != 0
    assert re.search("signal 9", written, re.IGNORECASE), written
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in ranks):
        assert time.monotonic() < deadline, "a rank goes on alone"
        time.sleep(0.02)
    for folder in checkpoint.checkpoints(tmp_path / "run"):
        checkpoint.check(folder)
    newest = int(checkpoint.checkpoints(tmp_path / "run")[0].name[5:])
    resumed = launched("--resume", "--out", tmp_path / "run", "--minutes", 0.001)
    assert resumed.returncode == 0, resumed.stderr
    assert steps(tmp_path / "run")[-1]["step"] > newest


def test_a_run_that_is_told_to_stop_saves_and_goes_on_to_the_same_bits(flags, trained, tmp_path):
    process, _ = begun(tmp_path / "long", flags)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=30)
    assert "Stopped after step" in output, errors
    assert errors.count("Stopping after this step") == 1
    shutil.copytree(trained[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "step-00000030")
    shutil.rmtree(tmp_path / "run" / "step-00000020")
    assert launched("--resume", "--out", tmp_path / "run").returncode == 0
    assert steps(tmp_path / "run") == steps(trained[0])
    assert weights(tmp_path / "run").tobytes() == weights(trained[0]).tobytes()


def test_another_number_of_ranks_does_not_resume(trained):
    result = launched("--resume", "--out", trained[0], ranks=3)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and "has 2 ranks, not 3" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("others", "status", "message"),
    [
        (["--lr", "0.1"], 2, "error: --lr is None on rank 0, but 0.1 on rank 1"),
        (["--stepz", "3"], 2, "rank 1: error: unrecognized arguments: --stepz"),
    ],
)
def test_a_rank_with_another_configuration_ends_all(others, status, message, flags, tmp_path):
    out = ["--out", tmp_path / "run"]
    line = [LAUNCHER, "-n", "1", *command(*flags, *out), ":", "-n", "1", *command(*flags, *out, *others)]
    result = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert result.returncode == status
    assert message in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_mistake_on_the_first_rank_alone_is_said_once(flags, tmp_path):
    out = ["--out", tmp_path / "run"]
    line = [LAUNCHER, "-n", "1", *command(*flags, *out, "--stepz", 3), ":", "-n", "1", *command(*flags, *out)]
    result = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("error: unrecognized arguments: --stepz 3") and "rank 0: " not in result.stderr


@pytest.mark.parametrize("resume", [False, True])
def test_ranks_that_see_different_files_end_with_a_line(resume, flags, trained, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    args = command(*([] if resume else flags), "--out", "run", *["--resume"] * resume)
    if resume:
        shutil.copytree(trained[0], tmp_path / "here" / "run")
        shutil.copytree(trained[0], tmp_path / "there" / "run")
        for folder in checkpoint.checkpoints(tmp_path / "there" / "run"):
            shutil.rmtree(folder)
    one, other = (["-n", "1", "-wdir", str(tmp_path / name), *args] for name in ("here", "there"))
    result = subprocess.run([LAUNCHER, *one, ":", *other], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    line = "step-00000030/model.safetensors" if resume else "run/tokens.bin isn't there on rank 1: all ranks must see"
    assert result.stderr.splitlines()[-1].startswith("error: ") and line in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--batch-size", 1], "error: batch_size 1 is less than a sequence for each of 2 ranks\n"),
        (["--corpus", "/none"], "error: "),
        (["--d-model", 15], "error: "),
    ],
)
def test_a_mistake_is_one_line(wrong, message, flags, tmp_path):
    result = launched(*flags, "--out", tmp_path / "run", *wrong)
    assert result.returncode == 2
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_an_error_nobody_expects_on_one_rank_ends_all(flags, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time\n"
        "from numpygpt.ranks import join\n"
        "ranks = join()\n"
        "with ranks.ending_together():\n"
        "    if ranks.rank == 1: raise KeyError('nobody expects this')\n"
        "    ranks.gather(None)\n"
    )
    result = subprocess.run([LAUNCHER, "-n", "2", sys.executable, program], capture_output=True, text=True, timeout=30)
    assert result.returncode != 0
    assert "rank 1: Traceback" in result.stderr and "nobody expects this" in result.stderr


def test_ranks_share_the_cores_of_their_machine(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from numpygpt.ranks import join\n"
        "ranks = join()\n"
        "cores = ranks.gather(ranks.cores())\n"
        "if ranks.rank == 0: print(cores)\n"
    )
    result = subprocess.run([LAUNCHER, "-n", "2", sys.executable, program], capture_output=True, text=True, timeout=30)
    here = len(os.sched_getaffinity(0))
    assert result.stdout == f"{[max(1, here // 2)] * 2}\n"


def test_the_costs_of_two_ranks_are_measured():
    line = [LAUNCHER, "-n", "2", sys.executable, str(SCRIPTS / "scale.py"), "--sizes", "S", "--repeats", "1"]
    result = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("2 ranks, NumPy ")
    (row,) = (line for line in result.stdout.splitlines()[:6] if line.startswith("| S "))
    whole, share, all_reduce, total, together = (float(cell.replace(",", "")) for cell in row.split("|")[2:7])
    assert total == pytest.approx(share + all_reduce, abs=0.11)
    assert min(whole, share, together) > 0 and float(row.split("|")[8]) < 1e-5


def on_gpus(count, **more):
    """Return the environment of a machine with so many GPUs, as the stand-in has it."""
    path = os.pathsep.join(map(str, (TESTS / "stand_in", TESTS, *filter(None, [os.environ.get("PYTHONPATH")]))))
    return os.environ | {"PYTHONPATH": path, "STAND_IN_GPUS": str(count), **more}


def test_each_rank_has_a_gpu_of_its_own_and_ends_on_the_bits_of_the_cpu(flags, trained, tmp_path):
    result = launched(*flags, "--device", "cuda", "--out", tmp_path / "run", env=on_gpus(2))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("GPU 0 is taken") == result.stdout.count("GPU 1 is taken") == 1
    assert steps(tmp_path / "run") == steps(trained[0])
    assert weights(tmp_path / "run").tobytes() == weights(trained[0]).tobytes()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (on_gpus(1), "error: 2 ranks on a machine with 1 GPUs: start one for each GPU\n"),
        (
            on_gpus(2, STAND_IN_NCCL="0"),
            "error: several GPUs need NCCL: pip install nvidia-nccl-cu12, or -cu13\n",
        ),
    ],
)
def test_too_few_gpus_or_no_nccl_is_one_line(env, message, flags, tmp_path):
    result = launched(*flags, "--device", "cuda", "--out", tmp_path / "run", env=env)
    assert result.returncode == 2
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
