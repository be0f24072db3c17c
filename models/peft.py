"""Where adapters are in a folder of PEFT's: names, shapes and settings there (PEFT 0.21, transformers 5).

There the experts of a layer have two parameters. Gate and up are one, gate_up_proj: the adapters of both are one of
twice the rank, whose B is 0 between the ranks of one and the rows of the other.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from models.hugging_face import Part
from models.moe import Experts
from models.parameters import is_adapter

_FUSED = {"w1": ("w1", "w3"), "w2": ("w2",), "w3": ("w1", "w3")}
"""Matrix of an expert here -> those that are one parameter there."""


class Place(NamedTuple):
    """Where a matrix of an adapter is in adapter_model.safetensors."""

    name: str
    """Of the tensor."""
    shape: tuple[int, ...]
    """Of the tensor."""
    of: Callable[[Tensor], Tensor]
    """Tensor -> a view of it with the matrix's shape."""
    target: str
    """What is adapted there, a module or a parameter."""
    is_parameter: bool
    parts: int = 1
    """Adapters that are one there, of so many times the rank."""


def places(model: Any) -> dict[str, Place]:
    """Of each matrix of the model's adapters, by name. The model may be a stage, and hold slices."""
    with_experts = any(isinstance(module, Experts) for module in model.modules())
    return {name: _place(model, name, with_experts) for name, _ in model.named_parameters() if is_adapter(name)}


def targets(found: Iterable[Place]) -> dict[str, list[str]]:
    """The keys of adapter_config.json that say what is adapted."""
    found = list(found)
    parameters = {place.target.split(".", 3)[3] for place in found if place.is_parameter}
    modules = {place.target.rpartition(".")[2] for place in found if not place.is_parameter}
    return {"target_modules": sorted(modules)} | ({"target_parameters": sorted(parameters)} if parameters else {})


def _place(model: Any, name: str, with_experts: bool) -> Place:
    module, _, own = name.rpartition(".")
    parameter = model.get_parameter(name)
    if isinstance(model.get_submodule(module), Experts):
        return _place_of_experts(model, module, *own.split("_", 1))
    target = model.hf_name(f"{module}.weight").removesuffix(".weight")
    key = f"base_model.model.{target}.{own}.weight"
    # In models with experts PEFT takes these names of modules for matrices of experts.
    as_parameter = with_experts and target.rpartition(".")[2] in ("gate_proj", "up_proj", "down_proj")
    target += ".weight" * as_parameter
    return Place(key, tuple(parameter.shape), lambda whole: whole, target, as_parameter)


def _place_of_experts(model: Any, module: str, matrix: str, own: str) -> Place:
    """Both tensors there are of rank two: A has rows of ranks of experts, and B columns of experts of ranks."""
    experts = model.get_submodule(module)
    fused = [each for each in _FUSED[matrix] if hasattr(experts, f"{each}_lora_A")]
    count, rank, in_features = experts.get_parameter(f"{matrix}_lora_A").shape
    out_features = experts.get_parameter(f"{matrix}_lora_B").shape[1]
    ranks = slice(fused.index(matrix) * rank, (fused.index(matrix) + 1) * rank)
    all_ranks = len(fused) * rank
    there = model.hf_name(f"{module}.{matrix}")
    if isinstance(there, Part):
        rows = slice(there.first, None, there.step)
    else:
        half = _FUSED[matrix].index(matrix)
        rows = slice(half * out_features, (half + 1) * out_features)
    layer = (there.name if isinstance(there, Part) else there).partition(".experts.")[0]
    # PEFT wraps the experts once for each parameter: outermost for the last.
    inner = ".base_layer" if matrix != "w2" and hasattr(experts, "w2_lora_A") else ""
    name = f"base_model.model.{layer}.experts{inner}.{own}.weight"
    target = f"{layer}.experts.{'down_proj' if matrix == 'w2' else 'gate_up_proj'}"
    if own == "lora_A":
        shape = (count * all_ranks, in_features)
        return Place(name, shape, lambda all_A: all_A.unflatten(0, (count, -1))[:, ranks], target, True, len(fused))
    shape = (len(_FUSED[matrix]) * out_features, all_ranks * count)
    return Place(
        *(name, shape, lambda all_B: all_B.unflatten(1, (-1, count))[rows, ranks].permute(2, 0, 1), target, True),
        len(fused),
    )
