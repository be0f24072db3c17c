"""Context parallel: each sequence is split over cp ranks, which exchange queries, keys and values in attention.

Three methods. Each replaces the model's attention cores and, but for the ring, its visibility (models/attention.py):
  ring          torch's ring attention, in its module form (arXiv:2310.01889)
  allgather_kv  an all-gather of keys and values; queries stay (arXiv:2407.21783, section 3.3.2)
  ulysses       an all-to-all of heads for the whole sequence, and back (arXiv:2309.14509)
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

from components.config import Parallelism
from models.attention import AttentionCore, Visibility, Visible, raise_to_largest_logit
from parallelize.mesh import Mesh, padded_length

aten = torch.ops.aten


def apply_context_parallel(model: nn.Module, mesh: Mesh, parallelism: Parallelism) -> None:
    """Let every attention core see the whole sequence, of which shard_sequence gives each rank a part."""
    cp, balanced = mesh["cp"], parallelism.context_parallel_load_balancer == "headtail"
    if cp.size() == 1:
        return
    method = parallelism.context_parallel_method
    if method == "ring":
        _configure_ring(balanced, parallelism.context_parallel_rotate_method)
    for name, module in list(model.named_modules()):
        replacement: AttentionCore | Visibility
        if isinstance(module, AttentionCore):
            replacement = _CORES[method](cp, balanced)
        elif isinstance(module, Visibility) and method != "ring":
            replacement = _WholeSequence(cp, balanced, own_queries=method == "allgather_kv")
        else:
            continue
        replacement.kernel = module.kernel
        model.set_submodule(name, replacement)


def shard_sequence(batch: dict[str, Tensor], mesh: Mesh, parallelism: Parallelism) -> dict[str, Tensor]:
    """This rank's part of every sequence of a batch {name: (B, S)}; labels and positions stay with their tokens.

    A sequence that ranks cannot share evenly is padded at its end, where no token of its own looks, without labels.
    """
    cp = mesh["cp"]
    length = batch["tokens"].shape[1]
    if padding := padded_length(length, mesh.degrees, parallelism) - length:
        batch = {name: _padded(tensor, padding, name) for name, tensor in batch.items()}
    if cp.size() == 1:
        return batch
    ranks, rank, balanced = cp.size(), cp.get_local_rank(), parallelism.context_parallel_load_balancer == "headtail"
    return {
        name: rank_order(tensor, 1, ranks, balanced).chunk(ranks, 1)[rank].contiguous()
        for name, tensor in batch.items()
    }


def _padded(tensor: Tensor, count: int, name: str) -> Tensor:
    """(B, S + count). Labels that do not count; padding is a document of its own; the rest is never looked at."""
    if name == "document_ids":
        return torch.cat([tensor, (tensor[:, -1:] + 1).expand(-1, count)], 1)
    return F.pad(tensor, (0, count), value=-100 if name == "labels" else 0)


def pieces_of(rank: int, length: int, ranks: int, balanced: bool) -> list[tuple[int, int]]:
    """Start and stop of each piece of a sequence that a rank holds: one of `ranks` equal pieces.

    Balanced, a rank holds two of 2 x ranks pieces: one from the head and its counterpart from the tail.
    """
    numbers = (rank, 2 * ranks - 1 - rank) if balanced else (rank,)
    size = length // (ranks * len(numbers))
    return [(number * size, (number + 1) * size) for number in numbers]


def sequence_order(tensor: Tensor, dim: int, ranks: int, balanced: bool) -> Tensor:
    """A gathered tensor, in the order of ranks along this dimension, put into the order of the sequence.

    By pieces: an index would be made on the host, whose copy to a GPU waits for all that the GPU has to do.
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


class _Core(AttentionCore):
    """The core of a method: replaces the model's attention core on each rank of cp."""

    def __init__(self, cp: DeviceMesh, balanced: bool) -> None:
        super().__init__()
        self.cp, self.balanced = cp, balanced


# Ring


class _RingCore(_Core):
    """Causal attention by a kernel that torch's ring is made of; takes q, k, v as DTensors split by sequence."""

    def __init__(self, cp: DeviceMesh, balanced: bool) -> None:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        super().__init__(cp, balanced)
        style = ring._ContextParallel(seq_dim=2, attention_type=ring._ContextParallel.AttentionType.SDPA)
        parallelize_module(self, cp, style)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
        assert visible.is_causal, "the ring takes no mask"
        if self.largest_logit is not None:
            self._observe(q, k, self.largest_logit)
        if q.device.type == "cpu":
            return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
        if q.dtype == torch.float32 and q.shape[1] != k.shape[1]:
            # Only flash attention has grouped heads, and it has no float32.
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        # Not cuDNN's, which an H100 prefers: its backward would get the sizes of another step round the ring.
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    @torch.no_grad()
    def _observe(self, q: Tensor, k: Tensor, largest: Tensor) -> None:
        """Raise `largest` to the largest logit of this rank's queries and all keys; gathers the keys."""
        assert isinstance(q, DTensor)
        assert isinstance(k, DTensor)
        cp, length = self.cp, q.shape[2]
        keys = sequence_order(k.full_tensor(), 2, cp.size(), self.balanced)
        pieces = pieces_of(cp.get_local_rank(), length, cp.size(), self.balanced)
        for queries, (_, stop) in zip(q.to_local().chunk(len(pieces), dim=2), pieces, strict=True):
            raise_to_largest_logit(largest, queries, keys[:, :, :stop], None, None)


