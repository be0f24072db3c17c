"""Low-rank adapters (LoRA, arXiv:2106.09685): beside a frozen matrix the product of two small ones, which are trained.

An adapted matrix keeps its name, layers.0.attention.wq.weight, and has layers.0.attention.wq.lora_A and .lora_B.
"""

import difflib
from typing import Any, Literal, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from models.parameters import is_adapter, set_trained


class Adapters(Protocol):
    """The table [model.lora] of a job file."""

    @property
    def rank(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def target_modules(self) -> Literal["all-linear"] | list[str]: ...
    @property
    def use_rslora(self) -> bool: ...


class AdaptedLinear(nn.Linear):
    """y = W x + scale B A x, with A (r, in) and B (out, r), in place of a linear module, whose parameters it takes."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.lora_B = nn.Parameter(linear.weight.new_empty(linear.out_features, rank))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """What the adapter adds; tensor parallel replaces it."""
        return low_rank(x, self.lora_A, self.lora_B, self.scale)


def low_rank(x: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
    """scale B A x of x (..., in), A (r, in) and B (out, r)."""
    return F.linear(F.linear(x, lora_A) * scale, lora_B)


def add_adapters(model: Any, config: Adapters) -> None:
    """Give the targets adapters; from then on nothing else of the model is trained.

    all-linear is every matrix of the layers, and not the head, as in PEFT. Raises ValueError for a name that is not one
    of theirs, here or in Hugging Face's files.
    """
    linears = {
        name: module for name, module in model.get_submodule("layers").named_modules() if type(module) is nn.Linear
    }
    names = {name: {name.rpartition(".")[2], _name_there(model, name)} for name in linears}
    asked = config.target_modules
    known = {each for both in names.values() for each in both}
    if unknown := [] if asked == "all-linear" else [each for each in asked if each not in known]:
        near = difflib.get_close_matches(unknown[0], sorted(known), 1, 0.0)
        raise ValueError(f"{unknown[0]} is no matrix of the layers; did you mean {near[0]}? {', '.join(sorted(known))}")
    scale = config.alpha / (config.rank**0.5 if config.use_rslora else config.rank)
    for name, linear in linears.items():
        if asked == "all-linear" or names[name].intersection(asked):
            parent, _, own = name.rpartition(".")
            adapted = AdaptedLinear(linear, config.rank, scale)
            setattr(model.get_submodule(f"layers.{parent}"), own, adapted)
    model.adapted = True
    set_trained(model)


def merged(model: nn.Module) -> dict[str, Tensor]:
    """The weights of the same model without adapters, by name: W + scale B A, summed in float32."""
    weights = {name: each.detach() for name, each in model.named_parameters() if not is_adapter(name)}
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            added = module.scale * module.lora_B.detach().float() @ module.lora_A.detach().float()
            weights[f"{name}.weight"] = module.weight.detach().float() + added
    return weights


def _name_there(model: Any, name: str) -> str:
    """The last part of a module's name in Hugging Face's files."""
    there = model.hf_name(f"layers.{name}.weight")
    return (there if isinstance(there, str) else there.name).removesuffix(".weight").rpartition(".")[2]
