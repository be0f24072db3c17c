"""Everything that knows about more than one device.

`parallelize_<model>` takes a model on the meta device and applies a layout in one fixed order; the pieces that exist
so far are mesh.py, rules.py and data.py. `fully_shard` comes last, so that it gathers what all the others left, and
only then is the model given memory and weights.

A model is `models/<name>.py` and `parallelize/<name>.py`: found by its name, so there is no list to keep.
"""

from collections.abc import Callable
from importlib import import_module


def parallelize_model(name: str) -> Callable:
    """parallelize_<name>, which takes (model, mesh, config) and returns the stages that this rank holds."""
    return getattr(import_module(f"parallelize.{name}"), f"parallelize_{name}")
