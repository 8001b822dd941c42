"""Arrays that don't fit a layer are refused before anything is changed, and never broadcast in silence."""

import numpy as np
import pytest

from numpygpt.gradcheck import gradcheck
from numpygpt.layers import (
    GELU,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    LoRALinear,
    MultiHeadAttention,
    ReLU,
    RMSNorm,
    ScaledDotProductAttention,
    Sigmoid,
    SiLU,
    SinusoidalPositions,
    Softmax,
    SwiGLU,
)
from numpygpt.model import TransformerConfig, TransformerLM
from numpygpt.module import Module, Parameter

LAYERS = {
    "linear": lambda: Linear(4, 4, True, rng=0),
    "lora": lambda: LoRALinear(Linear(4, 4, True, rng=0), 2, rng=1),
    "rmsnorm": lambda: RMSNorm(4),
    "layernorm": lambda: LayerNorm(4),
    "swiglu": lambda: SwiGLU(4, rng=0),
    "attention": lambda: MultiHeadAttention(4, 2, rng=0),
    "relu": ReLU,
    "sigmoid": Sigmoid,
    "silu": SiLU,
    "gelu": GELU,
    "gelu_tanh": lambda: GELU("tanh"),
    "softmax": Softmax,
    "dropout": lambda: Dropout(0.5, 0),
}
WITH_A_WIDTH = ["linear", "lora", "rmsnorm", "layernorm", "swiglu", "attention"]
X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shape", [(3, 1), (1, 4), (2, 3, 4), (4,)])
def test_a_cotangent_of_another_shape_is_refused_and_changes_no_gradient(name, shape, unchecked):
    layer = LAYERS[name]()
    layer.forward(X)
    with pytest.raises(ValueError, match=r"cotangent has shape .*forward returned shape \(3, 4\)"):
        layer.backward(np.ones(shape, np.float32))
    assert not any(p.grad.any() for p in layer.parameters())


def test_an_embedding_refuses_a_cotangent_of_another_shape(unchecked):
    layer = Embedding(5, 4)
    layer.forward(np.array([0, 1]))
    with pytest.raises(ValueError, match=r"\(2, 1\)"):
        layer.backward(np.ones((2, 1), np.float32))
    assert not layer.weight.grad.any()


def test_a_model_refuses_a_cotangent_of_another_shape(unchecked):
    model = TransformerLM(TransformerConfig(5, 4, 8, 1, 2), rng=0)
    model.forward(np.zeros((2, 3), int))
    with pytest.raises(ValueError, match=r"\(6, 1\)"):
        model.backward(np.ones((6, 1), np.float32))
    assert not model.flat.grad.any()


@pytest.mark.parametrize("name", WITH_A_WIDTH)
def test_an_input_of_another_width_or_of_integers_is_refused(name, unchecked):
    with pytest.raises(ValueError, match=r"size 4.*\(3, 1\)"):
        LAYERS[name]().forward(X[:, :1])
    with pytest.raises(TypeError, match="int"):
        LAYERS[name]().forward(np.ones((3, 4), int))


def test_positions_refuse_an_input_of_another_width(unchecked):
    with pytest.raises(ValueError, match=r"size 4.*\(3, 1\)"):
        SinusoidalPositions(3, 4).forward(X[:, :1], np.arange(3))
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(3,\)"):
        SinusoidalPositions(3, 4).forward(X, np.zeros((2, 3), int))


@pytest.mark.parametrize("mask", [np.zeros((3, 3)), np.ones((3, 3), int), "causal"])
def test_a_mask_that_is_not_boolean_is_refused(mask, unchecked):
    with pytest.raises(TypeError, match="mask must be a boolean array"):
        ScaledDotProductAttention().forward(X, X, X, mask)
    with pytest.raises(TypeError, match="mask must be a boolean array"):
        MultiHeadAttention(4, 2).forward(X, mask=mask)


def test_parameters_that_are_not_floating_point_are_refused():
    with pytest.raises(TypeError, match="int64"):
        Linear(2, 2, dtype=np.int64)


class Nest(Module):
    def __init__(self):
        self.parts = (Linear(2, 2), {"a": RMSNorm(2), "b": [[LayerNorm(2)]]})
        self.scales = [Parameter(np.ones(1))]


def test_parameters_are_found_in_lists_tuples_and_dicts():
    names = [name for name, _ in Nest().named_parameters()]
    assert sorted(names) == [
        "parts.0.weight",
        "parts.1.a.weight",
        "parts.1.b.0.0.bias",
        "parts.1.b.0.0.weight",
        "scales.0",
    ]
    assert not Nest().eval().parts[1]["a"].training


def test_gradcheck_moves_copies_of_its_inputs_and_leaves_gradients_as_they_were():
    x = np.random.default_rng(0).standard_normal((3, 4))
    x.flags.writeable = False
    assert gradcheck(ScaledDotProductAttention(), x, x, x).ok  # one array given three times
    layer = Linear(4, 4, dtype=np.float64, rng=0)
    layer.weight.grad += 7
    assert gradcheck(layer, layer.weight.value).ok
    assert (layer.weight.grad == 7).all()
    with pytest.raises(ValueError, match=r"directions.*0"):
        gradcheck(layer, x, directions=0)
