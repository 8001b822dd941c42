"""Models of equal size: what differs in kind is compared at the same number of parameters."""

import dataclasses

from numpygpt.config import TransformerConfig
from numpygpt.model import TransformerLM

TOLERANCE = 0.01


def count_parameters(config: TransformerConfig) -> int:
    """Return the number of weights of a model."""
    return TransformerLM.blank(config).flat.value.size


def equalised(configs: dict[str, TransformerConfig]) -> dict[str, TransformerConfig]:
    """Return the configs with `d_ff`, the hidden width of the feed-forward layers, such that all are of one size.

    That is the size of the first, which stays as it is. Each unit of `d_ff` costs a row or column of every matrix of
    the layer, so the sizes are as near as one unit allows. ValueError names a model that stays further off than 1 %.
    """
    target, result = None, {}
    for name, config in configs.items():
        target = target or count_parameters(config)
        if count_parameters(config) != target:
            least, next_to_least = (count_parameters(dataclasses.replace(config, d_ff=d_ff)) for d_ff in (1, 2))
            d_ff = max(1, 1 + round((target - least) / (next_to_least - least)))
            config = dataclasses.replace(config, d_ff=d_ff)
        size = count_parameters(config)
        if abs(size - target) > TOLERANCE * target:
            raise ValueError(f"{name} has {size:,} parameters with any d_ff near enough to {target:,}: widen the model")
        result[name] = config
    return result
