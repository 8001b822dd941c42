"""What the tests draw: shapes, options and seeds by Hypothesis, and all numbers from a drawn generator.

Shapes include no batch axis, several, and sizes of 1. Numbers are standard normal: at that scale no term of a
gradient is too small to be missed.
"""

import numpy as np
from hypothesis import strategies as st

from numpygpt.gradcheck import gradcheck
from numpygpt.layers import Dropout, ReLU
from numpygpt.module import Module

rngs = st.builds(np.random.default_rng, st.integers(0, 2**32 - 1))
sizes = st.integers(1, 5)
batch_shapes = st.sampled_from([(), (1,), (3,), (2, 3), (2, 1), (1, 2, 2)])
epsilons = st.sampled_from([1e-5, 0.1, 1.0])


def away_from_zero(x, distance=0.01):
    """Move every element away from zero, where ReLU has a kink that no difference may cross."""
    return x + np.copysign(distance, x)


def far_from_kinks(layer, distance=1e-3):
    """Whether no ReLU in the layer has just had an input too near its kink for a difference."""
    return all(np.min(m.distance, initial=1) > distance for m in layer.modules() if isinstance(m, WatchedReLU))


class WatchedReLU(ReLU):
    """A ReLU that notes how far its inputs were from the kink."""

    def forward(self, x):
        self.distance = np.abs(x)
        return super().forward(x)


def watch_relus(layer):
    """Let `far_from_kinks` see every ReLU of the layer."""
    for module in layer.modules():
        if isinstance(getattr(module, "activation", None), ReLU):
            module.activation = WatchedReLU()
    return layer


def unit_scale(layer, rng):
    """Set every parameter to standard normal values."""
    for p in layer.parameters():
        p.value = rng.standard_normal(p.shape)
    return layer


def check(layer, *inputs, **kwargs):
    """Raise unless the gradients of all float inputs and parameters are right, by both oracles."""
    report = gradcheck(layer, *inputs, raise_on_failure=True, **kwargs)
    assert not report.skipped, report.skipped
    return report


def check_along(layer, *inputs, **kwargs):
    """Do the same for what is made of several layers: not element by element, which takes longer."""
    return check(layer, *inputs, elements=1, **kwargs)


class Reseeded(Module):
    """A layer whose dropouts draw the same masks in every forward."""

    def __init__(self, layer):
        self.layer = layer

    def forward(self, *inputs, **kwargs):
        for seed, module in enumerate(m for m in self.layer.modules() if isinstance(m, Dropout)):
            module.rng = np.random.default_rng(seed)
        return self.layer.forward(*inputs, **kwargs)

    def backward(self, *cotangents):
        return self.layer.backward(*cotangents)


@st.composite
def positions(draw, batch, length, limit, rng):
    """Draw token positions below `limit`: counted from 0 or an offset, or in any order, for all or each sequence."""
    kind = draw(st.sampled_from(["counted", "offset", "shared", "batched", "last batch axis"]))
    if kind == "counted":
        return np.arange(length)
    if kind == "offset":
        return np.arange(length) + draw(st.integers(0, limit - length))
    leading = {"shared": (), "batched": batch, "last batch axis": batch[-1:]}[kind]
    return rng.integers(0, limit, (*leading, length))


@st.composite
def masks(draw, batch, queries, keys, rng):
    """Draw a mask or none: of any share of visible keys (also 0 and 1), for all or each sequence."""
    if draw(st.booleans()):
        return None
    leading = draw(st.sampled_from([(), batch, batch[-1:]]))
    return rng.random((*leading, queries, keys)) < draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))


def arrays_in(saved):
    """Yield every array in a nest of tuples and lists."""
    if isinstance(saved, np.ndarray):
        yield saved
    elif isinstance(saved, tuple | list):
        for item in saved:
            yield from arrays_in(item)
