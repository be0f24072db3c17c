"""The model families. MODELS[name] is the model class and a dict: flavor -> configuration.

A family is a module of this package that defines MODEL and FLAVORS. MODELS is built from the modules, so no list of
families has to be kept.
"""

import difflib
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, Protocol

import torch

from models.attention import choose_kernel
from models.hugging_face import from_hugging_face
from models.lora import add_adapters, keep_base
from models.mup import scales
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
    def sizes(self) -> Mapping[str, Any]: ...
    @property
    def attention_kernel(self) -> str: ...
    @property
    def rope_scaling(self) -> Any: ...
    @property
    def lora(self) -> Any: ...


def config_class(name: str) -> Any:
    """The class of a family's configurations."""
    return type(next(iter(MODELS[name][1].values())))


def _from_json(value: Any) -> Any:
    """A field's value: JSON has lists for tuples, and a table for the RoPE scaling."""
    if isinstance(value, dict):
        return RopeScaling(**{name: _from_json(each) for name, each in value.items()})
    return tuple(value) if isinstance(value, list) else value


def of_hugging_face(given: dict[str, Any]) -> tuple[str, Any]:
    """The name of the family that has the model of a config.json, and its configuration.

    Raises ValueError if no family has the model; the reason names the field, and families that come near.
    """
    families = {kind: name for name in MODELS for kind in (MODELS[name][0].hf_type, *config_class(name).hf_defaults)}
    families.pop("", None)
    kind, classes = given.get("model_type"), given.get("architectures") or []
    name = families.get(kind) if isinstance(kind, str) else None
    if name is None or not isinstance(kind, str):
        near = difflib.get_close_matches(str(kind), families, 3, 0.5)
        near += [other for other in families if other not in near and _accepts(families[other], given)]
        nearest = f"; nearest are {', '.join(near[:5])}, by name or by their fields" if near else ""
        raise ValueError(f"model_type = {kind}: not one of {', '.join(families)}{nearest}")
    stem = kind.removesuffix("_text").replace("_", "")
    if classes and not any(re.fullmatch(rf"{stem}(forcausallm|model)", str(each).lower()) for each in classes):
        raise ValueError(f"architectures = {classes}: not a class of model_type = {kind}")
    try:
        return name, from_hugging_face(given, config_class(name))
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        named = {*re.findall(r"(\w+) = ", str(error))}
        near = [other for other in MODELS if other != name and _knows(other, named) and _accepts(other, given)]
        nearest = f"; families that accept such a config.json: {', '.join(near)}" if near else ""
        raise ValueError(f"{error}{nearest}") from error


def _knows(name: str, fields: set[str]) -> bool:
    """Whether a family does more with some of these fields of config.json than to ignore them."""
    known = {*config_class(name).hf_fields.values(), *config_class(name).hf_fixed, "rope_type"}
    return bool(MODELS[name][0].hf_type) and bool(fields & known)


def _accepts(name: str, given: dict[str, Any]) -> bool:
    """Whether a family has all that a config.json asks for, the model_type left aside."""
    try:
        from_hugging_face(given | {"model_type": MODELS[name][0].hf_type}, config_class(name))
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        return False
    return True


def sizes(model: Chosen) -> Any:
    """The configuration of the chosen flavor, with the sizes and RoPE scaling that the job file asks for.

    A flavor that is a folder has all its sizes in model.sizes. Raises ValueError if sizes do not fit each other, and
    TypeError for an unknown field.
    """
    flavors, asked = MODELS[model.name][1], model.rope_scaling
    given = {name: _from_json(value) for name, value in model.sizes.items()}
    flavor = flavors.get(model.flavor)
    config = replace(flavor, **given) if flavor else config_class(model.name)(**given)
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


def meta_model(model: Chosen, dtype: str = "", mup_base: str | None = None) -> Any:
    """Build the whole model on the meta device, which allocates no memory; with lora.rank, add its adapters.

    dtype: training.dtype. If it is given, frozen weights beside adapters have the precision of lora.base. By default,
    all parameters are float32, which suffices for shapes.
    mup_base: optimizer.mup_base, the flavor whose width is the base of rates and starting values (models/mup.py).
    Raises ValueError if adapters are asked for a module that the model lacks, if a matrix cannot be packed, or if
    mup_base cannot be the base.
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
        if mup_base:
            family, flavors = MODELS[model.name]
            with torch.device("meta"):
                base = replace(flavors[mup_base], mtp_layers=whole.config.mtp_layers)
                whole.scales = scales(whole, family(base))
    finally:
        torch.set_default_dtype(default)
    choose_kernel(whole, model.attention_kernel)
    return whole
