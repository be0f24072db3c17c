"""Context parallel: each sequence is split over cp ranks, which exchange queries, keys and values in attention.

Three methods. Each replaces the model's attention cores and its visibility (models/attention.py):
  ring          own queries; keys and values of one rank after another (arXiv:2310.01889): ring.py
  allgather_kv  an all-gather of keys and values; queries stay (arXiv:2407.21783, section 3.3.2)
  ulysses       an all-to-all of heads for the whole sequence, and back (arXiv:2309.14509)
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from components.config import Parallelism
from models.attention import AttentionCore, Visibility, Visible
from models.layers import Head
from models.steps import AttentionInSteps
from parallelize.mesh import Mesh
from parallelize.padding import pad, padded_length
from parallelize.pieces import pieces_of, rank_order, sequence_order
from parallelize.ring import RingExchange, steps_of


def apply_context_parallel(model: nn.Module, mesh: Mesh, parallelism: Parallelism, seq_len: int) -> None:
    """Let every attention core see the whole sequence, of which shard_sequence gives each rank a part."""
    cp = mesh["cp"]
    for name, module in list(model.named_modules()):
        replacement: AttentionCore | Visibility
        if isinstance(module, Visibility):
            replacement = _WholeSequence(cp, parallelism) if cp.size() > 1 else module
            replacement.padding = padded_length(seq_len, mesh.degrees, parallelism) - seq_len
            replacement.sinks, replacement.padded_rows = module.sinks, module.padded_rows
        elif isinstance(module, Head) and cp.size() > 1:
            module.whole = partial(_whole_sequences, cp=cp)
            continue
        elif isinstance(module, AttentionCore) and cp.size() > 1:
            replacement = _CORES[parallelism.context_parallel_method](cp, parallelism)
        else:
            continue
        replacement.kernel = module.kernel
        model.set_submodule(name, replacement)


def _whole_sequences(part_BSC: Tensor, cp: DeviceMesh) -> Tensor:
    """The parts (B, S / cp, C) of all ranks, in the order of ranks."""
    return DTensor.from_local(part_BSC, cp, [Shard(1)], run_check=False).full_tensor()


def shard_sequence(batch: dict[str, Tensor], mesh: Mesh, parallelism: Parallelism) -> dict[str, Tensor]:
    """This rank's part of every sequence of a batch {name: (B, S) or (B, S, K)}, padded; columns stay with tokens."""
    batch, cp = pad(batch, mesh.degrees, parallelism), mesh["cp"]
    if cp.size() == 1:
        return batch
    ranks, rank, balanced = cp.size(), cp.get_local_rank(), parallelism.context_parallel_load_balancer == "headtail"
    return {
        name: rank_order(tensor, 1, ranks, balanced).chunk(ranks, 1)[rank].contiguous()
        for name, tensor in batch.items()
    }


class _Core(AttentionCore):
    """The core of a method: replaces the model's attention core on each rank of cp."""

    def __init__(self, cp: DeviceMesh, parallelism: Parallelism) -> None:
        super().__init__()
        self.cp, self.balanced = cp, parallelism.context_parallel_load_balancer == "headtail"


class _RingCore(_Core):
    """This rank's queries, and the keys and values of one rank after another: ring.py."""

    def __init__(self, cp: DeviceMesh, parallelism: Parallelism) -> None:
        super().__init__(cp, parallelism)
        self.exchange = RingExchange(cp.get_group(), parallelism.context_parallel_rotate_method == "allgather")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, sinks_H: Tensor | None = None) -> Tensor:
        if self.largest_logit is not None:
            self._observe_all(q, k.detach(), visible)
        return AttentionInSteps.apply(q, k, v, sinks_H, visible.made, self.exchange)

    def _observe_all(self, q: Tensor, k: Tensor, visible: Visible) -> None:
        """Raise largest_logit to the largest logit of this rank's queries and all keys, which are gathered."""
        cp = self.cp
        whole = DTensor.from_local(k, cp, [Shard(2)], run_check=False).full_tensor()
        keys = sequence_order(whole, 2, cp.size(), self.balanced)
        pieces = pieces_of(cp.get_local_rank(), keys.shape[2], cp.size(), self.balanced)
        for queries, piece in zip(q.chunk(len(pieces), dim=2), pieces, strict=True):
            part = visible.part(*piece)
            self.observe(queries, keys[:, :, : part.keys], part)


