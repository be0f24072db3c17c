"""Ring attention (arXiv:2310.01889): own queries, and the keys and values of one rank after another.

Each step of the ring is attention over a part of the keys. It also gives the log-sum-exp of its logits, by which its
result is merged with those of the other steps. Shapes are named as in models/layers.py; T is the number of keys.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from models import flex
from models.visible import Visible

aten = torch.ops.aten


class Step(NamedTuple):
    """What this rank computes with the keys and values of one rank."""

    queries: slice
    keys: slice
    visible: Visible
    """Which of these keys each of these queries sees. Prepared for documents alone."""


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
            visible = replace(visible, made=_wanted(visible))
        steps.append(Step(queries, keys, visible))
    return steps


class Exchange(NamedTuple):
    """How keys and values go round, and their gradients come home."""

    group: ProcessGroup
    gathers: bool
    """In one message of all ranks, or from neighbour to neighbour."""

    def passed_on(self, own: Tensor) -> Iterator[Tensor]:
        """Of this rank, of the rank before it, and so on. The next ones are under way meanwhile."""
        from torch.distributed import _functional_collectives as collectives

        rank, ranks = self.group.rank(), self.group.size()
        if self.gathers:
            gathered = collectives.all_gather_single(own[None], 0, self.group)
            yield own
            for number in range(1, ranks):
                yield _arrived(gathered)[(rank - number) % ranks]
            return
        for number in range(ranks):
            following = self._to_the_next(own) if number < ranks - 1 else own
            yield own
            own = _arrived(following)

    def brought_home(self, parts: Iterable[Tensor]) -> Tensor:
        """The sum over ranks of what belongs to this rank; parts belong to the ranks in the order of passed_on."""
        from torch.distributed import _functional_collectives as collectives

        rank, ranks = self.group.rank(), self.group.size()
        total: Tensor | None = None
        if self.gathers:
            for number, part in enumerate(parts):
                total = part.new_empty((ranks, *part.shape)) if total is None else total
                total[(rank - number) % ranks] = part
            assert total is not None
            return _arrived(collectives.reduce_scatter_single(total, "sum", 0, self.group))[0]
        for part in parts:
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


class Ring(torch.autograd.Function):
    """(q (B, H, S, K), k (B, G, S, K), v (B, G, S, K), steps, exchange) -> (B, H, S, K), of this rank's tokens.

    Kept for backward are own q, k, v and results alone: keys and values go round a second time.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, steps: list[Step | None], exchange: Exchange) -> Tensor:
        merged = torch.zeros(q.shape, device=q.device)
        total = torch.full(q.shape[:3], -math.inf, device=q.device)
        attend = _kernel(q, steps).forward
        for step, (keys, values) in zip(steps, exchange.passed_on(torch.stack((k, v))), strict=True):
            if step is None:
                continue
            rows, seen = step.queries, step.keys
            out, logsumexp = attend(q[:, :, rows], keys[:, :, seen], values[:, :, seen], step.visible)
            together = torch.logaddexp(total[:, :, rows], logsumexp)
            share = (logsumexp - together).exp()[..., None]
            merged[:, :, rows] += share * (out - merged[:, :, rows])
            total[:, :, rows] = together
        out = merged.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.steps, ctx.exchange = steps, exchange
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, total = ctx.saved_tensors
        of_q = torch.zeros(q.shape, device=q.device)
        differentiate = _kernel(q, ctx.steps).backward

        def parts() -> Iterator[Tensor]:
            """The gradients of keys and values, in float32, as they go round."""
            for step, (keys, values) in zip(ctx.steps, ctx.exchange.passed_on(torch.stack((k, v))), strict=True):
                of_keys_and_values = torch.zeros((2, *k.shape), device=k.device)
                if step is not None:
                    rows, seen = step.queries, step.keys
                    own_gradient, own_q, own_out, own_total = (of[:, :, rows] for of in (gradient, q, out, total))
                    part = own_gradient, own_q, own_out, own_total.contiguous(), keys[:, :, seen], values[:, :, seen]
                    found = differentiate(*part, step.visible)
                    of_q[:, :, rows] += found[0]
                    of_keys_and_values[0, :, :, seen] = found[1]
                    of_keys_and_values[1, :, :, seen] = found[2]
                yield of_keys_and_values

        of_k, of_v = ctx.exchange.brought_home(parts())
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None, None


