"""Ring attention (arXiv:2310.01889): own queries, and the keys and values of one rank after another.

Each rank's keys and values are a step (steps.py). Shapes are named as in models/layers.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from models.visible import Visible
from parallelize.steps import Step, step


def steps_of(
    rank: int, ranks: int, balanced: bool, whole: Visible, documents: Sequence[Tensor] | None
) -> list[Step | None]:
    """The steps of a rank, with its own keys first, then those of the rank before it; None where it sees no key.

    whole: of the sequence. documents: (B, S) of each rank. Balanced, the first half of a rank's tokens is a piece of
    the sequence's head, the second half its counterpart in the tail (pieces_of in context.py).
    """
    length = whole.keys // ranks
    everything, head, tail = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    steps: list[Step | None] = []
    for number in range(ranks):
        source = (rank - number) % ranks
        queries = tail if balanced and source > rank else everything
        keys = head if balanced and source < rank else everything
        if source > rank and not balanced:
            steps.append(None)
            continue
        visible = Visible(queries.stop - queries.start, keys.stop, whole.device, first=keys.stop if number else 0)
        if documents is not None:
            of_keys, of_queries = documents[source][:, keys], documents[rank][:, queries]
            visible = replace(visible, documents_BT=of_keys, own_documents_BS=of_queries)
        steps.append(step(queries, keys, visible))
    return steps


class Exchange(NamedTuple):
    """A Source: how keys and values go round, and their gradients come home."""

    group: ProcessGroup
    gathers: bool
    """In one message of all ranks, or from neighbour to neighbour."""

    def passed_on(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of this rank, of the rank before it, and so on. The next ones are under way meanwhile."""
        from torch.distributed import _functional_collectives as collectives

        rank, ranks = self.group.rank(), self.group.size()
        if self.gathers:
            gathered = collectives.all_gather_single(torch.stack((k, v))[None], 0, self.group)
            yield k, v
            for number in range(1, ranks):
                k, v = _arrived(gathered)[(rank - number) % ranks]
                yield k, v
            return
        for _ in range(ranks - 1):
            following = self._to_the_next(torch.stack((k, v)))
            yield k, v
            k, v = _arrived(following)
        yield k, v

    def brought_home(self, gradients: Iterable[Tensor]) -> Tensor:
        """The sum over ranks of what belongs to this rank; gradients come in the order of passed_on."""
        from torch.distributed import _functional_collectives as collectives

        rank, ranks = self.group.rank(), self.group.size()
        total: Tensor | None = None
        if self.gathers:
            for number, part in enumerate(gradients):
                total = part.new_empty((ranks, *part.shape)) if total is None else total
                total[(rank - number) % ranks] = part
            assert total is not None
            return _arrived(collectives.reduce_scatter_single(total, "sum", 0, self.group))[0]
        for part in gradients:
            total = self._to_the_next(part if total is None else _arrived(total) + part)
        assert total is not None
        return _arrived(total)

    def _to_the_next(self, tensor: Tensor) -> Tensor:
        from torch.distributed import _functional_collectives as collectives

        ranks = self.group.size()
        following = [(rank + 1) % ranks for rank in range(ranks)]
        return collectives.permute_tensor(tensor.flatten(), following, self.group).view_as(tensor)


def _arrived(tensor: Tensor) -> Tensor:
    """What a message brings, waited for; an AsyncCollectiveTensor would go on into kernels, and not all take it."""
    from torch.distributed import _functional_collectives as collectives

    return tensor.wait() if isinstance(tensor, collectives.AsyncCollectiveTensor) else tensor
