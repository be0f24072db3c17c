"""Low-rank adapters (LoRA, arXiv:2106.09685): beside a frozen matrix the product of two small ones, which are trained.

An adapted matrix keeps its name, layers.0.attention.wq.weight, and has layers.0.attention.wq.lora_A and .lora_B.
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
    """y = W x, where W may be packed (models/nf4.py), in place of a linear module, whose parameters it takes."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class AdaptedLinear(FrozenLinear):
    """y = W x + scale B A drop(x), with A (r, in) and B (out, r).

    What is dropped is a pure function of the token's key, the column and the module's name: equal at every layout, and
    when checkpointing computes a layer again.
    """

    def __init__(self, linear: nn.Linear, rank: int, scale: float, dropout: float = 0.0, name: str = "") -> None:
        super().__init__(linear)
        self.lora_A = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.lora_B = nn.Parameter(linear.weight.new_empty(linear.out_features, rank))
        self.scale, self.dropout = scale, dropout
        # A tensor, as layers with other numbers in their graphs would each be compiled; on the CPU, as no copy is made.
        self.key = torch.tensor(key_of("dropout", name), device="cpu")
        self.dropout_keys_BS: Tensor | None = None
        """Of the tokens of this forward; None: nothing is dropped."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.added(x, self.lora_A, self.lora_B)

    def added(self, x_BSK: Tensor, lora_A: Tensor, lora_B: Tensor, first: int = 0) -> Tensor:
        """What the adapter adds to the rows of W that B has; first: the column that x begins with, if x is a part."""
        if self.dropout_keys_BS is None:
            return low_rank(x_BSK, lora_A, lora_B, self.scale)
        columns = torch.arange(first, first + x_BSK.shape[-1], device=x_BSK.device)
        bits = mixed(self.dropout_keys_BS[..., None] + columns, self.key)
        dropped = bits < round((self.dropout - 0.5) * 2**64)  # of all int64, this fraction
        return low_rank(x_BSK.masked_fill(dropped, 0), lora_A, lora_B, self.scale / (1 - self.dropout))


def low_rank(x: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
    """scale B A x of x (..., in), A (r, in) and B (out, r)."""
    return F.linear(F.linear(x, lora_A) * scale, lora_B)


def _forward_with_keys(block: nn.Module, x_BSD: Tensor, cos: Tensor, sin: Tensor, visible: Visible) -> Tensor:
    """A layer's forward that first gives its adapters the keys of the tokens."""
    for module in block.modules():
        if isinstance(module, AdaptedLinear):
            module.dropout_keys_BS = visible.dropout_keys_BS
    return type(block).forward(block, x_BSD, cos, sin, visible)


def add_adapters(model: Any, config: Adapters) -> None:
    """Give the targets adapters; from then on nothing else of the model is trained.

    all-linear is every matrix of the layers, and not the head, as in PEFT. Raises ValueError if no name is given, for a
    name that none of them has, here or in Hugging Face's files, and for dropout beside experts, which PEFT lacks.
    """
    matrices: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if name.startswith("layers.") and type(module) is nn.Linear:
            matrices[f"{name}.weight"] = module
        elif isinstance(module, Experts):
            matrices |= dict.fromkeys((f"{name}.{each}" for each in MATRICES), module)
    asked = config.target_modules
    if not asked:
        raise ValueError('no matrix would have an adapter, and nothing be trained; "all-linear" would do')
    names = {name: {_last(name), _last(_name_there(model, name))} for name in matrices if asked != "all-linear"}
    known = {each for both in names.values() for each in both}
    if unknown := [] if asked == "all-linear" else [each for each in asked if each not in known]:
        near = difflib.get_close_matches(unknown[0], sorted(known), 1, 0.0)
        raise ValueError(f"{unknown[0]} is no matrix of the layers; did you mean {near[0]}? {', '.join(sorted(known))}")
    with_experts = any(isinstance(module, Experts) for module in matrices.values())
    scale = config.alpha / (config.rank**0.5 if config.use_rslora else config.rank)
    for name, module in matrices.items():
        if asked != "all-linear" and not names[name].intersection(asked):
            continue
        if config.dropout and with_experts and ".attention." not in name:
            raise ValueError(f"a model with experts has dropout in attention alone, as in PEFT, and not in {name}")
        if isinstance(module, Experts):
            adapt_experts(module, _last(name), config.rank, scale)
        elif isinstance(module, nn.Linear):
            parent, _, own = name.removesuffix(".weight").rpartition(".")
            setattr(model.get_submodule(parent), own, AdaptedLinear(module, config.rank, scale, config.dropout, name))
    for block in model.layers.values() if config.dropout else ():
        # Not a hook, which checkpointing would not call again; and a copy of the model gets a method of its own.
        block.forward = types.MethodType(_forward_with_keys, block)
    model.adapted, model.adapter_scale = True, scale
    set_trained(model)


def keep_base(model: Any, precision: str) -> None:
    """Change what frozen parameters are kept in: bfloat16, float32, or nf4 for matrices of the layers beside bfloat16.

    Routers keep theirs: close scores would be equal in bfloat16. The model is on the meta device. Raises ValueError for
    a matrix whose rows are not blocks.
    """
    dtype = torch.bfloat16 if precision == "nf4" else getattr(torch, precision)
    for name, module in list(model.named_modules()):
        if isinstance(module, Router):
            continue
        if precision == "nf4" and name.startswith("layers.") and type(module) is nn.Linear:
            parent, _, own = name.rpartition(".")
            module = FrozenLinear(module)
            setattr(model.get_submodule(parent), own, module)
        for own, parameter in list(module.named_parameters(recurse=False)):
            full = f"{name}.{own}"
            role = model.kind(full).role
            if role == "adapter":
                continue
            if precision == "nf4" and role in ("matrix", "expert"):
                kept = parameter.new_empty(_packed_shape(full, parameter), dtype=torch.uint8)
            else:
                kept = parameter.detach().to(dtype)
            module.register_parameter(own, nn.Parameter(kept, requires_grad=False))
    model.tie_weights()


def _packed_shape(name: str, parameter: Tensor) -> tuple[int, ...]:
    try:
        return packed_shape(parameter.shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def merged(model: nn.Module) -> dict[str, Tensor]:
    """The weights of the same model without adapters, by name: W + scale B A, summed in float32, of an unpacked W."""
    weights = {
        name: unpack(each) if is_packed(each) else each.detach()
        for name, each in model.named_parameters()
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
    there = model.hf_name(name)
    return there if isinstance(there, str) else there.name


def _last(name: str) -> str:
    """layers.3.attention.wq.weight -> wq."""
    return name.removesuffix(".weight").rpartition(".")[2]