class _Kernel(NamedTuple):
    forward: Callable[[Tensor, Tensor, Tensor, Visible], tuple[Tensor, Tensor]]
    """(q, k, v, visible) -> result (B, H, S, K) and log-sum-exp (B, H, S), which is -inf where a query sees no key."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Visible], tuple[Tensor, ...]]
    """(gradient, q, result, log-sum-exp, k, v, visible) -> gradients of q, k, v; the middle two are of all steps."""


def _kernel(q: Tensor, steps: list[Step | None]) -> _Kernel:
    """The CPU's fused kernel; on a GPU torch's flash attention, which has no mask and no float32, or FlexAttention."""
    if q.device.type == "cpu":
        return _Kernel(_forward_on_cpu, _backward_on_cpu)
    masked = any(step is not None and step.visible.made is not None for step in steps)
    if masked or q.dtype == torch.float32 or q.shape[3] % 8:
        return _Kernel(_flex_forward, _flex_backward)
    return _Kernel(_flash_forward, _flash_backward)


def _wanted(visible: Visible) -> Any:
    """Blocks; on a CPU what is added to the logits, and which queries see no key."""
    if visible.device.type != "cpu":
        return flex.blocks(visible)
    seen = visible.dense()
    return torch.zeros(seen.shape).masked_fill_(~seen, -math.inf), ~seen.any(dim=-1)


def _forward_on_cpu(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> tuple[Tensor, Tensor]:
    added, blind = visible.made or (None, None)
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, visible.is_causal, attn_mask=added)
    return out, logsumexp if blind is None else logsumexp.masked_fill(blind, -math.inf)  # the kernel says 0


def _backward_on_cpu(
    gradient: Tensor, q: Tensor, out: Tensor, total: Tensor, k: Tensor, v: Tensor, visible: Visible
) -> tuple[Tensor, ...]:
    added, _ = visible.made or (None, None)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, k, v, out, total, 0.0, visible.is_causal, attn_mask=added
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> tuple[Tensor, Tensor]:
    out, logsumexp, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, visible.is_causal)
    return out, logsumexp


def _flash_backward(
    gradient: Tensor, q: Tensor, out: Tensor, total: Tensor, k: Tensor, v: Tensor, visible: Visible
) -> tuple[Tensor, ...]:
    lengths = None, None, q.shape[2], k.shape[2]
    dropout = torch.zeros((), dtype=torch.int64, device=q.device)  # its seed and offset: there is none
    return aten._scaled_dot_product_flash_attention_backward(
        gradient, q, k, v, out, total, *lengths, 0.0, visible.is_causal, dropout, dropout
    )


def _flex_forward(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> tuple[Tensor, Tensor]:
    return flex.attend_with_logsumexp(q, k, v, visible.made or flex.blocks(visible))


def _flex_backward(
    gradient: Tensor, q: Tensor, out: Tensor, total: Tensor, k: Tensor, v: Tensor, visible: Visible
) -> tuple[Tensor, ...]:
    """By autograd through the step, which is computed again, and through its merging with the other steps."""
    with torch.enable_grad():
        inputs = q, k, v = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        own_out, logsumexp = _flex_forward(q, k, v, visible)
    share = (logsumexp.detach() - total).exp()[..., None]
    of_logsumexp = (share * gradient * (own_out.detach() - out)).sum(dim=-1)
    return torch.autograd.grad((own_out, logsumexp), inputs, ((share * gradient).to(q.dtype), of_logsumexp))
