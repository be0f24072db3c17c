"""Low-rank adapters (LoRA, arXiv:2106.09685): each adds the trained product of two small matrices to a frozen matrix.

An adapted matrix keeps its name, layers.0.attention.wq.weight; beside it are layers.0.attention.wq.lora_A and .lora_B.
"""

import difflib
import types
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.lora_experts import MATRICES, adapt_experts, merged_experts
from models.moe import Experts, Router
from models.nf4 import is_packed, linear, packed_shape, unpack
from models.parameters import is_adapter, set_trained
from models.random_bits import key_of, mixed
from models.visible import Visible


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
    @property
    def dropout(self) -> float: ...


class FrozenLinear(nn.Linear):
    """y = W x, where W may be packed (models/nf4.py). Takes over the parameters of the nn.Linear that it replaces."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class AdaptedLinear(FrozenLinear):
    """y = W x + scale B A drop(x), with A (r, in) and B (out, r).

    The dropout mask is a pure function of the token's key, the column and the module's name. It is therefore equal at
    every layout, and when activation checkpointing recomputes a layer.
    """

    def __init__(self, linear: nn.Linear, rank: int, scale: float, dropout: float = 0.0, name: str = "") -> None:
        super().__init__(linear)
        self.lora_A = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.lora_B = nn.Parameter(linear.weight.new_empty(linear.out_features, rank))
        self.scale, self.dropout = scale, dropout
        # A tensor, because an int would be a constant of the graph, and each layer would be compiled anew. It is on the
        # CPU, because a GPU's kernels take a CPU scalar without a copy.
        self.key = torch.tensor(key_of("dropout", name), device="cpu")
        self.dropout_keys_BS: Tensor | None = None
        """Keys of the tokens of this forward; None: no dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.added(x, self.lora_A, self.lora_B)

    def added(self, x_BSK: Tensor, lora_A: Tensor, lora_B: Tensor, first: int = 0) -> Tensor:
        """scale B A drop(x), for the rows of W that lora_B has. first: index of x's first column, if x is a slice."""
        if self.dropout_keys_BS is None:
            return low_rank(x_BSK, lora_A, lora_B, self.scale)
        columns = torch.arange(first, first + x_BSK.shape[-1], device=x_BSK.device)
        bits = mixed(self.dropout_keys_BS[..., None] + columns, self.key)
        dropped = bits < round((self.dropout - 0.5) * 2**64)  # a fraction `dropout` of all int64 values
        return low_rank(x_BSK.masked_fill(dropped, 0), lora_A, lora_B, self.scale / (1 - self.dropout))


