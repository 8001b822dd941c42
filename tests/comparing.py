"""How two computations of the same numbers are compared: at weights that let every part be seen, to a tight bound."""

import numpy as np

TOLERANCE = 1e-9


def randomise(module, rng):
    """Random weights, gains and biases too; matrices such that what comes out has the scale of what goes in."""
    for p in module.parameters():
        p.value = rng.standard_normal(p.shape) * (p.shape[-1] ** -0.5 if p.decays else 1.0)
    return module


def deviation(ours, theirs):
    """The largest difference, relative to the largest number if that exceeds 1. Torch's tensors are arrays too."""
    ours, theirs = (np.asarray(x.detach() if hasattr(x, "detach") else x, np.float64) for x in (ours, theirs))
    assert ours.shape == theirs.shape
    return float(np.max(np.abs(ours - theirs), initial=0)) / max(1.0, float(np.max(np.abs(theirs), initial=0)))


def assert_close(ours, theirs, name):
    difference = deviation(ours, theirs)
    assert difference <= TOLERANCE, f"{name}: {difference:.1e}"  # not NaN either


def assert_all_close(ours, theirs):
    """The same for arrays by name; the names must be the same too."""
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert_close(array, theirs[name], name)