def _configure_ring(balanced: bool, rotate_method: str) -> None:
    """Set torch's ring up for the whole process, and add the CPU's kernels, which its table lacks."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    ring._dispatch_mode = ring._DispatchMode.MODULE_WRAPPER
    ring._cp_options.enable_load_balance = balanced
    ring.set_rotate_method(rotate_method)
    kernels: dict[Any, Any] = ring.custom_ops
    kernels[aten._scaled_dot_product_flash_attention_for_cpu.default] = _ring_on_cpu
    kernels[aten._scaled_dot_product_flash_attention_for_cpu_backward.default] = _ring_on_cpu
    ring._enable_cp_dtensor_dispatcher()


def _ring_on_cpu(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """torch's ring of the CPU's kernels: forward of (q, k, v), or backward of (gradient, q, k, v, out, logsumexp)."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    *tensors, _, is_causal = args
    mesh, local = tensors[0].device_mesh, [tensor.to_local() for tensor in tensors]
    if len(local) == 3:
        run: Any = partial(ring._templated_ring_attention, op=_forward_on_cpu)
        names = ["query", "key", "value"]
    else:
        run = partial(ring._templated_ring_attention_backward, op=_backward_on_cpu, grad_out_name="grad_out")
        names = ["grad_out", "query", "key", "value", "out", "logsumexp"]
    results = run(group=mesh.get_group(), seq_dim=2, is_causal=is_causal, **dict(zip(names, local, strict=True)))
    return tuple(DTensor.from_local(result, mesh, [Shard(2)], run_check=False) for result in results)


def _forward_on_cpu(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> tuple[Tensor, ...]:
    repeated = (_repeated_for_each_head(tensor, query) for tensor in (key, value))
    return aten._scaled_dot_product_flash_attention_for_cpu(query, *repeated, 0.0, more["is_causal"])


def _backward_on_cpu(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> tuple[Tensor, ...]:
    repeated = (_repeated_for_each_head(tensor, query) for tensor in (key, value))
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        more["grad_out"], query, *repeated, more["out"], more["logsumexp"], 0.0, more["is_causal"]
    )
    return gradients[0], *(tensor.unflatten(1, (key.shape[1], -1)).sum(dim=2) for tensor in gradients[1:])


def _repeated_for_each_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values for each query head: the CPU's kernel has no groups; the ring sends key heads alone."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


# Methods that take a mask


class _WholeSequence(Visibility):
    """What all queries of the whole sequence see; with own_queries, what each piece of this rank's queries sees."""

    def __init__(self, cp: DeviceMesh, balanced: bool, own_queries: bool) -> None:
        super().__init__()
        self.cp, self.balanced, self.own_queries = cp, balanced, own_queries

    def forward(self, positions_BS: Tensor, document_ids_BS: Tensor | None, window: int | None = None) -> Visible:
        ranks, length = self.cp.size(), positions_BS.shape[1] * self.cp.size()
        if document_ids_BS is not None:
            gathered = DTensor.from_local(document_ids_BS, self.cp, [Shard(1)], run_check=False).full_tensor()
            document_ids_BS = sequence_order(gathered, 1, ranks, self.balanced)
        whole = Visible(length, length, positions_BS.device, document_ids_BS, window)
        if not self.own_queries:
            return self.kernel.prepare(whole)
        pieces = pieces_of(self.cp.get_local_rank(), length, ranks, self.balanced)
        return replace(whole, made=[self.kernel.prepare(whole.part(*piece)) for piece in pieces])


class _GatheringCore(_Core):
    """This rank's queries and all keys and values, whose gradients are reduce-scattered to the ranks they came from."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
        keys_and_values = DTensor.from_local(torch.stack((k, v)), self.cp, [Shard(3)], run_check=False)
        gathered = keys_and_values.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        k, v = sequence_order(gathered, 3, self.cp.size(), self.balanced)
        parts: list[Visible] = visible.made
        out = []
        for queries, part in zip(q.chunk(len(parts), dim=2), parts, strict=True):
            out.append(super().forward(queries, k[:, :, : part.keys], v[:, :, : part.keys], part))
        return torch.cat(out, dim=2)


class _UlyssesCore(_Core):
    """Every rank exchanges (B, H, S / cp, K) for (B, H / cp, S, K): the whole sequence of its share of the heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
        ranks = self.cp.size()
        if k.shape[1] < ranks:
            k, v = (tensor.repeat_interleave(ranks // tensor.shape[1], dim=1) for tensor in (k, v))
        q, k, v = (sequence_order(self._exchange(tensor, 1, 2), 2, ranks, self.balanced) for tensor in (q, k, v))
        out = super().forward(q, k, v, visible)
        return self._exchange(rank_order(out, 2, ranks, self.balanced), 2, 1)

    def _exchange(self, x: Tensor, split: int, joined: int) -> Tensor:
        """All-to-all: divides dimension `split` over the ranks, and makes dimension `joined` whole."""
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        parts = x.unflatten(split, (self.cp.size(), -1)).movedim(split, 0).contiguous()
        parts = all_to_all_single_autograd(parts, None, None, self.cp.get_group())
        return parts.movedim(0, joined).flatten(joined, joined + 1)


_CORES = {"ring": _RingCore, "allgather_kv": _GatheringCore, "ulysses": _UlyssesCore}
"""By parallelism.context_parallel_method."""
