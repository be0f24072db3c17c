"""Micro-batches cut along the sequence: a pipeline passes on parts of sequences (arXiv:2406.03488, arXiv:2102.07988).

A part's queries see the keys of the same part and of earlier parts, which each attention core keeps. Backward goes from
a sequence's last part to its first, so that the gradients from later parts are there when a part's backward runs.
Shapes are named as in models/layers.py.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.attention import AttentionCore, Visibility
from models.steps import AttentionInSteps, AttentionStep, step
from models.visible import Visible
from parallelize.stage import Stage


def apply_sequence_splits(stage: nn.Module, splits: int) -> None:
    """Let the stage take parts of sequences, which PartStage announces. By default sequences are whole."""
    if splits == 1:
        return
    for name, module in list(stage.named_modules()):
        replacement: AttentionCore | Visibility
        if isinstance(module, Visibility):
            replacement = _PartVisibility(splits)
            replacement.padding, replacement.sinks = module.padding, module.sinks
            replacement.padded_rows = module.padded_rows
        elif isinstance(module, AttentionCore):
            replacement = _PartCore()
        else:
            continue
        replacement.kernel = module.kernel
        stage.set_submodule(name, replacement)


def cut_into_parts(tensor: Tensor, micro_batches: int, splits: int) -> Tensor:
    """(B, S, ...) -> (B x splits, S / splits, ...): the parts of the first micro-batch, then those of the second."""
    parts = tensor.unflatten(1, (splits, -1)).unflatten(0, (micro_batches, -1))
    return parts.transpose(1, 2).flatten(0, 2)


class PartStage(Stage):
    """Announces each part to the stage before its forward."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        visibility: Any = self.submod.get_submodule("visibility")
        visibility.number = fwd_chunk_id
        try:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        finally:
            visibility.number = None


class _Part(NamedTuple):
    """Facts that a part's attention needs, in visible.made."""

    sequence: int
    """The number of the micro-batch."""
    place: int
    """The number of the part in its micro-batch."""
    steps: list[list[AttentionStep]]
    """Steps of attention: over the part's own keys, and over those of all earlier parts."""


class _PartVisibility(Visibility):
    """Visibility of a part's queries, over the sequence up to the end of the part."""

    def __init__(self, splits: int) -> None:
        super().__init__()
        self.splits = splits
        self.number: int | None = None
        """Number of the part, counted over all micro-batches; None for whole sequences."""
        self._documents: list[Tensor] = []
        """Document ids of the sequence's parts so far."""

    def forward(self, positions_BS: Tensor, document_ids_BS: Tensor | None, window: int | None = None) -> Visible:
        if self.number is None:
            return super().forward(positions_BS, document_ids_BS, window)
        return self._of_part(self.number, positions_BS, document_ids_BS, window)

    def _of_part(
        self, number: int, positions_BS: Tensor, document_ids_BS: Tensor | None, window: int | None
    ) -> Visible:
        (sequence, place), length = divmod(number, self.splits), positions_BS.shape[1]
        own = Visible(length, length, positions_BS.device, document_ids_BS, window)
        before = Visible(length, place * length, own.device, window=window, first=place * length)
        documents_BT = None
        if document_ids_BS is not None:
            self._documents = [*self._documents[:place], document_ids_BS]
            documents_BT = torch.cat(self._documents, 1)
            earlier_BT = documents_BT[:, : before.keys]
            before = replace(before, documents_BT=earlier_BT, own_documents_BS=document_ids_BS)
        everything = [each for each in (own, before) if each.keys]
        steps = [[step(slice(0, length), slice(0, each.keys), each)] for each in everything]
        padding = min(length, max(0, self.padding - (self.splits - 1 - place) * length))
        whole = Visible(length, length + before.keys, own.device, documents_BT, window, padding=padding)
        return replace(whole, made=_Part(sequence, place, steps))


class _PartCore(AttentionCore):
    """Attention of a part's queries over the keys up to the end of the part."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Sequence -> keys and values (B, G, S, K) of its parts so far, until its backward is done."""
        self.gradients: dict[int, list[Tensor]] = {}
        """Sequence -> gradients (2, B, G, S, K) of its parts' keys and values from later parts, in float32."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, sinks_H: Tensor | None = None) -> Tensor:
        part = visible.made
        if not isinstance(part, _Part):
            return super().forward(q, k, v, visible, sinks_H)
        out = AttentionInSteps.apply(q, k, v, sinks_H, part.steps, _Earlier(self, part.sequence, part.place))
        if self.largest_logit is not None:
            self.observe(q, torch.cat([keys for keys, _ in self.kept[part.sequence]], dim=2), visible)
        return out


class _Earlier(NamedTuple):
    """A KeyValueSource of the keys and values of the earlier parts of a sequence."""

    core: _PartCore
    sequence: int
    place: int

    def passed_on(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        earlier = self.core.kept.get(self.sequence, [])[: self.place]
        self.core.kept[self.sequence] = [*earlier, (k.detach(), v.detach())]
        yield k, v
        if earlier:
            keys, values = zip(*earlier)
            yield torch.cat(keys, dim=2), torch.cat(values, dim=2)

    def brought_home(self, gradients: Iterable[Tensor]) -> Tensor:
        own, *rest = gradients
        parts = [*(rest[0].chunk(self.place, dim=3) if rest else ()), own]
        if self.sequence in self.core.gradients:
            later = self.core.gradients[self.sequence]
            parts = [part + more for part, more in zip(parts, later, strict=True)]
        *self.core.gradients[self.sequence], own = parts
        self.core.kept[self.sequence].pop()
        if self.place == 0:
            del self.core.gradients[self.sequence], self.core.kept[self.sequence]
        return own
