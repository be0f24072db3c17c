"""NF4 (arXiv:2305.14314, appendix E): frozen weights in 4 bits. A number is one of 16 levels, times its block's scale.

A packed tensor is uint8; it has the name and the leading dimensions of the unpacked tensor. Along the last dimension, a
block of 64 numbers becomes 34 bytes: 32 bytes of codes, then the scale in bfloat16. A byte has two codes, the first in
the lower 4 bits. Shards have whole blocks, so sharding before packing or after it gives the same bytes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
_BYTES = BLOCK // 2 + 2
_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def packed_shape(shape: torch.Size) -> tuple[int, ...]:
    """The shape of the packed tensor. Raises ValueError if a row is not a multiple of 64 numbers."""
    if shape[-1] % BLOCK:
        raise ValueError(f"rows of {shape[-1]} numbers are not whole blocks of {BLOCK}; use bfloat16")
    return (*shape[:-1], shape[-1] // BLOCK * _BYTES)


def unpacked_shape(shape: torch.Size) -> tuple[int, ...]:
    """The shape of the unpacked tensor."""
    return (*shape[:-1], shape[-1] // _BYTES * BLOCK)


def is_packed(weight: Tensor) -> bool:
    return weight.dtype == torch.uint8


def pack(numbers: Tensor) -> Tensor:
    """Numbers (..., K) -> uint8 (..., 34 K / 64); each number becomes the nearest level of its block."""
    blocks = numbers.float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(dim=-1, keepdim=True).bfloat16()
    levels = torch.tensor(_LEVELS, device=numbers.device)
    halfway = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(blocks / scales.float(), halfway, out_int32=True).to(torch.uint8)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    return torch.cat((pairs, scales.view(torch.uint8)), dim=-1).flatten(-2)


def scales_of(packed: Tensor) -> Tensor:
    """The scales (..., blocks) in bfloat16: each block's largest magnitude, or NaN if the block had a NaN."""
    return packed.unflatten(-1, (-1, _BYTES))[..., -2:].contiguous().view(torch.bfloat16).squeeze(-1)


def unpack(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 (..., 34 K / 64) -> numbers (..., K)."""
    pairs = packed.unflatten(-1, (-1, _BYTES))[..., :-2]
    numbers = _levels_of_pairs(packed.device)[pairs.int()].flatten(-2)
    return numbers.mul_(scales_of(packed).unsqueeze(-1)).flatten(-2).to(dtype)


_tables: dict[torch.device, Tensor] = {}


def _levels_of_pairs(device: torch.device) -> Tensor:
    """(256, 2): the two levels of each byte of codes. Cached, because each copy to a device would block the host."""
    if device not in _tables:
        pairs = torch.tensor([(_LEVELS[byte & 15], _LEVELS[byte >> 4]) for byte in range(256)], device=device)
        if type(pairs) is not Tensor:
            return pairs  # a fake tensor, of a dry run or of the compiler
        _tables[device] = pairs
    return _tables[device]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear of x (..., K) and a weight (N, K), which may be packed. Backward saves the packed weight."""
    if not is_packed(weight):
        return F.linear(x, weight, bias)
    y = _PackedLinear.apply(x, weight)
    return y if bias is None else y + bias


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        return F.linear(x, unpack(packed, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (packed,) = ctx.saved_tensors
        return gradient @ unpack(packed, gradient.dtype), None
