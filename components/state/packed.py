"""Packed parameters (models/nf4.py) as the numbers that they stand for: what files hold, and what hashes are of."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.nf4 import is_packed, pack, unpack, unpacked_shape
from parallelize.sharding import own_slice


def numbers_of(parameter: Tensor) -> Tensor:
    """The parameter itself, or a packed one's float32 numbers, with the same slice on each rank."""
    if not is_packed(parameter):
        return parameter
    return _like(parameter, unpack(own_slice(parameter)[0]))


@contextmanager
def to_fill(parameter: Tensor) -> Iterator[Tensor]:
    """A tensor for a parameter's numbers: itself, or of a packed one float32, which is packed in the end."""
    if not is_packed(parameter):
        yield parameter
        return
    local, _ = own_slice(parameter)
    filled = _like(parameter, torch.empty(unpacked_shape(local.shape), device=local.device))
    yield filled
    local.copy_(pack(own_slice(filled)[0]))


def _like(parameter: Any, numbers: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return numbers
    shape = torch.Size(unpacked_shape(parameter.shape))
    strides = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(
        numbers, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=strides
    )
    return whole.to(numbers.device)  # parameters may be on the host, from where from_local moves to the mesh's device
