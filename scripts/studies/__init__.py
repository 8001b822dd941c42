"""What is said of the parts of a Transformer, tried: one study a file."""

from studies import (
    activation,
    bias_correction,
    gelu_dropout,
    linear_std,
    norm_kind,
    norm_position,
    position,
    preactivation,
    score_scale,
)

MODULES = {
    "norm-position": norm_position,
    "norm-kind": norm_kind,
    "activation": activation,
    "position": position,
    "preactivation": preactivation,
    "gelu-dropout": gelu_dropout,
    "bias-correction": bias_correction,
    "linear-std": linear_std,
    "score-scale": score_scale,
}
STUDIES = {name: module.STUDY for name, module in MODULES.items()}
