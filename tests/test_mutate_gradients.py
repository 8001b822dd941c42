"""The mutation tool: the mistakes it makes, and what it says when the tests miss one."""

import ast
import functools
import json
import os
import re
import shutil
import sys

import pytest
from running import SCRIPTS, run

sys.path.insert(0, str(SCRIPTS))
import mutate_gradients
from mutation import equivalent, mutants, scope

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="the tool forks")


@functools.cache
def made(forward):
    """Return the mutants of all modules."""
    return mutants.make_mutants(scope.MODULES, scope.FORWARD if forward else scope.BACKWARD)


def changes(kind, line):
    """Return what a kind of mistake makes of a line."""
    inside = f"{line} pass" if line.endswith(":") else line
    source = f"class A:\n    def backward(self):\n        {inside}\n"
    return [m.new for m in mutants.mutants_of("norm", source, {"backward"}) if m.kind == kind]


@pytest.mark.parametrize(
    ("kind", "line", "want"),
    [
        ("drop term", "y = a + b", ["y = a", "y = b"]),
        ("drop term", "y = a - b - c", ["y = a - b", "y = -c", "y = a - c", "y = -b - c"]),
        ("drop term", "np.subtract(a, b, out=y)", ["np.subtract(0.0, b, out=y)", "np.subtract(a, 0.0, out=y)"]),
        ("drop factor", "y = a * b", ["y = a", "y = b"]),
        ("drop factor", "y = a / b", ["y = a", "y = 1 / b"]),
        ("drop factor", "y = a ** 2", ["y = a"]),
        ("flip sign", "y = a - b", ["y = a + b"]),
        ("flip sign", "y += a", ["y -= a"]),
        ("flip sign", "y *= a", ["y *= -a"]),
        ("flip sign", "y = -a", ["y = a"]),
        ("flip sign", "y = a ** -0.5", ["y = a ** 0.5"]),
        ("flip sign", "y = a * b / c", ["y = -(a * b / c)"]),
        ("flip sign", "y = (a * b).astype(t)", ["y = (-(a * b)).astype(t)"]),
        ("flip sign", "y = self.w1.backward(a)", ["y = -self.w1.backward(a)"]),
        ("flip sign", "return y", ["return -y"]),
        ("flip sign", "np.add(a, b, out=y)", ["np.subtract(a, b, out=y)"]),
        ("swap operands", "y = a - b", ["y = b - a"]),
        ("swap operands", "y = a / b", ["y = b / a"]),
        ("swap operands", "y -= a", ["y = a - y"]),
        ("assign instead of adding", "self.w.grad += a", ["self.w.grad = a"]),
        ("change constant", "y[0] = f(-1, 0.5)", ["y[1] = f(-1, 0.5)", "y[0] = f(0, 0.5)", "y[0] = f(-1, 0.505)"]),
        ("change constant", "y = f(a, keepdims=True)", ["y = f(a, keepdims=False)"]),
        ("skip line", "check_cotangent(dy, x.shape)", ["pass"]),
        ("skip line", "for a in b:", ["pass"]),
        ("drop mask", "y = np.where(mask, a, 0)", ["y = a", "y = 0"]),
        ("drop mask", "y = a & b", ["y = a", "y = b"]),
        ("change comparison", "y = a < b", ["y = a <= b", "y = a >= b"]),
        ("change comparison", "y = 0 <= a", ["y = 0 < a", "y = 0 > a"]),
        ("change comparison", "if a is not None:", ["if a is None:"]),
        ("change comparison", "if not a:", ["if a:"]),
        ("unwrap", "y = np.maximum(a, b)", ["y = a", "y = b"]),
        ("unwrap", "y = np.exp(a).reshape(b)", ["y = np.exp(a)", "y = a.reshape(b)"]),
        ("unwrap", "y = self.norm.backward(dy)", ["y = dy"]),
        ("unwrap", "with np.errstate(over='ignore'):", ["if True:"]),
        ("swap elements", "return dq, dk, dv", ["return (dk, dq, dv)", "return (dq, dv, dk)"]),
        ("swap elements", "x, r = self.saved", ["r, x = self.saved"]),
        ("force condition", "if a:", ["if True:", "if False:"]),
        ("force condition", "y = a and b", ["y = b", "y = a"]),
    ],
)
def test_the_mistakes(kind, line, want):
    assert changes(kind, line) == [equivalent.normal(new) for new in want]


def test_letters_of_an_einsum_are_swapped_and_replaced_but_not_just_renamed():
    def notations(notation):
        return [new.split("'")[1] for new in changes("change einsum", f"y = einsum({notation!r}, *x)")]

    assert notations("ij->ij") == ["ij->ji"]  # "ji->ij" is the same
    assert notations("...c,...c->...") == []  # exchanging the operands changes nothing
    assert notations("i,j->ij") == ["j,i->ij"]
    assert notations("ij,j->i") == ["ji,j->i", "ij,i->i", "ij,j->j", "j,ij->i"]


def test_no_docstring_message_or_annotation_is_changed():
    source = '''
def backward(x: f(1)) -> f(2):
    """Return 1 + 2."""
    y: f(3)
    if x:
        raise ValueError(f"{x + 4}")
    raise ValueError(5)
'''
    found = mutants.mutants_of("norm", source, {"backward"})
    assert [(m.old, m.new) for m in found] == [("y: f(3)", "pass"), ("if x:", "if True:"), ("if x:", "if False:")]


