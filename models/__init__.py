"""Models by name: the class, and its sizes by flavor.

A family is a module with MODEL and FLAVORS, and is found by its name: there is no list of families.
"""

import pkgutil
from dataclasses import replace
from importlib import import_module
from typing import Any, Protocol

import torch

from models.attention import choose_kernel
from models.lora import add_adapters, keep_base
from models.rotary import RopeScaling

_modules = {module.name: import_module(f"models.{module.name}") for module in pkgutil.iter_modules(__path__)}
MODELS = {name: (module.MODEL, module.FLAVORS) for name, module in _modules.items() if hasattr(module, "MODEL")}


class Chosen(Protocol):
    """The table [model] of a job file."""

    @property
    def name(self) -> str: ...
    @property
    def flavor(self) -> str: ...
    @property
    def attention_kernel(self) -> str: ...
    @property
    def rope_scaling(self) -> Any: ...
    @property
    def lora(self) -> Any: ...


def sizes(model: Chosen) -> Any:
    """The configuration of the chosen model: its flavor's, with rotary frequencies stretched as asked."""
    config, asked = MODELS[model.name][1][model.flavor], model.rope_scaling
    if not asked.rope_type:
        return config
    if asked.rope_type == "none":
        return replace(config, rope_scaling=None)
    own = config.rope_scaling
    original = asked.original_max_position_embeddings
    if not original and own and own.rope_type != "linear":
        original = own.original_max_position_embeddings
    original = original or round(config.context_length / (own.factor if own else 1))
    # Of the flavor's own kind of stretching there may be more settings than the job file has keys.
    kept = own if own and own.rope_type == asked.rope_type else RopeScaling(asked.rope_type)
    lengths = {"factor": asked.factor, "original_max_position_embeddings": original}
    stretched = replace(kept, **lengths, beta_fast=asked.beta_fast, beta_slow=asked.beta_slow)
    return replace(config, rope_scaling=stretched, context_length=round(asked.factor * original))


def meta_model(model: Chosen, dtype: str = "") -> Any:
    """The whole model on the meta device, without memory, and with adapters if it is to have some.

    dtype: training.dtype; the base of adapters is then as lora.base says. Without, all are float32: for shapes alone.
    Raises ValueError if adapters are asked for a module that the model does not have, or a matrix cannot be packed.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype or "float32"))
    try:
        with torch.device("meta"):
            whole = MODELS[model.name][0](sizes(model))
        if model.lora.rank:
            add_adapters(whole, model.lora)
            if dtype and model.lora.base:
                keep_base(whole, model.lora.base)
    finally:
        torch.set_default_dtype(default)
    choose_kernel(whole, model.attention_kernel)
    return whole
