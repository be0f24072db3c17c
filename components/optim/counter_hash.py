"""Random bits of an element: a pure function (models/random_bits.py) of its index in the full tensor.

Each rank evaluates the function on its own slice. So every layout has the same bits, on devices of one kind.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from parallelize.sharding import own_slice

CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}  # elements: per CPU thread, to fit its core's cache; to fill a GPU

Indices = Callable[[], Tensor]
"""Makes int64 indices of elements in the full tensor, (rows, columns)."""


def chunks(
    parameter: Tensor, device: torch.device | None = None, part: slice = slice(None)
) -> Iterator[tuple[slice, Indices]]:
    """Yields groups of this rank's rows: (rows of the slice viewed as (-1, columns), indices in the full tensor).

    device: where the indices are made, by default the parameter's device. part: the rows to visit, numbered from 0 on.
    """
    local, offset = own_slice(parameter)
    if local.numel() == 0:
        return
    device = device or local.device
    # Rows of the local slice are contiguous in the full tensor along its last dimension.
    columns, full_columns = local.shape[-1], parameter.shape[-1]
    leading = torch.zeros(local.shape[:-1], dtype=torch.int64, device=device)
    for dim, size in enumerate(local.shape[:-1]):
        index = torch.arange(size, device=device) + offset[dim]
        shape = [1] * (local.ndim - 1)
        shape[dim] = size
        leading = leading * parameter.shape[dim] + index.view(shape)
    starts = (leading * full_columns + offset[-1]).flatten()[part]
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    step = max(1, threads * CHUNK[device.type] // columns)
    within = torch.arange(columns, device=device)
    for row in range(0, len(starts), step):
        rows = slice(row, min(row + step, len(starts)))
        yield rows, partial(torch.add, starts[rows, None], within)
