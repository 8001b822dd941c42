"""Types and shapes of every signature are checked while tests run, and Hypothesis has a quick and a deep profile."""

import functools
import inspect
import os
import typing

import jaxtyping
import pytest
from beartype import BeartypeConf, beartype
from hypothesis import HealthCheck, Phase, settings
from running import TEXT

jaxtyping.install_import_hook("numpygpt", "conftest.check_types")  # before anything imports numpygpt


def check_types(function):
    """Apply beartype, where an int is a float too; `Self` it would only know in a class that it decorates itself.

    Not to a function inside another, which is made anew, and would be decorated anew, at every call of that.
    """
    if typing.Self in function.__annotations__.values() or "<locals>" in function.__qualname__:
        return function
    return beartype(function, conf=BeartypeConf(is_pep484_tower=True, violation_type=TypeError))


jaxtyped = jaxtyping.jaxtyped


def jaxtyped_for_axes(**options):
    """Return the import hook's decorator. Where no type has axes, which jaxtyping compares, `check_types` does alone.

    Most calls are of such functions, and jaxtyping would take most of the time of the tests to bind their arguments.
    """
    of_axes = jaxtyped(**options)

    def decorate(decorated):
        if not inspect.isfunction(decorated) or "jaxtyping" in repr(decorated.__annotations__):
            return of_axes(decorated)
        checked = check_types(decorated)

        @functools.wraps(decorated)
        def function(*args, **kwargs):
            return (decorated if jaxtyping.config.jaxtyping_disable else checked)(*args, **kwargs)

        return function

    return decorate


jaxtyping.jaxtyped = jaxtyped_for_axes  # the name by which the hook's code calls it


COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", max_examples=25, derandomize=True, **COMMON)
settings.register_profile("deep", max_examples=1000, **COMMON)
# For scripts/mutate_gradients.py, which asks whether a test fails, and not for the smallest example that makes it fail.
FIRST = {"phases": [Phase.explicit, Phase.generate], "report_multiple_bugs": False}
settings.register_profile("mutants", settings.get_profile("quick"), **FIRST)


def pytest_addoption(parser):
    parser.addoption("--deep", action="store_true", help="1,000 random examples of each property, every combination")


def pytest_configure(config):
    deep = config.getoption("deep")
    settings.load_profile("deep" if deep else os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file to train on."""
    path = tmp_path_factory.mktemp("text") / "hamlet.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def unchecked():
    """Let wrong types through to the package's own checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def one_torch_thread():
    """Keep PyTorch to one thread: for small arrays more of them only wait for each other."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
