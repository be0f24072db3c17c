"""Adam, its learning rate at a step, the gradient norm, and an update that skips what is not finite."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from components.config import LRScheduler, Optimizer
from parallelize.sharding import local_part


def build_optimizer(stages: list[nn.Module], config: Optimizer) -> torch.optim.Optimizer:
    """Adam or AdamW over the parameters of all stages; vectors (norms) are in a group without weight decay."""
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[config.name](
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )


def learning_rate(step: int, config: LRScheduler, peak: float, training_steps: int) -> float:
    """The learning rate of a step, counted from 1: warm-up to the peak, stable, then decay to its minimum.

    A function of the step alone, so there is nothing to save.
    """
    total = config.total_steps or training_steps
    warmup_steps = min(config.warmup_steps, total)
    decay_steps = total - warmup_steps if config.decay_ratio is None else round(total * config.decay_ratio)
    decay_steps = min(decay_steps, total - warmup_steps)
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = max(0, step - (total - decay_steps)) / max(1, decay_steps)
    shape = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[config.decay_type]
    return peak * (config.min_lr_factor + (1 - config.min_lr_factor) * shape)


def local_gradients(parameters: Iterable[Tensor]) -> dict[tuple[dist.ProcessGroup, ...], list[Tensor]]:
    """This rank's parts of the gradients, by the groups over whose ranks they are split."""
    parts: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            groups, gradient = local_part(parameter.grad)
            parts[groups].append(gradient)
    return parts


def clip_gradients(parameters: Iterable[Tensor], max_norm: float, stages: dist.ProcessGroup | None = None) -> Tensor:
    """Scale all gradients so that their norm is at most max_norm; returns the norm that they had.

    The norm is one number over all parameters, also those of other pipeline stages, the same on every rank and at every
    layout. Squares are summed in float64: in float32 the sum over a million elements is off by 1e-5 on CPU, differently
    for each way to split it.
    """
    parts = local_gradients(parameters)
    squares = []
    for groups, gradients in parts.items():
        square = torch.stack(torch._foreach_norm(gradients, dtype=torch.float64)).square().sum()
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    total = torch.stack(squares).sum()
    if stages is not None:
        dist.all_reduce(total, group=stages)
    norm = total.sqrt().float()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradients in parts.values():
        torch._foreach_mul_(gradients, factor)
    return norm


def update(optimizer: torch.optim.Optimizer, lr: float, finite: Tensor) -> None:
    """One step at this learning rate; where `finite` is false, weights and moments keep every bit.

    The fused kernel decides on the device. The other implementations cannot, so there the host waits and decides.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    if optimizer.param_groups[0]["fused"]:
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif finite.item():
        optimizer.step()
