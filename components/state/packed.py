"""Packed parameters (models/nf4.py) as the numbers that they stand for: what files hold, and what hashes are of."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from models.nf4 import is_packed, pack, unpack, unpacked_shape
from parallelize.sharding import own_slice, split_like


def numbers_of(parameter: Tensor) -> Tensor:
    """The parameter itself, or a packed one's float32 numbers, with the same slice on each rank."""
    if not is_packed(parameter):
        return parameter
    return split_like(parameter, unpack(own_slice(parameter)[0]), unpacked_shape(parameter.shape))


@contextmanager
def to_fill(parameter: Tensor) -> Iterator[Tensor]:
    """A tensor for a parameter's numbers: itself, or of a packed one float32, which is packed in the end."""
    if not is_packed(parameter):
        yield parameter
        return
    local, _ = own_slice(parameter)
    empty = torch.empty(unpacked_shape(local.shape), device=local.device)
    filled = split_like(parameter, empty, unpacked_shape(parameter.shape))
    yield filled
    local.copy_(pack(own_slice(filled)[0]))
