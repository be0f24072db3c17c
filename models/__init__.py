"""Models by name: the class, and the sizes it comes in by the name of the flavor.

A family is a module with MODEL and FLAVORS, found by its name: there is no list to keep.
"""

import pkgutil
from importlib import import_module

_modules = {module.name: import_module(f"models.{module.name}") for module in pkgutil.iter_modules(__path__)}
MODELS = {name: (module.MODEL, module.FLAVORS) for name, module in _modules.items() if hasattr(module, "MODEL")}
