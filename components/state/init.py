"""Weights at step 0: a pure function of the seed, the parameter's name and the index in the full tensor.

Each rank evaluates the function on its own slice. So every layout starts from the same bits, without a seed checkpoint,
a broadcast or a full tensor. Bits agree among devices of one kind.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from components.optim.counter_hash import chunks
from components.state.packed import to_fill
from models.parameters import Constant, Uniform
from models.random_bits import key_of, mixed, shifted
from parallelize.sharding import own_slice


def give_memory(stages: list[nn.Module], device: torch.device) -> None:
    """Move stages from the meta device to one with memory, uninitialized."""
    for stage in stages:
        stage.to_empty(device=device)
        stage.tie_weights()  # type: ignore[operator]


def initialize_weights(
    model: nn.Module,
    init_std: Callable[[str], float | Uniform | Constant | None],
    seed: int,
    device: torch.device | None = None,
) -> None:
    """Fill every parameter in place: normal with init_std(name), uniform, constant, or ones if it is None.

    device: where the numbers are computed, by default the device of each parameter. With the GPU as device, parameters
    offloaded to the CPU get the bits of the GPU.
    """
    for name, parameter in model.named_parameters():
        std = init_std(name)
        with torch.no_grad(), to_fill(parameter) as numbers:
            if std is None or isinstance(std, Constant):
                numbers.fill_(1.0 if std is None else std.value)
            else:
                _fill(numbers, std, key_of(seed, name), device or parameter.device)


def _fill(parameter: Tensor, std: float | Uniform, key: int, device: torch.device) -> None:
    local, _ = own_slice(parameter)
    for rows, indices in chunks(parameter, device):
        drawn = _uniform(indices(), key) * std.bound if isinstance(std, Uniform) else _normal(indices(), key).mul_(std)
        local.view(-1, local.shape[-1])[rows].copy_(drawn)


def _normal(indices: Tensor, key: int) -> Tensor:
    """Standard normal float32 numbers, within 5.2 of zero, for int64 indices, which are overwritten."""
    return _uniform(indices, key).erfinv_().mul_(math.sqrt(2))


def _uniform(indices: Tensor, key: int) -> Tensor:
    """Uniform float32 numbers between -1 and 1, for int64 indices, which are overwritten."""
    # 23 high bits b give (2 b + 1) / 2^23 - 1: exact in float32, symmetric, never -1 or 1.
    odd = shifted(mixed(indices, key), 41).mul_(2).add_(1 - (1 << 23))
    return odd.to(torch.float32).mul_(2.0**-23)
