"""torch.compile of each layer, and of the loss: operations between matrix products are fused into few kernels."""

from typing import Any

import torch
from torch import nn

from components.config import Compile, Parallelism
from models.attention import AttentionCore
from models.moe import Mixture
from parallelize.expert import has_experts
from parallelize.mesh import Mesh
from parallelize.schedules import splits_backward


def _leave_out(model: nn.Module, attention: bool) -> None:
    """Compile what is before and after a layer's experts and, on request, its attention, as graphs of their own.

    Compiled, the ring would keep the keys and values of all ranks for backward, instead of passing them on again; and
    the keys of earlier parts of a sequence come from outside of the layer. The host reads how many rows go to experts
    of other ranks, and what is computed meanwhile ends with a collective, whose result a graph would take apart.
    """
    for module in model.modules():
        if isinstance(module, AttentionCore) and attention:
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        if isinstance(module, Mixture):
            module.routed = torch.compiler.disable(module.routed)  # type: ignore[method-assign]
            module.overlapped = torch.compiler.disable(module.overlapped)  # type: ignore[method-assign]


def apply_compile(model: nn.Module, mesh: Mesh, config: Compile, parallelism: Parallelism) -> None:
    """Compile every layer's `forward`, so that no parameter changes its name; equal layers share one graph."""
    if not config.enable:
        return
    from torch._functorch import config as functorch

    # Backward may overwrite what forward saved, unless there are two backwards: for inputs, and for weights.
    functorch.donated_buffer = not splits_backward(parallelism)
    # Training has one shape and validation another: graphs of any shape would take longer to compile and to run.
    how: dict[str, Any] = {"backend": config.backend, "dynamic": False}
    if "model" in config.components:
        if parallelism.enable_async_tensor_parallel:
            # inductor cuts matrix products and collectives into pieces that overlap. Never run: it needs several GPUs.
            from torch._inductor import config as inductor
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group

            inductor._micro_pipeline_tp = True
            enable_symm_mem_for_group(mesh["tp"].get_group().group_name)
        apart = parallelism.pipeline_parallel_sequence_splits > 1
        apart = apart or (mesh["cp"].size() > 1 and parallelism.context_parallel_method == "ring")
        _leave_out(model, attention=apart)
        whole = not (apart or has_experts(model))
        for layer in model.get_submodule("layers").children():
            layer.forward = torch.compile(layer.forward, fullgraph=whole, **how)
    head = dict(model.named_children()).get("output")
    if "loss" in config.components and head is not None:
        head.cross_entropy = torch.compile(head.cross_entropy, **how)  # type: ignore[assignment, arg-type]
