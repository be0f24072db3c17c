"""Training dynamics at every n-th step, by layer: norms of gradient, weights and update; attention logits; experts.

Norms cover the trained parameters. All numbers are of the whole model and the whole global batch, so they are the same
at every layout. Steps that are not sampled cost nothing.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelize.mesh import Mesh
from parallelize.sharding import exact_norms, is_copy, local_part

Groups = tuple[dist.ProcessGroup, ...]


class Dynamics:
    """Observes a step: start, before_update and after_update are called in each, in this order, on every rank."""

    def __init__(self, freq: int, model: nn.Module, stages: Sequence[nn.Module], mesh: Mesh) -> None:
        """freq: steps between two samples, 0 for never. model: the whole model; stages: this rank's part of it."""
        self.freq, self.mesh, self.sampled = freq, mesh, False
        if not freq:
            return
        self.parts = _number_parts(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        self.layers = _number_parts(name for name, module in model.named_modules() if _is_attention_core(module))
        named = [each for stage in stages for each in stage.named_parameters() if each[1].requires_grad]
        counted = [(name, parameter) for name, parameter in named if not is_copy(parameter)]
        self.parameters = [(self.parts[_part(name)], parameter) for name, parameter in counted]
        modules = [each for stage in stages for each in stage.named_modules()]
        cores = [(name, module) for name, module in modules if _is_attention_core(module)]
        self.cores: list[tuple[int, Any]] = [(self.layers[_part(name)], core) for name, core in cores]
        self.mixtures = _Mixtures(model, modules)
        self.shards: list[_Shards] = []

    def start(self, step: int) -> None:
        """Before the first forward."""
        self.sampled = self.freq > 0 and step % self.freq == 0
        if self.sampled:
            for _, core in self.cores:
                core.largest_logit = torch.full((), -math.inf, device=self.mesh.device_type)
            self.mixtures.observe()

    def before_update(self) -> None:
        """Called with final gradients, before clipping. A copy of the weights is kept until after_update."""
        if not self.sampled:
            return
        split: dict[Groups, list[tuple[int, Tensor, Tensor]]] = defaultdict(list)
        for part, parameter in self.parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            groups, weight = local_part(parameter.detach())
            split[groups].append((part, weight, local_part(gradient)[1]))
        self.shards = [_Shards(groups, shards, len(self.parts)) for groups, shards in split.items()]

    def after_update(self, expert_rows: Tensor | None = None) -> None:
        """Reduce the step's numbers over ranks, with one or two messages for each mesh dimension, not for each layer.

        expert_rows: (layers of these stages, E), as expert.py's balance gives them.
        """
        if not self.sampled:
            return
        self.mixtures.reduce(expert_rows, self.mesh)
        none = torch.zeros(3, len(self.parts), dtype=torch.float64, device=self.mesh.device_type)
        # Gradients may be on the host.
        self.squares = sum((shards.squares().to(none.device, non_blocking=True) for shards in self.shards), none)
        self.shards = []
        self.logits = torch.full((len(self.layers),), -math.inf, device=self.mesh.device_type)
        for layer, core in self.cores:
            self.logits[layer] = torch.maximum(self.logits[layer], core.largest_logit)
            core.largest_logit = None
        for name in ("pp", "dp_replicate", "fsdp", "tp"):
            if self.mesh[name].size() > 1:
                dist.all_reduce(self.logits, dist.ReduceOp.MAX, self.mesh[name].get_group())
        if self.mesh["pp"].size() > 1:
            dist.all_reduce(self.squares, group=self.mesh["pp"].get_group())

    def tables(self) -> dict[str, dict[str, float]]:
        """Table -> part of the model -> number, of the last sampled step, on every rank. Waits for the device."""
        gradient, weight, update = self.squares.sqrt()
        norms = {"gradient_norm": gradient, "weight_norm": weight, "update_ratio": update / weight}
        tables = {table: dict(zip(self.parts, values.tolist(), strict=True)) for table, values in norms.items()}
        tables["attention_logit_max"] = dict(zip(self.layers, self.logits.tolist(), strict=True))
        return tables | self.mixtures.tables()


class _Mixtures:
    """Layers with experts: the load of each expert divided by its layer's mean load, and the entropy of routers."""

    def __init__(self, model: nn.Module, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self.layers = [name for name, module in model.named_modules() if _has_experts(module)]
        self.own: list[tuple[int, Any]] = [
            (self.layers.index(name), module) for name, module in modules if _has_experts(module)
        ]
        config: Any = model.config
        self.experts: int = config.n_experts if self.layers else 0
        self.top_k: int = config.top_k if self.layers else 0

    def observe(self) -> None:
        for _, block in self.own:
            block.mixture.router.observed, block.entropy = True, None

    def reduce(self, rows: Tensor | None, mesh: Mesh) -> None:
        if not self.layers:
            return
        sums = torch.zeros(len(self.layers), 1 + self.experts, dtype=torch.float64, device=mesh.device_type)
        for number, (layer, block) in enumerate(self.own):
            assert rows is not None
            sums[layer, 0], sums[layer, 1:] = block.entropy, rows[number]
            block.mixture.router.observed = False
        self.entropies, self.rows = sums[:, 0].clone(), sums[:, 1:].clone()
        for name in ("pp", "holders"):
            if mesh[name].size() > 1:
                dist.all_reduce(self.entropies, group=mesh[name].get_group())
        if mesh["pp"].size() > 1:  # the rows of other layers are on other ranks
            dist.all_reduce(self.rows, group=mesh["pp"].get_group())

    def tables(self) -> dict[str, dict[str, float]]:
        if not self.layers:
            return {}
        loads = self.rows / self.rows.mean(1, keepdim=True)
        entropies = self.entropies * self.top_k / self.rows.sum(1)
        numbers = {"expert_load_max": loads.amax(1), "router_entropy": entropies}
        tables = {table: dict(zip(self.layers, values.tolist(), strict=True)) for table, values in numbers.items()}
        each = zip(self.layers, loads.tolist(), strict=True)
        of_experts = {f"{layer}.{number}": load for layer, own in each for number, load in enumerate(own)}
        return tables | {"expert_load": of_experts}


class _Shards:
    """This rank's shards of weights that are split over the same groups, with norms before and after an update."""

    def __init__(self, groups: Groups, shards: list[tuple[int, Tensor, Tensor]], parts: int) -> None:
        """shards: (number of the model's part, weight, gradient)."""
        numbers, weights, gradients = zip(*shards, strict=True)
        self.groups, self.parts, self.weights = groups, parts, list(weights)
        self.numbers = torch.tensor(numbers, device=weights[0].device)
        self.known = [self._squares(list(gradients)), self._squares(self.weights)]
        self.before = [weight.clone() for weight in weights]

    def squares(self) -> Tensor:
        """Sums of squares over all ranks, (3, parts): of gradients, of weights before the update, of the update."""
        torch._foreach_sub_(self.before, self.weights)
        squares = torch.stack([*self.known, self._squares(self.before)])
        for group in self.groups:
            dist.all_reduce(squares, group=group)
        return squares

    def _squares(self, tensors: list[Tensor]) -> Tensor:
        """Sums of squares (parts,), in float64."""
        squares = torch.stack(exact_norms(tensors)).square()
        return squares.new_zeros(self.parts).index_add_(0, self.numbers, squares)


def _number_parts(names: Iterable[str]) -> dict[str, int]:
    """The model's parts that contain these names, numbered in order."""
    return {part: number for number, part in enumerate(dict.fromkeys(map(_part, names)))}


def _part(name: str) -> str:
    """layers.0.attention.wq.weight -> layers.0; norm.weight -> norm."""
    first, second, *_ = name.split(".")
    return f"{first}.{second}" if second.isdigit() else first


def _has_experts(module: nn.Module) -> bool:
    return hasattr(module, "mixture")


def _is_attention_core(module: nn.Module) -> bool:
    return hasattr(module, "largest_logit")
