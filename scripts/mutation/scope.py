"""The functions that are changed, and the tests that should see it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = {path.stem: path for path in sorted((ROOT / "numpygpt" / "layers").glob("[a-z]*.py"))}
MODULES |= {name: ROOT / "numpygpt" / f"{name}.py" for name in ("model", "special", "optim", "einsum")}

# In every module the functions of one name, and in some what they compute with.
BACKWARD = {name: {"backward"} for name in MODULES} | {
    "attention": {"backward", "split_heads", "merge_heads", "fold", "unfold"},
    "position": {"backward", "rotate", "pairs"},
    "special": {"normal_pdf", "normal_cdf"},
    "optim": {"step", "update", "pieces", "clip_grad_norm", "finite_squared_norm", "cosine_schedule"},
}
FORWARD = {name: {"forward"} for name in MODULES} | {
    "activation": {"forward", "sigmoid"},
    "attention": {"forward", "check_mask"},
    "position": {"forward", "check_positions"},
    "einsum": {"spell_out", "lower", "einsum"},
}

# The tests of a module are tests/test_<module>.py and tests/test_refusals.py, or instead of the second these.
MORE_TESTS = {"special": ["activation"], "optim": [], "einsum": []}
MORE_TESTS |= {name: ["refusals", "device"] for name in ("cross_entropy", "dropout")}  # what NumPy alone lets pass
MORE_TESTS |= {name: ["refusals", "cache"] for name in ("attention", "block", "model")}
# But not those that try many models: what they kill dies by a smaller one beside them.
SLOW = {"model": ["every_combination", "parameter_by_parameter", "dtype_of"]}
SLOW |= {name: ["device.py::test_training"] for name in ("cross_entropy", "dropout")}


def test_files(module: str) -> list[str]:
    """Return the files that test a module."""
    return [f"tests/test_{name}.py" for name in (module, *MORE_TESTS.get(module, ["refusals"]))]


def is_test_of(module: str, test: str) -> bool:
    """Return whether a test, by pytest's name for it, is one of those run for a module."""
    return test.split("::")[0] in test_files(module) and not any(part in test for part in SLOW.get(module, []))