def low_rank(x: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
    """scale B A x for x (..., in), A (r, in) and B (out, r)."""
    return F.linear(F.linear(x, lora_A) * scale, lora_B)


def _forward_with_keys(block: nn.Module, x_BSD: Tensor, cos: Tensor, sin: Tensor, visible: Visible) -> Tensor:
    """A layer's forward, which first gives the tokens' dropout keys to the layer's adapters."""
    for module in block.modules():
        if isinstance(module, AdaptedLinear):
            module.dropout_keys_BS = visible.dropout_keys_BS
    return type(block).forward(block, x_BSD, cos, sin, visible)


def add_adapters(model: Any, config: Adapters) -> None:
    """Add adapters to the target matrices; from then on only adapters are trained.

    "all-linear" means every matrix of the layers, but not the head, as in PEFT. Raises ValueError in these cases:

    - target_modules is empty
    - a target module is no matrix of the layers, neither by our name nor by Hugging Face's
    - a matrix outside attention would have dropout in a model with experts, which PEFT lacks
    """
    matrices: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if name.startswith("layers.") and type(module) is nn.Linear:
            matrices[f"{name}.weight"] = module
        elif isinstance(module, Experts):
            matrices |= dict.fromkeys((f"{name}.{matrix}" for matrix in MATRICES), module)
    asked = config.target_modules
    if not asked:
        raise ValueError('no matrix would have an adapter, and nothing would be trained; use "all-linear"')
    names = {name: {_last(name), _last(_name_there(model, name))} for name in matrices if asked != "all-linear"}
    known = {name for both in names.values() for name in both}
    if unknown := [] if asked == "all-linear" else [name for name in asked if name not in known]:
        near = difflib.get_close_matches(unknown[0], sorted(known), 1, 0.0)
        shown = ", ".join(sorted(known))
        raise ValueError(f"{unknown[0]} is no matrix of the layers; did you mean {near[0]}? Use names of: {shown}")
    with_experts = any(isinstance(module, Experts) for module in matrices.values())
    scale = config.alpha / (config.rank**0.5 if config.use_rslora else config.rank)
    for name, module in matrices.items():
        if asked != "all-linear" and not names[name].intersection(asked):
            continue
        if config.dropout and with_experts and ".attention." not in name:
            raise ValueError(
                f"{name} cannot have dropout: in a model with experts only attention can, as in PEFT; "
                "set lora.dropout = 0.0, or use names of attention matrices only"
            )
        if isinstance(module, Experts):
            adapt_experts(module, _last(name), config.rank, scale)
        elif isinstance(module, nn.Linear):
            parent, _, child = name.removesuffix(".weight").rpartition(".")
            setattr(model.get_submodule(parent), child, AdaptedLinear(module, config.rank, scale, config.dropout, name))
    for block in model.layers.values() if config.dropout else ():
        # Not a hook, because checkpointing would not call the hook again. A bound method is copied with the model.
        block.forward = types.MethodType(_forward_with_keys, block)
    model.adapted, model.adapter_scale = True, scale
    set_trained(model)


def keep_base(model: Any, precision: str) -> None:
    """Set the precision of frozen parameters: bfloat16, float32, or nf4.

    nf4 packs the matrices of the layers, and makes the rest bfloat16. Routers keep their precision, because close
    scores would be equal in bfloat16. The model is on the meta device. Raises ValueError if the rows of a matrix cannot
    be cut into blocks of NF4.
    """
    dtype = torch.bfloat16 if precision == "nf4" else getattr(torch, precision)
    for name, module in list(model.named_modules()):
        if isinstance(module, Router):
            continue
        if precision == "nf4" and name.startswith("layers.") and type(module) is nn.Linear:
            parent, _, child = name.rpartition(".")
            module = FrozenLinear(module)
            setattr(model.get_submodule(parent), child, module)
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            full_name = f"{name}.{attribute}"
            role = model.kind(full_name).role
            if role == "adapter":
                continue
            if precision == "nf4" and role in ("matrix", "expert"):
                kept = parameter.new_empty(_packed_shape(full_name, parameter), dtype=torch.uint8)
            else:
                kept = parameter.detach().to(dtype)
            module.register_parameter(attribute, nn.Parameter(kept, requires_grad=False))
    model.tie_weights()


def _packed_shape(name: str, parameter: Tensor) -> tuple[int, ...]:
    try:
        return packed_shape(parameter.shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def merged(model: nn.Module) -> dict[str, Tensor]:
    """The weights, by name, with adapters merged: W + scale B A, summed in float32. Packed weights are unpacked."""
    weights = {
        name: unpack(parameter) if is_packed(parameter) else parameter.detach()
        for name, parameter in model.named_parameters()
        if not is_adapter(name)
    }
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            added = module.scale * module.lora_B.detach().float() @ module.lora_A.detach().float()
            weights[f"{name}.weight"] = weights[f"{name}.weight"].float() + added
        elif isinstance(module, Experts):
            weights |= {f"{name}.{matrix}": weight for matrix, weight in merged_experts(module).items()}
    return weights


def _name_there(model: Any, name: str) -> str:
    """A matrix's name in Hugging Face's files."""
    hf_name = model.hf_name(name)
    return hf_name if isinstance(hf_name, str) else hf_name.name


def _last(name: str) -> str:
    """layers.3.attention.wq.weight -> wq."""
    return name.removesuffix(".weight").rpartition(".")[2]
