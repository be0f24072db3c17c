"""torch.compile of each layer, and of the loss: operations between matrix products are fused into few kernels."""

from typing import Any

import torch
from torch import nn

from components.config import Compile, Parallelism
from models.attention import AttentionCore
from models.moe import MixtureBlock
from parallelize.mesh import Mesh
from parallelize.schedules import splits_backward


def _leave_attention_out(model: nn.Module) -> None:
    """Leave attention uncompiled; the parts of a layer before and after it become graphs of their own.

    A compiled ring would keep the keys and values of all ranks for backward, instead of sending them again. With
    sequence splits, the keys of earlier parts come from outside of the layer.
    """
    for module in model.modules():
        if isinstance(module, AttentionCore):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]


def apply_compile(model: nn.Module, mesh: Mesh, config: Compile, parallelism: Parallelism) -> None:
    """Compile every layer's `forward`, so that no parameter changes its name; equal layers share one graph.

    Experts are left out, because the host reads how many rows go to the experts of other ranks.
    """
    if not config.enable:
        return
    from torch._functorch import config as functorch

    # Backward may overwrite what forward saved, unless there are two backwards: for inputs, and for weights.
    functorch.donated_buffer = not splits_backward(parallelism)
    # By default torch compiles a function 8 times, and then fails. Each shape of samples and evaluation is one more.
    torch._dynamo.config.recompile_limit = max(256, torch._dynamo.config.recompile_limit)
    # Training has one shape and validation another. Each gets a graph, because dynamic shapes compile longer.
    how: dict[str, Any] = {"backend": config.backend, "dynamic": False}
    if "model" in config.components:
        if parallelism.enable_async_tensor_parallel:
            # inductor cuts products and collectives into overlapping pieces. This path was never run, because it needs
            # several GPUs.
            from torch._inductor import config as inductor
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group

            inductor._micro_pipeline_tp = True
            enable_symm_mem_for_group(mesh["tp"].get_group().group_name)
        apart = parallelism.pipeline_parallel_sequence_splits > 1
        apart = apart or (mesh["cp"].size() > 1 and parallelism.context_parallel_method == "ring")
        # The backward of FlexAttention's steps calls autograd, and a compiled graph cannot call it.
        apart = apart or (mesh.device_type != "cpu" and bool(model.get_submodule("visibility").sinks))
        if apart:
            _leave_attention_out(model)
        for layer in model.get_submodule("layers").children():
            if not isinstance(layer, MixtureBlock):
                layer.forward = torch.compile(layer.forward, fullgraph=not apart, **how)
                continue
            layer.before_experts = torch.compile(layer.before_experts, fullgraph=not apart, **how)  # type: ignore[method-assign]
            if layer.mixture.shared is not None:
                layer.mixture.shared.compile(fullgraph=True, **how)
    head = dict(model.named_children()).get("output")
    if "loss" in config.components and head is not None:
        head.chunk_loss = torch.compile(head.chunk_loss, **how)  # type: ignore[assignment, arg-type]
