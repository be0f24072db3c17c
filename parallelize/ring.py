"""Ring attention (arXiv:2310.01889): a rank's queries attend to the keys and values of one rank after another.

The keys and values of one rank are a part in the sense of models/steps.py. Shapes are named as in models/layers.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from models.steps import AttentionStep, step
from models.visible import Visible
from parallelize.groups import arrived
from parallelize.pieces import pieces_of


def steps_of(
    rank: int, ranks: int, balanced: bool, whole: Visible, documents: Sequence[Tensor] | None
) -> list[list[AttentionStep]]:
    """The steps of a rank over its own keys, then over those of the rank before it, and so on.

    whole: the Visible of the whole sequence. documents: document ids (B, S) of each rank's tokens.
    """
    steps = []
    for number in range(ranks):
        source = (rank - number) % ranks
        seen = _windowed(rank, source, ranks, balanced, whole) if whole.window else []
        if not whole.window and (balanced or source <= rank):
            seen = [_without_window(rank, source, balanced, whole.keys // ranks, whole.device)]
        if documents is not None:
            seen = [_with_documents(each, documents[rank], documents[source]) for each in seen]
        steps.append([step(*each) for each in seen])
    return steps


def _without_window(rank: int, source: int, balanced: bool, length: int, device: torch.device) -> AttentionStep:
    """The step over the source's keys, without a window.

    Over the rank's own keys the step is causal. Over another rank's keys, every query of the step sees every key.
    If balanced, the first half of a rank's tokens is from the head of the sequence, the second half from its tail.
    """
    everything, head, tail = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    queries = tail if balanced and source > rank else everything
    keys = head if balanced and source < rank else everything
    first = 0 if source == rank else keys.stop
    return AttentionStep(queries, keys, Visible(queries.stop - queries.start, keys.stop, device, first=first))


def _windowed(rank: int, source: int, ranks: int, balanced: bool, whole: Visible) -> list[AttentionStep]:
    """A step for each piece of the queries with each piece of the source's keys that those queries see.

    The nearest keys come first, so that a query's first step has the query's own key.
    """
    assert whole.window is not None
    found = []
    own, theirs = (pieces_of(each, whole.keys, ranks, balanced) for each in (rank, source))
    for place, (start, stop) in enumerate(own):
        for number, (first, last) in reversed([*enumerate(theirs)]):
            if first <= start and start - last + 1 < whole.window:
                size = stop - start
                queries, keys = (slice(each * size, (each + 1) * size) for each in (place, number))
                visible = Visible(size, size, whole.device, window=whole.window, first=start - first)
                found.append(AttentionStep(queries, keys, visible))
    return found


def _with_documents(seen: AttentionStep, own_BS: Tensor, theirs_BS: Tensor) -> AttentionStep:
    documents = {"documents_BT": theirs_BS[:, seen.keys], "own_documents_BS": own_BS[:, seen.queries]}
    return seen._replace(visible=replace(seen.visible, **documents))  # type: ignore[arg-type]


class RingExchange(NamedTuple):
    """A KeyValueSource that passes keys and values round the ring, and gradients back to the rank of the keys."""

    group: ProcessGroup
    gathers: bool
    """True: one all-gather, and one reduce-scatter of gradients. False: messages from neighbour to neighbour."""

    def passed_on(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields this rank's keys and values, then each previous rank's. Transfers overlap with attention."""
        from torch.distributed import _functional_collectives as collectives

        rank, ranks = self.group.rank(), self.group.size()
        if self.gathers:
            gathered = collectives.all_gather_single(torch.stack((k, v))[None], 0, self.group)
            yield k, v
            for number in range(1, ranks):
                k, v = arrived(gathered)[(rank - number) % ranks]
                yield k, v
            return
        for _ in range(ranks - 1):
            following = self._to_the_next(torch.stack((k, v)))
            yield k, v
            k, v = arrived(following)
        yield k, v

    def brought_home(self, gradients: Iterable[Tensor]) -> Tensor:
        """The gradient of this rank's keys and values, summed over ranks. gradients: in the order of passed_on."""
        from torch.distributed import _functional_collectives as collectives

        rank, ranks = self.group.rank(), self.group.size()
        total: Tensor | None = None
        if self.gathers:
            for number, part in enumerate(gradients):
                total = part.new_empty((ranks, *part.shape)) if total is None else total
                total[(rank - number) % ranks] = part
            assert total is not None
            return arrived(collectives.reduce_scatter_single(total, "sum", 0, self.group))[0]
        for part in gradients:
            total = self._to_the_next(part if total is None else arrived(total) + part)
        assert total is not None
        return arrived(total)

    def _to_the_next(self, tensor: Tensor) -> Tensor:
        from torch.distributed import _functional_collectives as collectives

        ranks = self.group.size()
        following = [(rank + 1) % ranks for rank in range(ranks)]
        return collectives.permute_tensor(tensor.flatten(), following, self.group).view_as(tensor)
