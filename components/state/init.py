"""Weights at step 0: a pure function of the seed, the parameter's name and the index in the full tensor.

Each rank evaluates the function on its own slice. So every layout starts from the same bits, without a seed checkpoint,
a broadcast or a full tensor. Bits agree among devices of one kind.
"""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from parallelize.sharding import own_slice

_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # splitmix64's two, as signed 64-bit integers
_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}  # elements at a time: fits a core's cache; fills a GPU


def give_memory(stages: list[nn.Module], device: torch.device) -> None:
    """Move stages from the meta device to one with memory, uninitialized."""
    for stage in stages:
        stage.to_empty(device=device)
        stage.tie_weights()  # type: ignore[operator]


def initialize_weights(
    model: nn.Module, init_std: Callable[[str], float | None], seed: int, device: torch.device | None = None
) -> None:
    """Fill every parameter in place: normal with init_std(name), or ones where that is None.

    device: computes the numbers, by default each parameter's own. Parameters that are offloaded to the CPU so have the
    bits that they would have on the GPU.
    """
    for name, parameter in model.named_parameters():
        std = init_std(name)
        with torch.no_grad():
            if std is None:
                parameter.fill_(1.0)
            else:
                _fill_normal(parameter, std, _key(seed, name), device or parameter.device)


def _key(seed: int, name: str) -> int:
    """A signed 64-bit key for one parameter of one run."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), signed=True)


def _fill_normal(parameter: Tensor, std: float, key: int, device: torch.device) -> None:
    local, offset = own_slice(parameter)
    if local.numel() == 0:
        return
    # Rows of the local slice are contiguous in the full tensor along its last dimension.
    columns, full_columns = local.shape[-1], parameter.shape[-1]
    leading = torch.zeros(local.shape[:-1], dtype=torch.int64, device=device)
    for dim, size in enumerate(local.shape[:-1]):
        index = torch.arange(size, device=device) + offset[dim]
        shape = [1] * (local.ndim - 1)
        shape[dim] = size
        leading = leading * parameter.shape[dim] + index.view(shape)
    starts = (leading * full_columns + offset[-1]).flatten()
    rows = local.view(-1, columns)
    step = max(1, _CHUNK[device.type] // columns)
    within = torch.arange(columns, device=device)
    for row in range(0, rows.shape[0], step):
        indices = starts[row : row + step, None] + within
        rows[row : row + step].copy_(_normal(indices, key).mul_(std))


def _normal(indices: Tensor, key: int) -> Tensor:
    """Standard normal float32 numbers, within 5.2 of zero, for int64 indices, which are overwritten."""
    bits = indices.add_(key)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        # >> is arithmetic: the mask makes it logical.
        high = (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        bits.bitwise_xor_(high).mul_(multiplier)
    # 23 high bits b give (2 b + 1) / 2^23 - 1: exact in float32, symmetric, never -1 or 1.
    odd = (bits >> 41).bitwise_and_((1 << 23) - 1).mul_(2).add_(1 - (1 << 23))
    return odd.to(torch.float32).mul_(2.0**-23).erfinv_().mul_(math.sqrt(2))
