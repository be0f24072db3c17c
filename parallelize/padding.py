"""Padding: tokens that a layout adds at the end of each sequence, so that ranks and stages share it evenly.

- context parallel: a multiple of cp tokens; of 2 cp for the head-tail balancer
- sequence parallel: a multiple of cp x tp
- sequence splits of a pipeline: the multiple above, times the number of splits
- micro-batches: no padding, because rules refuse a batch that the number of micro-batches does not divide

Padding tokens have no label, and their position is -1. If there are documents, the padding is a document of its own.
Causal attention hides padding from all tokens of the sequence. Experts skip padding, and the largest attention logit is
found without it. The divisor and the data order do not count it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from components.config import Parallelism
from parallelize.mesh import Degrees

if TYPE_CHECKING:
    from torch import Tensor


def padded_length(length: int, degrees: Degrees, parallelism: Parallelism) -> int:
    """Tokens of a sequence of this length with its padding."""
    unit = degrees.cp
    if degrees.cp > 1 and parallelism.context_parallel_load_balancer == "headtail":
        unit *= 2
    if parallelism.sequence_parallel:
        unit = math.lcm(unit, degrees.cp * degrees.tp)
    unit *= parallelism.pipeline_parallel_sequence_splits
    return -(-length // unit) * unit


def pad(batch: dict[str, Tensor], degrees: Degrees, parallelism: Parallelism) -> dict[str, Tensor]:
    """The columns (B, S) or (B, S, K) of a batch with their padding, of padded_length."""
    length = batch["tokens"].shape[1]
    count = padded_length(length, degrees, parallelism) - length
    return {name: _padded(column, count, name) for name, column in batch.items()} if count else batch


def _padded(column: Tensor, count: int, name: str) -> Tensor:
    """(B, S + count), or (B, S + count, K)"""
    import torch
    import torch.nn.functional as F

    if name == "document_ids":
        return torch.cat([column, (column[:, -1:] + 1).expand(-1, count)], 1)
    value = -100 if "labels" in name else -1 if name == "positions" else 0
    return F.pad(column, (*(0, 0) * (column.ndim - 2), 0, count), value=value)
