"""The pieces of a sequence that context parallel ranks hold.

If balanced, a rank holds two of 2 x ranks pieces: one from the head of the sequence and its counterpart from the tail.
"""

import torch
from torch import Tensor


def pieces_of(rank: int, length: int, ranks: int, balanced: bool) -> list[tuple[int, int]]:
    """Start and stop of each piece of a sequence that a rank holds."""
    numbers = (rank, 2 * ranks - 1 - rank) if balanced else (rank,)
    size = length // (ranks * len(numbers))
    return [(number * size, (number + 1) * size) for number in numbers]


def sequence_order(tensor: Tensor, dim: int, ranks: int, balanced: bool) -> Tensor:
    """Reorder the pieces of a gathered tensor along `dim`, from the order of ranks to the order of the sequence.

    Pieces are concatenated, because an index would be made on the host and its copy to a GPU would wait for the stream.
    """
    if not balanced:
        return tensor
    pieces = tensor.chunk(2 * ranks, dim)
    return torch.cat([*pieces[::2], *reversed(pieces[1::2])], dim)


def rank_order(tensor: Tensor, dim: int, ranks: int, balanced: bool) -> Tensor:
    """The inverse of sequence_order."""
    if not balanced:
        return tensor
    pieces = tensor.chunk(2 * ranks, dim)
    heads, tails = pieces[:ranks], reversed(pieces[ranks:])
    return torch.cat([piece for pair in zip(heads, tails, strict=True) for piece in pair], dim)
