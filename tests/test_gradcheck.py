"""The checker passes what is right and catches whatever is wrong: a check that cannot fail checks nothing."""

import numpy as np
import pytest
from strategies import unit_scale

from numpygpt.gradcheck import GradientError, gradcheck
from numpygpt.layers import GELU, GLU, CrossEntropy, Embedding, LayerNorm, Linear, MultiHeadAttention, RMSNorm, Softmax
from numpygpt.layers import RotaryPositionalEmbedding as Rope
from numpygpt.layers import ScaledDotProductAttention as Attention
from numpygpt.module import Module

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 4))
ROPE = Rope(10.0, 2, 3, dtype=np.float64)
LAYERS = {
    "linear": (Linear(4, 3, True, dtype=np.float64), X),
    "embedding": (Embedding(5, 2, dtype=np.float64), np.array([0, 2, 2])),
    "rmsnorm": (RMSNorm(4, dtype=np.float64), X),
    "layernorm": (LayerNorm(4, dtype=np.float64), X),
    "gelu": (GELU(), X),
    "glu": (GLU(4, 3, bias=True, dtype=np.float64), X),
    "rope": (Rope(10.0, 4, 3, dtype=np.float64), X, np.arange(3)),
    "softmax": (Softmax(), X),
    "attention": (Attention(), X, X[::-1].copy(), X + 1),
    "multi-head": (MultiHeadAttention(4, 2, 1, ROPE, True, dtype=np.float64), X),
    "cross-entropy": (CrossEntropy(), X, np.zeros((2, 3), int)),
}
for layer, *_ in LAYERS.values():
    unit_scale(layer, RNG)


def gradients_of(name):
    layer, *inputs = LAYERS[name]
    floats = [f"input {i}" for i, x in enumerate(inputs) if x.dtype.kind == "f"]
    return [*floats, *dict(layer.named_parameters())]


class Wrong(Module):
    """A layer with one gradient multiplied by a factor."""

    def __init__(self, layer, victim, factor):
        self.layer, self.victim, self.factor = layer, victim, factor

    def named_parameters(self):
        return self.layer.named_parameters()

    def forward(self, *inputs):
        return self.layer.forward(*inputs)

    def backward(self, *cotangents):
        parameters = dict(self.named_parameters())
        before = {name: p.grad.copy() for name, p in parameters.items()}
        dx = self.layer.backward(*cotangents)
        if self.victim in parameters:
            p = parameters[self.victim]
            p.grad = before[self.victim] + self.factor * (p.grad - before[self.victim])
            return dx
        i = int(self.victim.removeprefix("input "))
        return self.factor * dx if not isinstance(dx, tuple) else (*dx[:i], self.factor * dx[i], *dx[i + 1 :])


@pytest.mark.parametrize("factor", [-1, 0, 0.5, 1.001])
@pytest.mark.parametrize(("name", "victim"), [(name, v) for name in LAYERS for v in gradients_of(name)])
def test_one_wrong_gradient_is_found_and_named(name, victim, factor):
    layer, *inputs = LAYERS[name]
    report = gradcheck(Wrong(layer, victim, factor), *inputs, directions=1)
    assert {row.name: row.ok for row in report.rows} == {v: v != victim for v in gradients_of(name)} and not report.ok
    assert str(report).count("WRONG") == 1


def test_a_failure_raises_when_asked():
    with pytest.raises(GradientError, match=r"(?s)Wrong: a gradient is wrong.*bias.*WRONG"):
        gradcheck(Wrong(LAYERS["linear"][0], "bias", -1), X, raise_on_failure=True)


class FlippedNorm(RMSNorm):
    def backward(self, dy):
        r, h = self.saved
        self.weight.grad += np.sum(dy * h, axis=(0, 1))
        dh = dy * self.weight.value
        return r * (dh + h * np.mean(dh * h, axis=-1, keepdims=True))


class FlippedSoftmax(Softmax):
    def backward(self, dp):
        return self.saved * (dp + np.sum(dp * self.saved, axis=-1, keepdims=True))


class UniformSoftmax(Softmax):
    """Right for a cotangent of ones, which the check must not use."""

    def backward(self, dp):
        return np.zeros_like(dp)


class FlippedRope(Rope):
    def backward(self, dy):
        return self.rotate(dy, *self.saved)


