"""Models by name: the class, and its sizes by flavor.

A family is a module with MODEL and FLAVORS, and is found by its name: there is no list of families.
"""

import pkgutil
from importlib import import_module
from typing import Any

import torch

from models.attention import choose_kernel

_modules = {module.name: import_module(f"models.{module.name}") for module in pkgutil.iter_modules(__path__)}
MODELS = {name: (module.MODEL, module.FLAVORS) for name, module in _modules.items() if hasattr(module, "MODEL")}


def meta_model(name: str, flavor: str, attention_kernel: str = "auto", dtype: str = "float32") -> Any:
    """The whole model on the meta device, without memory."""
    model_class, flavors = MODELS[name]
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device("meta"):
            model = model_class(flavors[flavor])
    finally:
        torch.set_default_dtype(default)
    choose_kernel(model, attention_kernel)
    return model
