"""What the book's exercises break: each line broken in a process of its own, and the tests that its answer names.

`python tests/breaking.py FOLDER` prints a JSON object: the place of each exercise of the pages in FOLDER, and the first
of these tests that fails. pytest collects all tests once, and a fork costs no more than the tests it runs.
"""

import importlib
import inspect
import itertools
import json
import operator
import os
import re
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import pytest

from book.pages import read_pages
from book.source import ROOT
from mutation.runner import code_of, slowness

LIMIT = 60  # seconds for one exercise


class Breaker:
    """A pytest plugin that, in place of running the tests, breaks one line after the other and runs those it names."""

    def __init__(self, exercises):
        self.exercises, self.first, self.pipe = exercises, {}, None

    def pytest_runtestloop(self, session):
        jobs = os.cpu_count() or 1
        for i in range(0, len(self.exercises), jobs):
            started = [(exercise, *self.start(exercise, session.items)) for exercise in self.exercises[i : i + jobs]]
            for exercise, process, reading in started:
                with open(reading, encoding="utf-8") as file:
                    self.first[exercise.place] = file.read()
                os.waitpid(process, 0)
        return True

    def start(self, exercise, items):
        """Fork; return the process, and a pipe that tells the first test that fails: nothing if none, ? if it can't."""
        words = set(re.findall(r"\w+", exercise.answer))
        here = [item for item in items if item.path == exercise.mutation.tests]
        tests = sorted((item for item in here if item.name.partition("[")[0] in words), key=slowness)
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            try:
                signal.alarm(LIMIT)  # which ends it
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, 1)
                os.dup2(nowhere, 2)
                self.pipe = writing
                apply(exercise.mutation)
                for test, following in itertools.pairwise([*tests, None]):
                    test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
                os.write(writing, b"" if tests else b"?")
            except BaseException:
                os.write(writing, b"?")
            finally:
                os._exit(0)
        os.close(writing)
        return process, reading

    def pytest_exception_interact(self, node):
        if self.pipe is not None:
            os.write(self.pipe, node.name.encode())
            os._exit(0)


def apply(mutation):
    """Put the broken code in the place of the right one."""
    module = importlib.import_module(".".join(mutation.file.relative_to(ROOT).with_suffix("").parts))
    function = inspect.unwrap(operator.attrgetter(mutation.function)(module))
    function.__code__ = code_of(mutation.source(), str(mutation.file), mutation.function)


def main(folder):
    exercises = [fence for page in read_pages(Path(folder)) for fence in page.of_kind("exercise") if fence.mutation]
    for name in [name for name in sys.modules if name.split(".")[0] == "numpygpt"]:
        del sys.modules[name]  # the tests import it with checks of types
    breaker = Breaker(exercises)
    files = sorted({str(exercise.mutation.tests) for exercise in exercises})
    os.environ.pop("PYTEST_ADDOPTS", None)  # such as -n 2: the processes are forked here
    quiet = ["--override-ini=addopts=", "-qq", "--disable-warnings", "--capture=no", "-p", "no:cacheprovider"]
    with open(os.devnull, "w") as nowhere:
        out, sys.stdout = sys.stdout, nowhere
        pytest.main([*quiet, *files], plugins=[breaker])
        sys.stdout = out
    print(json.dumps(breaker.first))


if __name__ == "__main__":
    main(sys.argv[1])
