import json

import pytest

from numpygpt.metrics import MetricsLog
from numpygpt.progress import Smoothed


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_log_gone_on_with_holds_each_step_once(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(path, 0)
    for step in range(1, 8):
        log.append({"step": step, "loss": 1 / step})
    log.sync()
    log = MetricsLog(path, 5)  # the checkpoint was of step 5
    assert steps(path) == [1, 2, 3, 4, 5]
    log.append({"step": 6, "loss": 0.5})
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    assert json.loads(path.read_text().splitlines()[3]) == {"step": 4, "loss": 0.25}


@pytest.mark.parametrize(
    "torn", ['{"step": 3, "lo', '{"step": 3}', "\x00\x00\x00", "[1]\n", '{"loss": 1}\n', "[" * 10**5 + "\n"]
)
def test_a_torn_line_is_dropped(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + torn)
    MetricsLog(path, 100).append({"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_number_that_json_does_not_know_is_refused(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    with pytest.raises(ValueError, match="JSON"):
        log.append({"step": 1, "loss": float("nan")})
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_running_average_begins_as_the_average_and_ends_as_that_of_the_latest():
    average = Smoothed()
    for number, expected in ((4.0, 4.0), (2.0, (0.95 * 4 + 2) / 1.95)):
        average.add(number)
        assert average.value == pytest.approx(expected)
    for _ in range(200):
        average.add(1.0)
    assert average.value == pytest.approx(1, abs=1e-3)
