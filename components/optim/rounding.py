"""Weights and moments kept in fewer bits than they are computed in: bfloat16, or 8 bits and a scale of each block.

Rounding is stochastic: the fraction that is cut off is the probability of rounding up. Small updates therefore count on
average.
The random bits come from counter_hash and no layout splits a block, so every layout keeps the same numbers.
"""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from components.optim.counter_hash import Indices
from models.random_bits import mixed, shifted
from parallelize.sharding import block_of, local_part, split_like

_LEVELS = {torch.int8: 127, torch.uint8: 255}
_GOLDEN = -0x61C8864680B583EB  # 2^64 over the golden ratio, as a signed 64-bit integer


class RandomBits:
    """64 random bits per element. Each stored number of an element (weight, moments) takes 16 bits of its own."""

    def __init__(self, indices: Indices, key: int, step: Tensor | None) -> None:
        """step: the optimizer's step, a scalar tensor; None if nothing is rounded."""
        self._indices, self._key, self._step = indices, key, step

    @cached_property
    def _all(self) -> Tensor:
        assert self._step is not None
        bits = mixed(self._indices(), self._key + self._step.to(torch.int64) * _GOLDEN)
        return bits.bitwise_xor_(shifted(bits, 31))

    def take(self, turn: int) -> Tensor:
        """16 random bits per element, as int64 below 2^16; turn (0, 1 or 2) selects them from the 64."""
        return (self._all >> 16 * turn).bitwise_and_(0xFFFF)


def new_moment(parameter: Tensor, name: str, dtype: str, signed: bool = True) -> dict[str, Tensor]:
    """Name in the optimizer's state -> zeros, split like the parameter. A moment in 8 bits has a second tensor: scales.

    dtype: "float32", "bfloat16" or "int8". Vectors, and rows too short for blocks, are kept in float32.
    """
    block = block_of(parameter.shape[-1])
    if parameter.ndim == 1 or dtype == "float32" or (dtype == "int8" and block == 1):
        return {name: torch.zeros_like(parameter, dtype=torch.float32)}
    if dtype == "bfloat16":
        return {name: torch.zeros_like(parameter, dtype=torch.bfloat16)}
    codes = torch.zeros_like(parameter, dtype=torch.int8 if signed else torch.uint8)
    return {name: codes, f"{name}_scale": _blockwise(parameter, block)}


def _blockwise(parameter: Tensor, block: int) -> Tensor:
    """float32 zeros, one for each block of a row."""
    _, local = local_part(parameter)
    zeros = local.new_zeros(*local.shape[:-1], local.shape[-1] // block, dtype=torch.float32)
    return split_like(parameter, zeros, (*parameter.shape[:-1], parameter.shape[-1] // block))


def as_rows(local: Tensor) -> Tensor:
    """The view (rows, columns), also if this rank has no rows, or no part of a vector."""
    return local.view(math.prod(local.shape[:-1]), local.shape[-1])


class Kept(NamedTuple):
    """This rank's part of a tensor that is kept in some precision, as rows."""

    values: Tensor
    """(rows, columns) in float32, bfloat16, int8 or uint8; the last two are codes."""
    scales: Tensor | None = None
    """(rows, blocks), only for codes: the largest magnitude in each block."""
    turn: int = 0
    """The turn of RandomBits.take: which of an element's random bits are used for rounding."""

    @staticmethod
    def of(state: Mapping[str, Tensor], name: str, turn: int) -> "Kept":
        """The Kept of a moment that new_moment has made."""
        _, values = local_part(state[name])
        scales = state.get(f"{name}_scale")
        return Kept(as_rows(values.detach()), None if scales is None else as_rows(local_part(scales)[1]), turn)

    def read(self, rows: slice) -> Tensor:
        """Some rows in float32, as a copy that the caller may overwrite."""
        values = self.values[rows].to(torch.float32, copy=True)
        if self.scales is None:
            return values
        scales = self.scales[rows] / _LEVELS[self.values.dtype] ** self._power
        blocks = values.view(*scales.shape, -1)
        blocks.mul_(blocks.abs())
        if self._power == 4:
            blocks.mul_(blocks)
        return blocks.mul_(scales[..., None]).view(values.shape)

    def write(self, rows: slice, values: Tensor, bits: RandomBits, skip: Tensor | None) -> None:
        """Store rounded float32 values; `values` is overwritten. If the scalar skip is true, the stored values stay."""
        if self.scales is not None:
            values, scales = self._encoded(values, bits.take(self.turn), self.scales[rows])
            keep_if(self.scales[rows], scales, skip)
        elif self.values.dtype == torch.bfloat16:
            values = to_bfloat16(values, bits.take(self.turn))
        keep_if(self.values[rows], values, skip)

    @property
    def _power(self) -> int:
        """A magnitude is scale * (code / levels)^power, so codes are dense near zero.

        Second moments have the larger power, because they span more decades.
        """
        return 2 if self.values.dtype == torch.int8 else 4

    def _encoded(self, values: Tensor, bits: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales. A second moment is 0 only in a block of zeros, because the update divides by its root."""
        blocks = values.view(*scales.shape, -1)
        magnitudes = blocks.abs()
        scales = magnitudes.amax(-1)
        smallest = torch.finfo(torch.float32).tiny
        # The division comes first, because its quotient is at most 1. So no code exceeds the largest code.
        magnitudes.div_(scales.clamp(min=smallest)[..., None]).mul_(float(_LEVELS[self.values.dtype] ** self._power))
        codes = magnitudes.sqrt()
        if self._power == 4:
            codes.sqrt_()
        codes.floor_()
        below, above = (_power_of(each, self._power) for each in (codes, codes + 1))
        chance = above.sub_(below).mul_(bits.view(blocks.shape)).mul_(2.0**-16)
        codes += chance < magnitudes.sub_(below)
        if self.values.dtype == torch.uint8:
            codes = torch.maximum(codes, (scales > 0).to(codes.dtype)[..., None])
        else:
            codes.copysign_(blocks)
        return codes.view(values.shape).to(self.values.dtype), scales


def _power_of(codes: Tensor, power: int) -> Tensor:
    squares = codes * codes
    return squares if power == 2 else squares.mul_(squares)


def to_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 values to bfloat16; overwrites them. bits (int64 below 2^16) decide on rounding away from zero."""
    wrong = values.isnan()  # CUDA's NaN has all bits set, so the sum below would overflow
    whole = values.view(torch.int32).add_(bits.to(torch.int32)).bitwise_and_(-1 << 16)
    return whole.view(torch.float32).masked_fill_(wrong, math.nan).to(torch.bfloat16)


def keep_if(old: Tensor, new: Tensor, skip: Tensor | None) -> None:
    """Copy new to old, unless the scalar skip is true; the host does not wait for the value of skip."""
    if skip is None:
        old.copy_(new)
    else:
        torch.where(skip, old, new, out=old)
