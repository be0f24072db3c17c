"""Float8 training: a layer's matrix products take inputs scaled to 8 bits (arXiv:2209.05433), by torchao.

Weights, names and checkpoints stay as they are. The head is not converted, because its product is part of the loss.
"""

from dataclasses import replace

from torch import nn

from components.config import Float8, Model

FLOAT8 = "quantize.linear.float8"


def apply_float8(model: nn.Module, model_config: Model, config: Float8) -> None:
    """Swap the linear modules of every layer for torchao's."""
    if FLOAT8 not in model_config.converters:
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # 2 s to import

    convert_to_float8_training(
        model.get_submodule("layers"),
        module_filter_fn=lambda _, name: not any(part in f"layers.{name}" for part in config.filter_fqns),
        config=replace(Float8LinearConfig.from_recipe_name(config.recipe_name), emulate=config.emulate),
    )
