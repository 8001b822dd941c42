"""The tests, run on each mutant in a process of its own.

pytest collects the tests once, which imports NumPy and all else. Then, instead of running them, this process forks for
each mutant: the copy puts the mutant's code in the place of the right one and runs the tests up to the first that
fails. So a mutant costs no more than that, and nothing it breaks outlives it.
"""

import dataclasses
import gc
import importlib
import inspect
import itertools
import operator
import os
import signal
import sys
import time
import types
import warnings
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from mutation.mutants import Mutant
from mutation.scope import MODULES, ROOT, is_test_of, test_files
from numpygpt.progress import progress_bar

FAULT = 3  # exit status of a fork that could not test its mutant


def code_of(source: str, filename: str, function: str) -> types.CodeType:
    """Compile a file, run nothing of it, and return the code of one function."""
    inside = [compile(source, filename, "exec")]
    while inside:
        code = inside.pop()
        if code.co_qualname == function:
            return code
        inside += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    raise LookupError(function)


def apply(mutant: Mutant) -> None:
    """Give the function the mutant's code, whoever has imported it and whatever checks of its types are around it."""
    path = MODULES[mutant.module]
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    function = inspect.unwrap(operator.attrgetter(mutant.function)(module))
    function.__code__ = code_of(mutant.source, str(path), mutant.function)


@dataclasses.dataclass
class Fork:
    """What a process tests, and the time by which it should have ended."""

    mutant: Mutant
    deadline: float


class Runner:
    """A pytest plugin that runs the collected tests on each mutant in a fork, and not at all in this process."""

    def __init__(self, mutants: list[Mutant], jobs: int):
        self.mutants, self.jobs = mutants, jobs
        self.tests: dict[str, list[Any]] = {}  # of each module, once they are collected
        self.failing = ""  # a module whose tests fail without a mutant
        self.fates: list[tuple[Mutant, str]] = []

    def pytest_runtestloop(self, session: Any) -> bool:
        """Find out how long the tests take, then run them on every mutant."""
        quick_first = sorted(session.items, key=slowness)
        modules = list(dict.fromkeys(mutant.module for mutant in self.mutants))
        self.tests = {name: [test for test in quick_first if is_test_of(name, test.nodeid)] for name in modules}
        gc.freeze()  # a fork's garbage collector leaves alone what is here, so that the memory stays shared
        tqdm.monitor_interval = 0  # the bars start no thread, as this process forks
        limits: dict[str, float] = {}
        with progress_bar(len(modules), desc="without a mutant", unit="module", leave=False) as bar:
            for module in modules:
                start = time.monotonic()
                if os.waitpid(self.start_tests(module), 0)[1]:
                    self.failing = module
                    return True
                limits[module] = 30 + 10 * (time.monotonic() - start)  # seconds, of which few mutants need any
                bar.update()
        with progress_bar(len(self.mutants), unit="mutant") as bar:
            for mutant, fate in self.find_fates(limits):
                self.fates.append((mutant, fate))
                bar.update()
                if fate == "survived":
                    bar.write(f"survived: {mutant}", sys.stderr)
        return True

    def find_fates(self, limits: dict[str, float]) -> Iterator[tuple[Mutant, str]]:
        """Test as many mutants at a time as there are jobs; yield each with its fate."""
        waiting, running = self.mutants[::-1], dict[int, Fork]()
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    mutant = waiting.pop()
                    process = self.start_tests(mutant.module, mutant)
                    running[process] = Fork(mutant, time.monotonic() + limits[mutant.module])
                for process, fork in list(running.items()):
                    ended, status = os.waitpid(process, os.WNOHANG)
                    if ended:
                        del running[process]
                        yield fork.mutant, fate_of(fork.mutant, os.waitstatus_to_exitcode(status))
                    elif time.monotonic() > fork.deadline:
                        del running[process]
                        end(process)
                        yield fork.mutant, "hung"
                time.sleep(0.005)
        finally:
            for process in running:
                end(process)

    def start_tests(self, module: str, mutant: Mutant | None = None) -> int:
        """Start the tests of a module in a process of their own; return its id."""
        process = os.fork()
        if process:
            return process
        status = FAULT
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            if mutant:
                apply(mutant)
            tests = self.tests[module]
            for test, following in itertools.pairwise([*tests, None]):
                test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            status = 0 if tests else FAULT
        finally:
            os._exit(status)

    def pytest_exception_interact(self, node: Any) -> None:
        """End this process, a fork, at the first test that fails."""
        if self.tests:  # else this is no fork yet, and what failed is a file that can't be collected
            os._exit(1)


def slowness(test: Any) -> tuple[bool, bool]:
    """Return what to sort tests by: those that Hypothesis repeats come last, and of these the gradient checks."""
    return getattr(test.obj, "is_hypothesis_test", False), "gradients" in test.name


def fate_of(mutant: Mutant, status: int) -> str:
    """Return what became of a mutant whose process has ended with this status (by a signal, if that is negative)."""
    if status == FAULT:
        raise RuntimeError(f"this tool can't test {mutant}")
    return "killed" if status else "survived"


def end(process: int) -> None:
    """Kill a fork."""
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def fates_of(mutants: list[Mutant], jobs: int) -> list[tuple[Mutant, str]]:
    """Return the fate of each mutant: killed, survived or hung. Raise ValueError if the tests fail without any."""
    files = dict.fromkeys(file for mutant in mutants for file in test_files(mutant.module))
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    os.environ.pop("PYTEST_ADDOPTS", None)  # such as -n 2: the processes are forked here
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    # The package was imported here without the checks of types that the tests add: they import it again.
    for name in [name for name in sys.modules if name.split(".")[0] == "numpygpt"]:
        del sys.modules[name]
    try:
        import pytest
    except ImportError as error:
        raise ValueError('the tests need pytest: pip install -e ".[test]"') from error
    # From Python 3.12 on a fork beside threads is warned of; NumPy's OpenBLAS ends its own before one.
    warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
    plugin = Runner(mutants, jobs)
    quiet = ["--override-ini=addopts=", "-qq", "--tb=native", "--disable-warnings", "--capture=no"]
    status = pytest.main([*quiet, "-p", "no:cacheprovider", *files], plugins=[plugin])
    if plugin.failing:
        raise ValueError(f"tests fail without a mutant: run pytest {' '.join(test_files(plugin.failing))}")
    if status == pytest.ExitCode.INTERRUPTED and plugin.tests:  # without tests: a file that can't be collected
        raise KeyboardInterrupt
    if len(plugin.fates) < len(mutants):
        raise ValueError(f"the tests can't be run: see pytest {' '.join(files)}")
    return plugin.fates
