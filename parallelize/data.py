"""Data parallel: replicas (DDP), shards (FSDP: arXiv:2304.11277), or replicas of shards (HSDP), all by fully_shard."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from components.config import Parallelism, Training
from models.moe import Experts, Router
from models.nf4 import is_packed
from parallelize.precision import compute_in
from parallelize.sharding import block_of, local_part
from parallelize.wrapping import Wrapping


def apply_data_parallel(
    model: nn.Module,
    shards: DeviceMesh,
    of_experts: DeviceMesh | None,
    wrapping: Wrapping,
    training: Training,
    parallelism: Parallelism,
    keeps_blocks: bool = False,
) -> None:
    """Shard parameters over the last dimension of the mesh `shards`; a dimension before the last holds replicas.

    of_experts: the mesh for experts, if the model has some. keeps_blocks: the optimizer has one scale for each block of
    columns (block_of), so two ranks may not share a block.

    Gradients are summed over ranks, never averaged, because the loss is already divided by the global batch's labels.
    """
    precision, reshard = getattr(torch, training.mixed_precision_param), wrapping.reshard
    if not wrapping.wrapped:
        if wrapping.converts:
            compute_in(model, precision)
        return
    # Inputs are not cast. The hidden state has the right type; token ids and rotary angles have to keep their types.
    policy = MixedPrecisionPolicy(
        param_dtype=precision, reduce_dtype=getattr(torch, training.mixed_precision_reduce), cast_forward_inputs=False
    )
    on_cuda = shards.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=on_cuda) if training.enable_cpu_offload else OffloadPolicy()
    shard = partial(fully_shard, mesh=shards, mp_policy=policy, offload_policy=offload)
    if of_experts is not None:
        routers = {each for module in model.modules() if isinstance(module, Router) for each in module.parameters()}
        shard = partial(
            shard, shard_placement_fn=_placements(model, shards, of_experts, keeps_blocks), ignored_params=routers
        )
    # A tied table belongs to both ends of the model, so the root holds it. By default the root stays gathered
    # until backward.
    children = dict(model.named_children())
    embedding, layers = children.get("tok_embeddings"), children["layers"]
    ends = [children[name] for name in ("norm", "output") if name in children]
    tied = embedding is not None and "output" in children and embedding.weight is children["output"].weight
    if embedding is not None and not tied:
        shard(embedding, reshard_after_forward=reshard != "never")
    for block in layers.children():
        shard(block, reshard_after_forward=reshard != "never")
    if ends and not tied:
        # Backward starts with the head, and would gather it again at once.
        shard(ends, reshard_after_forward=reshard == "always")
    shard(model, reshard_after_forward=reshard == "always")
    # A validation runs no layer of multi-token prediction, and would gather it for nothing.
    own = [layer for layer in layers.children() if getattr(layer, "mtp", None) is None]
    _prefetch(own, parallelism.fsdp_prefetch_layers)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def _placements(
    model: nn.Module, shards: DeviceMesh, of_experts: DeviceMesh, keeps_blocks: bool
) -> Callable[[nn.Parameter], Any]:
    """Parameter -> its placement by FSDP: experts are sharded over the ranks of of_experts; None for all others.

    Ranks split the experts of a layer. If that is uneven, they split the rows of each matrix, or else the columns.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    info = FSDPMeshInfo(of_experts, 0) if of_experts.ndim == 1 else HSDPMeshInfo(of_experts, 1, 0)
    of_weights: dict[nn.Parameter, Any] = {}
    for module in model.modules():
        if isinstance(module, Experts):
            for weight in module.parameters():
                sizes = local_part(weight)[1].shape
                if is_packed(weight):
                    sizes = sizes[:-1]  # columns are blocks
                elif keeps_blocks:
                    sizes = torch.Size((*sizes[:-1], sizes[-1] // block_of(weight.shape[-1])))
                where = Shard(next((dim for dim, size in enumerate(sizes) if size % of_experts.size(-1) == 0), 0))
                of_weights[weight] = where if of_experts is shards else ShardPlacementResult(where, info)
    return of_weights.get


def _prefetch(blocks: list[nn.Module], count: int) -> None:
    """Gather the weights of `count` layers ahead, in forward and in backward. FSDP gathers one ahead by itself."""
    for number, block in enumerate(blocks) if count > 1 else ():
        assert isinstance(block, FSDPModule)
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + count])  # type: ignore[arg-type]
        before = blocks[max(0, number - count) : number]
        block.set_modules_to_backward_prefetch(before[::-1])  # type: ignore[arg-type]


def reshard(stages: list[nn.Module]) -> None:
    """Free the weights that a forward without backward left gathered: parameters are shards again."""
    for module in (module for stage in stages for module in stage.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()


def set_gradient_sync(stages: list[nn.Module], last: bool, reduce: str) -> None:
    """Whether the next backward reduces gradients: if it is the last of its optimizer step, or if `reduce` is "each".

    With HSDP each replica accumulates its own gradient shards, and only the last backward all-reduces over replicas.
    """
    for stage in stages:
        if isinstance(stage, FSDPModule):
            stage.set_requires_gradient_sync(last or reduce == "each")
            stage.set_requires_all_reduce(last)
