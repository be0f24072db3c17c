"""Packed parameters (models/nf4.py) as unpacked numbers, which files hold and hashes cover."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from models.nf4 import is_packed, pack, unpack, unpacked_shape
from parallelize.sharding import own_slice, split_like


def numbers_of(parameter: Tensor) -> Tensor:
    """The parameter itself or, if it is packed, its numbers in float32, sharded in the same way."""
    if not is_packed(parameter):
        return parameter
    return split_like(parameter, unpack(own_slice(parameter)[0]), unpacked_shape(parameter.shape))


@contextmanager
def to_fill(parameter: Tensor) -> Iterator[Tensor]:
    """Yields a tensor to fill: the parameter itself or, if it is packed, a float32 tensor that is packed on exit."""
    if not is_packed(parameter):
        yield parameter
        return
    local, _ = own_slice(parameter)
    empty = torch.empty(unpacked_shape(local.shape), device=local.device)
    filled = split_like(parameter, empty, unpacked_shape(parameter.shape))
    yield filled
    local.copy_(pack(own_slice(filled)[0]))
