"""The config refuses, by the field's name, what no model can be made of."""

import dataclasses
import json
import re

import numpy as np
import pytest

from numpygpt.config import CHOICES, RopeScaling, TransformerConfig

SMALL = {"vocab_size": 5, "context_length": 4, "d_model": 8, "num_layers": 1, "num_heads": 2}
WRONG = {
    **{name: [0, -1, 2.5, True, "4", None] for name in SMALL},
    "num_kv_heads": [0, 1.5],
    "d_ff": [0, -3, 2.5],
    "rope_scaling": ["linear", 2.0, {"kind": "linear"}],
    "rope_theta": [0.0, -1.0, float("inf"), float("nan"), "10000"],
    "norm_eps": [0.0, -1e-5, float("nan"), None, True],
    "bias": [1, None],
    "tie_embeddings": [0, "no"],
    "dropout": [-0.1, 1.0, float("nan"), "0.1", False],
    **{name: ["other", None] for name in CHOICES},
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in WRONG.items() for v in values])
def test_a_bad_value_is_refused_with_its_field(field, value, unchecked):
    with pytest.raises(ValueError, match=rf"^{field} .*{re.escape(repr(value))}"):
        TransformerConfig(**SMALL | {field: value})


def test_every_field_is_checked():
    assert WRONG.keys() == {f.name for f in dataclasses.fields(TransformerConfig)}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_heads": 3}, "num_heads 3 doesn't divide d_model 8"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads 3 doesn't divide num_heads 4"),
        ({"d_model": 15, "num_heads": 3}, "positions='rope'.* = 5 is odd"),  # huggingface/transformers#48101
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(fields, named):
    with pytest.raises(ValueError, match=named):
        TransformerConfig(**SMALL | fields)


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_is_taken(name):
    for choice in CHOICES[name]:
        assert getattr(TransformerConfig(**SMALL, **{name: choice}), name) == choice


def test_fewer_key_value_heads_and_any_d_ff_are_taken():
    config = TransformerConfig(**SMALL | {"num_heads": 4}, num_kv_heads=2, d_ff=7)
    assert (config.num_kv_heads, config.d_ff) == (2, 7)


def test_an_odd_head_width_works_without_rope():
    assert TransformerConfig(**SMALL | {"d_model": 15, "num_heads": 3}, positions="sinusoidal").d_model == 15


def test_numpy_integers_and_reals_are_numbers(unchecked):
    numbers = {"d_model": np.int64(8), "dropout": np.float32(0.5), "rope_theta": 100}
    assert TransformerConfig(**SMALL | numbers).dropout == 0.5


def test_a_config_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TransformerConfig(**SMALL).d_model = 16


def test_from_dict_goes_back_and_names_unknown_and_missing_fields():
    config = TransformerConfig(**SMALL, ffn="relu")
    assert TransformerConfig.from_dict(dataclasses.asdict(config)) == config
    with pytest.raises(ValueError, match="unknown config field n_head, n_layer"):
        TransformerConfig.from_dict(SMALL | {"n_layer": 1, "n_head": 1})
    with pytest.raises(ValueError, match="missing config field num_layers, vocab_size"):
        TransformerConfig.from_dict({"context_length": 4, "d_model": 8, "num_heads": 2})


LLAMA3 = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192}


@pytest.mark.parametrize("scaling", [{"kind": "linear", "factor": 2.0}, LLAMA3])
def test_a_scaling_goes_through_json(scaling):
    config = TransformerConfig(**SMALL, rope_scaling=RopeScaling(**scaling))
    assert TransformerConfig.from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config
    with pytest.raises(ValueError, match="unknown rope_scaling field beta"):
        TransformerConfig.from_dict(SMALL | {"rope_scaling": {**scaling, "beta": 1}})
    with pytest.raises(ValueError, match="missing rope_scaling field factor"):
        TransformerConfig.from_dict(SMALL | {"rope_scaling": {"kind": "linear"}})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "yarn"),
        ("kind", None),
        *(("factor", wrong) for wrong in (0.0, -1.0, float("nan"), "2", True)),
        *(("low_freq_factor", wrong) for wrong in (0.0, 4.0, 5.0, None)),
        *(("high_freq_factor", wrong) for wrong in (float("inf"), 1.0)),
        *(("original_context", wrong) for wrong in (0, 2.5)),
    ],
)
def test_a_bad_scaling_is_refused_with_its_field(field, value, unchecked):
    with pytest.raises(ValueError, match=rf"{field}.*{re.escape(repr(value))}"):
        RopeScaling(**LLAMA3 | {field: value})


def test_a_linear_scaling_has_a_factor_alone():
    with pytest.raises(ValueError, match=r"original_context is of kind llama3 alone.*64"):
        RopeScaling("linear", 2.0, original_context=64)
