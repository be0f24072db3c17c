"""Activation checkpointing: forward keeps few activations, and backward recomputes the others (arXiv:1604.06174).

A layer's `forward` is wrapped and not the layer, so that no parameter changes its name.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from components.config import ActivationCheckpoint


def apply_activation_checkpoint(model: nn.Module, config: ActivationCheckpoint, splits_backward: bool) -> None:
    """Wrap every layer (full) or every n-th. With "op" wrap every layer, and keep the results of costly operations.

    With a memory budget the compiler chooses what a layer keeps, when its first forward compiles it. splits_backward:
    gradients of inputs and of weights are computed apart.
    """
    if config.mode == "memory_budget":
        from torch._functorch import config as functorch

        functorch.activation_memory_budget = config.memory_budget
        functorch.unsafe_treat_script_objects_as_zero_size = True  # the script objects are process groups
    if config.mode in ("none", "memory_budget"):
        return
    per_op = config.mode == "selective" and config.selective_ac_option == "op"
    every = int(config.selective_ac_option) if config.mode == "selective" and not per_op else 1
    passed_on = ("preserve_rng_state", "determinism_check", "early_stop", "debug")
    options: dict[str, Any] = {name: getattr(config, name) for name in passed_on}
    options |= {"context_fn": partial(_keep_costly_results, splits_backward)} if per_op else {}
    for number, layer in model.get_submodule("layers").named_children():
        # Layers are numbered over the whole model, so that pipeline stages checkpoint the same ones.
        if int(number) % every == 0:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)
            if config.offload:
                layer.forward = partial(_inputs_on_host, layer.forward)


def _inputs_on_host(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A checkpointed forward whose hidden state waits for backward in the host's pinned memory.

    The host does not wait for the copies, because they are queued on the device's stream.
    """
    with torch.autograd.graph.saved_tensors_hooks(partial(_to_host, args[0].shape), _from_host):
        return forward(*args, **kwargs)


def _to_host(shape: torch.Size, tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    """shape: of the hidden state. The other inputs stay on the device, because all layers share them."""
    if tensor.device.type == "cpu" or tensor.shape != shape:
        return tensor
    kept = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return tensor.device, kept.copy_(tensor, non_blocking=True)


def _from_host(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept[1].to(kept[0], non_blocking=True)


class _ForTwoBackwards(dict[int, Any]):
    """Kept results of an operation, for two backwards. Later writes, which mark a result as used, are ignored."""

    def __setitem__(self, index: int, result: Any) -> None:
        self.setdefault(index, result)


def _keep_costly_results(splits_backward: bool) -> Any:
    """Contexts of one forward and its recomputation. Every second product is recomputed; attention is not."""
    products = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operation in _kept()
        if operation in _PRODUCTS:
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = create_selective_checkpoint_contexts(policy)
    if splits_backward:
        contexts[0].storage.default_factory = _ForTwoBackwards  # both contexts share the storage
    return contexts


_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten._scaled_mm.default}


@cache
def _kept() -> set[Callable]:
    return {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        # All-gathers run again, because keeping their results would cost the memory that sequence parallel saves.
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.all_to_all_single.default,
    }
