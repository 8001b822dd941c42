"""The functions that are changed, and the tests that should see it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = {path.stem: path for path in sorted((ROOT / "numpygpt" / "layers").glob("[a-z]*.py"))}
OTHERS = "model", "special", "optim", "precision", "einsum", "replica", "ranks", "train"
MODULES |= {name: ROOT / "numpygpt" / f"{name}.py" for name in OTHERS}

# In every module the functions of one name, and in some what they compute with.
BACKWARD = {name: {"backward"} for name in MODULES} | {
    "attention": {"backward", "split_heads", "merge_heads", "fold", "unfold"},
    "position": {"backward", "rotate"},
    "special": {"normal_pdf", "normal_cdf"},
    "optim": {"bounds", "pieces", "cut", "squares", "grad_norm", "clip_grad_norm", "cosine_schedule"}
    | {"zero_grad", "step", "update_share", "update"},  # of Adam
    "precision": {"products_in", "inverse", "step_made", "step_skipped"},
    "replica": {"begin", "turn", "mend", "add", "finish", "__iadd__", "__getitem__", "zero_grad"}  # of gradients
    | {"add_gradients", "optimize", "deal"},
    "ranks": {"rows", "together", "from_first"},
    "train": {"add_gradients", "update", "losses"},
}
FORWARD = {name: {"forward"} for name in MODULES} | {
    "activation": {"forward", "sigmoid"},
    "attention": {"forward", "check_mask", "whole", "causal_blocks"},
    "cross_entropy": {"forward", "mean", "number"},
    "position": {"forward", "check_positions"},
    "softmax": {"forward", "exponentials"},
    "einsum": {"spell_out", "lower", "einsum"},
    "precision": {"matmul"},
    "lora": {"forward", "merged"},
}

# The tests of a module are tests/test_<module>.py (or this) and tests/test_refusals.py, or instead of the second these.
OWN_TESTS = {"replica": "threads"}
MORE_TESTS = {"special": ["activation"], "optim": [], "precision": [], "ranks": [], "einsum": []}
MORE_TESTS |= {name: ["refusals", "device"] for name in ("cross_entropy", "dropout")}  # what NumPy alone lets pass
MORE_TESTS |= {"replica": ["train", "device", "precision"], "train": ["threads", "ranks", "precision"]}
MORE_TESTS |= {name: ["refusals", "cache"] for name in ("attention", "block", "model")}
# But not those that try many models or train for long: what they kill dies by a smaller one beside them.
SLOW = {"model": ["every_combination", "parameter_by_parameter", "dtype_of"]}
SLOW |= {name: ["device.py::test_training"] for name in ("cross_entropy", "dropout")}
SLOW |= {"replica": ["two_models", "same_number"]}
SLOW |= {"train": [*SLOW["replica"], "same_seed", "learns", "each_evaluation", "memory"]}


def test_files(module: str) -> list[str]:
    """Return the files that test a module."""
    own = OWN_TESTS.get(module, module)
    return [f"tests/test_{name}.py" for name in (own, *MORE_TESTS.get(module, ["refusals"]))]


def is_test_of(module: str, test: str) -> bool:
    """Return whether a test, by pytest's name for it, is one of those run for a module."""
    return test.split("::")[0] in test_files(module) and not any(part in test for part in SLOW.get(module, []))