class _WholeSequence(Visibility):
    """Visibility of the whole sequence, from the shards of its ranks, prepared for the method."""

    def __init__(self, cp: DeviceMesh, parallelism: Parallelism) -> None:
        super().__init__()
        self.cp, self.method = cp, parallelism.context_parallel_method
        self.balanced = parallelism.context_parallel_load_balancer == "headtail"

    def forward(self, positions_BS: Tensor, document_ids_BS: Tensor | None, window: int | None = None) -> Visible:
        rank, ranks = self.cp.get_local_rank(), self.cp.size()
        length, documents = positions_BS.shape[1] * ranks, None
        if document_ids_BS is not None:
            gathered = DTensor.from_local(document_ids_BS, self.cp, [Shard(1)], run_check=False).full_tensor()
            documents, document_ids_BS = gathered.chunk(ranks, 1), sequence_order(gathered, 1, ranks, self.balanced)
        whole = self.whole(length, positions_BS.device, document_ids_BS, window)
        if self.method == "ulysses":
            return self.kernel.prepare(whole)
        if self.method == "ring":
            return replace(whole, made=steps_of(rank, ranks, self.balanced, whole, documents))
        pieces = pieces_of(rank, length, ranks, self.balanced)
        return replace(whole, made=[self.kernel.prepare(whole.part(*piece)) for piece in pieces])


class _GatheringCore(_Core):
    """This rank's queries and all keys and values, whose gradients are reduce-scattered to the ranks they came from."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, sinks_H: Tensor | None = None) -> Tensor:
        keys_and_values = DTensor.from_local(torch.stack((k, v)), self.cp, [Shard(3)], run_check=False)
        gathered = keys_and_values.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        k, v = sequence_order(gathered, 3, self.cp.size(), self.balanced)
        parts: list[Visible] = visible.made
        out = []
        for queries, part in zip(q.chunk(len(parts), dim=2), parts, strict=True):
            out.append(super().forward(queries, k[:, :, : part.keys], v[:, :, : part.keys], part, sinks_H))
        return torch.cat(out, dim=2)


class _UlyssesCore(_Core):
    """Every rank exchanges (B, H, S / cp, K) for (B, H / cp, S, K): the whole sequence of its share of the heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, sinks_H: Tensor | None = None) -> Tensor:
        ranks = self.cp.size()
        if sinks_H is not None:  # FSDP sums the gradients of all heads, because its ranks include those of cp
            sinks_H = sinks_H.chunk(ranks)[self.cp.get_local_rank()]
        if k.shape[1] < ranks:
            k, v = (tensor.repeat_interleave(ranks // tensor.shape[1], dim=1) for tensor in (k, v))
        q, k, v = (sequence_order(self._exchange(tensor, 1, 2), 2, ranks, self.balanced) for tensor in (q, k, v))
        out = super().forward(q, k, v, visible, sinks_H)
        return self._exchange(rank_order(out, 2, ranks, self.balanced), 2, 1)

    def _exchange(self, x: Tensor, split: int, joined: int) -> Tensor:
        """All-to-all: divides dimension `split` over the ranks, and makes dimension `joined` whole."""
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        parts = x.unflatten(split, (self.cp.size(), -1)).movedim(split, 0).contiguous()
        parts = all_to_all_single_autograd(parts, None, None, self.cp.get_group())
        return parts.movedim(0, joined).flatten(joined, joined + 1)


_CORES = {"ring": _RingCore, "allgather_kv": _GatheringCore, "ulysses": _UlyssesCore}
"""parallelism.context_parallel_method -> attention core."""
