"""The model families. MODELS[name] is the model class and a dict: flavor -> configuration.

A family is a module of this package that defines MODEL and FLAVORS. MODELS is built from the modules, so no list of
families has to be kept.
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
    def vocab_size(self) -> int: ...
    @property
    def attention_kernel(self) -> str: ...
    @property
    def rope_scaling(self) -> Any: ...
    @property
    def lora(self) -> Any: ...


def sizes(model: Chosen) -> Any:
    """The configuration of the chosen flavor, with the vocabulary and RoPE scaling that the job file asks for."""
    config, asked = MODELS[model.name][1][model.flavor], model.rope_scaling
    config = replace(config, vocab_size=model.vocab_size or config.vocab_size)
    if not asked.rope_type:
        return config
    if asked.rope_type == "none":
        return replace(config, rope_scaling=None)
    default = config.rope_scaling
    original = asked.original_max_position_embeddings
    if not original and default and default.rope_type != "linear":
        original = default.original_max_position_embeddings
    original = original or round(config.context_length / (default.factor if default else 1))
    # A flavor's scaling of the same type may have settings that the job file has no key for.
    base = default if default and default.rope_type == asked.rope_type else RopeScaling(asked.rope_type)
    lengths = {"factor": asked.factor, "original_max_position_embeddings": original}
    scaling = replace(base, **lengths, beta_fast=asked.beta_fast, beta_slow=asked.beta_slow)
    return replace(config, rope_scaling=scaling, context_length=round(asked.factor * original))


def meta_model(model: Chosen, dtype: str = "") -> Any:
    """Build the whole model on the meta device, which allocates no memory; with lora.rank, add its adapters.

    dtype: training.dtype. If it is given, frozen weights beside adapters have the precision of lora.base. By default,
    all parameters are float32, which suffices for shapes.
    Raises ValueError if adapters are asked for a module that the model lacks, or if a matrix cannot be packed.
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
