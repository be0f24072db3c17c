"""The layout of adapters in a PEFT folder: names, shapes and settings (PEFT 0.21, transformers 5).

In PEFT the experts of a layer have two parameters, gate_up_proj and down_proj. PEFT fuses gate and up: two rank-r
adapters become one of rank 2 r, whose B is block-diagonal. So do adapters of matrices that are one tensor in the files,
such as queries, keys and values of Phi-3.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from models.hugging_face import Part
from models.moe import Experts
from models.parameters import is_adapter

_FUSED = {"w1": ("w1", "w3"), "w2": ("w2",), "w3": ("w1", "w3")}
"""Matrix of an expert -> the matrices that PEFT fuses into the same parameter."""


class Place(NamedTuple):
    """The place of an adapter's matrix in adapter_model.safetensors."""

    name: str
    """The tensor's name."""
    shape: tuple[int, ...]
    """The tensor's shape."""
    of: Callable[[Tensor], Tensor]
    """Tensor -> its view with the matrix's shape."""
    target: str
    """The module or parameter that PEFT adapts."""
    is_parameter: bool
    parts: int = 1
    """Number of adapters that PEFT fuses into one; its rank is the sum of their ranks."""


def places(model: Any) -> dict[str, Place]:
    """Name of each adapter's matrix -> its place. The model may be a pipeline stage, and may hold shards."""
    with_experts = any(isinstance(module, Experts) for module in model.modules())
    return {name: _place(model, name, with_experts) for name, _ in model.named_parameters() if is_adapter(name)}


def targets(found: Iterable[Place]) -> dict[str, list[str]]:
    """The keys of adapter_config.json that list the adapted modules and parameters."""
    found = list(found)
    parameters = {place.target.split(".", 3)[3] for place in found if place.is_parameter}
    modules = {place.target.rpartition(".")[2] for place in found if not place.is_parameter}
    return {"target_modules": sorted(modules)} | ({"target_parameters": sorted(parameters)} if parameters else {})


def _place(model: Any, name: str, with_experts: bool) -> Place:
    module, _, factor = name.rpartition(".")
    parameter = model.get_parameter(name)
    if isinstance(model.get_submodule(module), Experts):
        return _place_of_experts(model, module, *factor.split("_", 1))
    hf_name = model.hf_name(f"{module}.weight")
    if isinstance(hf_name, Part):
        return _place_of_rows(model, module, factor, hf_name)
    target = hf_name.removesuffix(".weight")
    key = f"base_model.model.{target}.{factor}.weight"
    # In a model with experts, PEFT takes modules of these names for matrices of experts.
    as_parameter = with_experts and target.rpartition(".")[2] in ("gate_proj", "up_proj", "down_proj")
    target += ".weight" * as_parameter
    return Place(key, tuple(parameter.shape), lambda whole: whole, target, as_parameter)


def _place_of_rows(model: Any, module: str, factor: str, part: Part) -> Place:
    """The place of an adapter's matrix of a matrix that is some of the rows of a tensor."""
    parent, _, child = module.rpartition(".")
    adapted = {name for name, each in model.get_submodule(parent).named_children() if hasattr(each, "lora_A")}
    names = {name: model.hf_name(f"{parent}.{name}.weight") for name in sorted(adapted)}
    fused = [name for name, there in names.items() if isinstance(there, Part) and there.name == part.name]
    rank, in_features = model.get_parameter(f"{module}.lora_A").shape
    ranks = slice(fused.index(child) * rank, (fused.index(child) + 1) * rank)
    rows = slice(part.rows.start, part.rows.stop) if factor == "lora_B" else ranks
    columns = ranks if factor == "lora_B" else slice(None)
    all_ranks = len(fused) * rank
    shape = (part.all_rows, all_ranks) if factor == "lora_B" else (all_ranks, in_features)
    target = part.name.removesuffix(".weight")
    name = f"base_model.model.{target}.{factor}.weight"
    return Place(name, shape, lambda whole: whole[rows, columns], target, False, len(fused))


def _place_of_experts(model: Any, module: str, matrix: str, factor: str) -> Place:
    """The place of lora_A or lora_B of one matrix of all experts.

    PEFT's tensors have two dimensions: A has rows (expert, rank), and B has columns (rank, expert).
    """
    experts = model.get_submodule(module)
    fused = [other for other in _FUSED[matrix] if hasattr(experts, f"{other}_lora_A")]
    count, rank, in_features = experts.get_parameter(f"{matrix}_lora_A").shape
    out_features = experts.get_parameter(f"{matrix}_lora_B").shape[1]
    ranks = slice(fused.index(matrix) * rank, (fused.index(matrix) + 1) * rank)
    all_ranks = len(fused) * rank
    hf_name = model.hf_name(f"{module}.{matrix}")
    if isinstance(hf_name, Part):
        rows = slice(hf_name.first, None, hf_name.step)
    else:
        half = _FUSED[matrix].index(matrix)
        rows = slice(half * out_features, (half + 1) * out_features)
    layer = (hf_name.name if isinstance(hf_name, Part) else hf_name).partition(".experts.")[0]
    layer = layer.replace("block_sparse_moe", "mlp")  # Mixtral's module has another name than its files
    # PEFT wraps the experts once per parameter. The wrapper of the last parameter, down_proj, is outermost.
    inner = ".base_layer" if matrix != "w2" and hasattr(experts, "w2_lora_A") else ""
    name = f"base_model.model.{layer}.experts{inner}.{factor}.weight"
    target = f"{layer}.experts.{'down_proj' if matrix == 'w2' else 'gate_up_proj'}"
    if factor == "lora_A":
        shape = (count * all_ranks, in_features)
        return Place(name, shape, lambda all_A: all_A.unflatten(0, (count, -1))[:, ranks], target, True, len(fused))
    shape = (len(_FUSED[matrix]) * out_features, all_ranks * count)
    return Place(
        *(name, shape, lambda all_B: all_B.unflatten(1, (-1, count))[rows, ranks].permute(2, 0, 1), target, True),
        len(fused),
    )