def test_a_mutant_is_the_file_with_its_function_changed_and_no_two_are_the_same():
    for forward in (False, True):
        for module, found in made(forward).items():
            assert len({m.source for m in found}) == len(found)
            original = dict(mutants.functions_of(ast.parse(scope.MODULES[module].read_text("utf-8"))))
            for m in found[::50]:
                changed = dict(mutants.functions_of(ast.parse(m.source)))
                different = [name for name in original if ast.dump(original[name]) != ast.dump(changed[name])]
                assert original.keys() == changed.keys() and different == [m.function]


@pytest.mark.parametrize("name", ["backward", "forward"])
def test_every_backward_and_every_forward_has_mutants(name):
    found = made(name == "forward")
    for module, path in scope.MODULES.items():
        for function, _ in mutants.functions_of(ast.parse(path.read_text("utf-8"))):
            if function.endswith(f".{name}"):
                assert function in {m.function for m in found[module]}, function


def test_every_equivalent_mutant_is_one_that_is_made_and_has_a_reason():
    reasons = equivalent.read_reasons(equivalent.EQUIVALENT)  # raises if one stands twice or has no reason
    keys = {m.key for forward in (False, True) for found in made(forward).values() for m in found}
    assert [key for key in reasons if key not in keys] == []


def entry(old, new, reason="a reason", module="double", function="backward"):
    """Return one entry of the list of equivalent mutants."""
    fields = {"module": module, "function": function, "old": old, "new": new, "reason": reason}
    return "[[mutant]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items())


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        (entry("a", "b", reason=" "), "no reason: double, backward: a -> b"),
        (entry("a", "b") + entry("a", "(b)"), "twice"),
    ],
)
def test_an_equivalent_without_a_reason_or_listed_twice_is_refused(tmp_path, entries, named):
    path = tmp_path / "list.toml"
    path.write_text(entries)
    with pytest.raises(ValueError, match=named):
        equivalent.read_reasons(path)


@pytest.fixture
def project(tmp_path):
    """Make a package of one backward, and return a function that runs the tool on it with some test."""
    layers, tests = tmp_path / "numpygpt" / "layers", tmp_path / "tests"
    layers.mkdir(parents=True)
    tests.mkdir()
    (tmp_path / "numpygpt" / "__init__.py").touch()
    (layers / "double.py").write_text("# The gradient of 2 x.\ndef backward(dy):\n    return 2 * dy\n")
    (tmp_path / "setup.cfg").touch()
    (tests / "test_refusals.py").touch()
    scripts = shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))

    def run_with(test, listed=""):
        (tests / "test_double.py").write_text(
            f"from numpygpt.layers.double import backward\n\ndef test():\n    assert {test}\n"
        )
        (tests / "equivalent_mutants.toml").write_text(listed)
        environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return run(scripts / "mutate_gradients.py", "--only", "double", env=environment)

    return run_with


@needs_fork
def test_a_survivor_is_reported_with_its_line_and_status_1(project):
    result = project("backward(1) in (2, 3)")
    assert result.returncode == 1, result.stderr
    lines = result.stdout.strip("\n").splitlines()
    assert lines[1].split() == ["double", "4", "2", "2", "0"]
    assert sorted(lines[3:]) == [
        "numpygpt/layers/double.py:3 change constant: return 2 * dy -> return 3 * dy",
        "numpygpt/layers/double.py:3 drop factor: return 2 * dy -> return 2",
    ]


@needs_fork
def test_all_killed_or_equivalent_is_status_0(project):
    result = project("backward(1) == 2", entry("return 2*dy", "return 2", "untrue, but the tool believes it"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].split() == ["all", "4", "3", "0", "1"]


@needs_fork
def test_tests_that_fail_without_a_mutant_are_refused(project):
    result = project("backward(1) == 3")
    assert result.returncode == 2
    assert "tests fail without a mutant: run pytest tests/test_double.py" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture
def main(monkeypatch, capsys, tmp_path):
    """Return a function that runs the tool here, up to where it would test."""

    def main_with(*flags, listed=""):
        path = tmp_path / "equivalent_mutants.toml"
        path.write_text(listed)
        monkeypatch.setattr(mutate_gradients, "EQUIVALENT", path)
        monkeypatch.setattr(sys, "argv", ["mutate_gradients.py", *flags])
        with pytest.raises(SystemExit) as error:
            sys.exit(mutate_gradients.main())
        return error.value.code, *capsys.readouterr()

    return main_with


def test_mutants_can_be_listed_without_a_test(main):
    status, out, _ = main("--list", "--only", "dropout", "softmax")
    assert status == 0 and "numpygpt/layers/dropout.py:" in out
    assert "flip sign: return dx -> return -dx" in out


@pytest.mark.parametrize(
    ("flags", "listed", "named"),
    [
        (["--only", "nrom"], "", "'nrom'.* norm,"),
        (["--jobs", "0"], "", "at least 1, not 0"),
        (["--only", "einsum"], "", "no function to change in einsum"),
        (["--only", "dropout"], entry("a", "b", module="dropout", function="A.backward"), "no mutant any more.*a -> b"),
        ([], "[[mutant]", "equivalent_mutants.toml"),
        ([], "[[mutant]]\nmodule = 'dropout'", "equivalent_mutants.toml.*'function'"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(main, flags, listed, named):
    status, out, err = main(*flags, listed=listed)
    assert status == 2 and out == "" and err.count("\n") == 1
    assert re.search(named, err), err


def test_without_fork_it_says_so(main, monkeypatch):
    monkeypatch.delattr(os, "fork", raising=False)
    status, _, err = main("--only", "dropout")
    assert status == 2 and "can't fork" in err