class KeyWithoutScale(Attention):
    """Misses 1/sqrt(d_k) in the key's gradient only."""

    def backward(self, do):
        dq, dk, dv = super().backward(do)
        return dq, dk * 2, dv


class Assigning(Linear):
    def backward(self, dy):
        self.weight.grad[...] = 0
        self.bias.grad[...] = 0
        return super().backward(dy)


@pytest.mark.parametrize(
    ("layer", "inputs", "wrong"),
    [
        (FlippedNorm(4, dtype=np.float64), [X], ["input 0"]),
        (FlippedSoftmax(), [X], ["input 0"]),
        (UniformSoftmax(), [X], ["input 0"]),
        (FlippedRope(10.0, 4, 3, dtype=np.float64), [X, np.arange(3)], ["input 0"]),
        (KeyWithoutScale(), [X, X, X], ["input 1"]),
        (Assigning(4, 2, True, dtype=np.float64), [X], ["weight", "bias"]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_one_wrong_line_of_a_backward_is_found(layer, inputs, wrong):
    # flagos-ai/FlagGems#5392, tenstorrent/tt-metal#53215: hidden by a uniform cotangent or a loose tolerance
    assert [row.name for row in gradcheck(layer, *map(np.copy, inputs)).rows if not row.ok] == wrong


class Exp(Module):
    def forward(self, x):
        self.saved = np.exp(x)
        return self.saved

    def backward(self, dy):
        return dy * self.saved


class ExpTimesInput(Exp):
    def backward(self, dy):
        return dy * self.saved * X


class NaN(Exp):
    def backward(self, dy):
        return np.full_like(dy, np.nan)


def test_the_derivative_of_exp_is_its_output():
    # nn-zero-to-hero#52 is wrong as filed
    assert gradcheck(Exp(), X).ok and not gradcheck(ExpTimesInput(), X).ok


def test_a_gradient_of_nan_is_wrong():
    assert not gradcheck(NaN(), X).ok


class ChangesInput(Exp):
    def forward(self, x):
        self.x = x
        return super().forward(x)

    def backward(self, dy):
        self.x[0] += 1
        return super().backward(dy)


class ChangesCotangent(Exp):
    def backward(self, dy):
        dy *= self.saved
        return dy


class Random(Exp):
    rng = np.random.default_rng(0)

    def forward(self, x):
        return super().forward(x + self.rng.random())


class WrongShape(Exp):
    def backward(self, dy):
        return super().backward(dy)[0]


class OneTooMany(Exp):
    def backward(self, dy):
        return super().backward(dy), dy


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (ChangesInput(), "changed an input"),
        (ChangesCotangent(), "changed its cotangent"),
        (Random(), "deterministic"),
        (WrongShape(), r"input 0 has shape \(2, 3, 4\), but its gradient has shape \(3, 4\)"),
        (OneTooMany(), "2 gradients for 1"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_layer_that_breaks_the_rules_is_refused(layer, named):
    with pytest.raises(GradientError, match=named):
        gradcheck(layer, X)


@pytest.mark.parametrize(
    ("layer", "x", "named"),
    [(Exp(), X.astype(np.float32), "input 0 is float32"), (Linear(4, 2), X, "weight is float32")],
)
def test_float32_is_refused(layer, x, named):
    with pytest.raises(TypeError, match=named):
        gradcheck(layer, x)


class TwoOutputs:
    """Not a Module: forward and backward suffice."""

    def forward(self, x, y):
        self.saved = x, y
        return x * y, x + y

    def backward(self, da, db):
        x, y = self.saved
        return da * y + db, da * x + db


def test_any_object_with_several_inputs_and_outputs_can_be_checked():
    assert [row.name for row in gradcheck(TwoOutputs(), X, X + 1, raise_on_failure=True).rows] == ["input 0", "input 1"]


def test_a_function_that_is_zero_with_gradient_zero_is_right():
    report = gradcheck(Linear(4, 2, std=0.0, dtype=np.float64), 0 * X)
    assert report.ok and "ok" in str(report)


def test_values_are_put_back_bit_for_bit():
    layer, x = LayerNorm(4, dtype=np.float64), X.copy()
    unit_scale(layer, RNG)
    before = layer.state_dict()
    gradcheck(layer, x)
    assert np.array_equal(x, X)
    assert all(np.array_equal(before[name], value) for name, value in layer.state_dict().items())
