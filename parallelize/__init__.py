"""Everything that knows about more than one device.

`parallelize_<model>` takes a model on the meta device and applies a layout, in the order of order.py. mesh.py has the
ranks by dimension, rules/ the layouts that are refused. A model is found by its name: there is no list of models.
"""

from collections.abc import Callable
from importlib import import_module


def parallelize_model(name: str) -> Callable:
    """parallelize_<name>, which takes (model, mesh, config) and returns the stages that this rank holds."""
    return getattr(import_module(f"parallelize.{name}"), f"parallelize_{name}")
