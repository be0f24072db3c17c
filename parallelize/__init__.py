"""Everything that knows about more than one device.

`parallelize_<model>` takes a model on the meta device and applies a layout, always in this order (ORDER):

  stages             are cut first, so that no device makes what it won't keep
  float8             swaps linear modules, which tensor parallel then splits
  tensor parallel    changes what a module's parameters are, so it comes before all that wraps them
  context parallel   changes only the attention cores
  compile            takes a layer's `forward`, in which nothing is replaced any more
  checkpointing      goes around what is compiled: torch 2.13 fails the other way round with tensor parallel
  data parallel      is outermost, so that `fully_shard` gathers what all the others left

Only then is the model given memory and weights, and its ties again; the schedule of a pipeline is built last. mesh.py
has the ranks by dimension, rules/ the layouts that are refused.

A model is `models/<name>.py` and `parallelize/<name>.py`: found by its name, so there is no list to keep.
"""

from collections.abc import Callable
from importlib import import_module

ORDER = (
    "apply_float8",
    "apply_tensor_parallel",
    "apply_context_parallel",
    "apply_compile",
    "apply_activation_checkpoint",
    "apply_data_parallel",
)


def parallelize_model(name: str) -> Callable:
    """parallelize_<name>, which takes (model, mesh, config) and returns the stages that this rank holds."""
    return getattr(import_module(f"parallelize.{name}"), f"parallelize_{name}")
