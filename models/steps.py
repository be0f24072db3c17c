"""Attention in steps, each over a part of the keys: a step also gives the log-sum-exp of its logits.

By these the results of all steps are merged in float32. Shapes are named as in models/layers.py.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from models import flex
from models.visible import Visible

aten = torch.ops.aten


class Step(NamedTuple):
    """What is computed of one part of the keys and values."""

    queries: slice
    keys: slice
    visible: Visible
    """Which of these keys each of these queries sees."""


def step(queries: slice, keys: slice, visible: Visible) -> Step:
    """Prepares a mask, if the queries see more than nothing and less than a causal mask or all of the keys."""
    whole = visible.documents_BT is None and visible.window is None and visible.before >= visible.keys
    plain = whole or visible.is_causal
    return Step(queries, keys, replace(visible, made=None if plain else _wanted(visible)))


class Source(Protocol):
    """Where the keys and values of the steps come from, and where their gradients go."""

    def passed_on(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Own keys and values (B, G, S, K) first, then those of each further step."""

    def brought_home(self, gradients: Iterable[Tensor]) -> Tensor:
        """The whole gradient (2, B, G, S, K) of own keys and values, of what each step adds to those that it had."""


class Own(NamedTuple):
    """A Source of own keys and values alone."""

    def passed_on(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        yield k, v

    def brought_home(self, gradients: Iterable[Tensor]) -> Tensor:
        (gradient,) = gradients
        return gradient


def attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, visible: Visible, sinks_H: Tensor) -> Tensor:
    """Attention in one step, whose softmax has the sink of each head beside the keys; visible.made is that step."""
    return AttentionInSteps.apply(q, k, v, sinks_H, [[visible.made]], Own())


def one_step(visible: Visible) -> Step:
    """Over all queries and keys."""
    return step(slice(0, visible.queries), slice(0, visible.keys), visible)


class AttentionInSteps(torch.autograd.Function):
    """(q (B, H, S, K), k (B, G, S, K), v (B, G, S, K), sinks (H,), steps, source) -> (B, H, S, K).

    Own q, k, v are given. steps: those of each part that the source passes on; a query's first step shows it a key.
    A sink is a logit without a key, whose value is 0; None for no sinks.
    Kept for backward are own q, k, v and results alone: the source gives all other keys and values a second time.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, steps: list[list[Step]], source: Source
    ) -> Tensor:
        merged = torch.zeros(q.shape, device=q.device)
        total = torch.full(q.shape[:3], -math.inf, device=q.device)
        attend = _kernel(q, steps).forward
        for steps_of_part, (keys, values) in zip(steps, source.passed_on(k, v), strict=True):
            for rows, seen, visible in steps_of_part:
                out, logsumexp = attend(q[:, :, rows], keys[:, :, seen], values[:, :, seen], visible)
                together = torch.logaddexp(total[:, :, rows], logsumexp)
                share = (logsumexp - together).exp()[..., None]
                merged[:, :, rows] += share * (out - merged[:, :, rows])
                total[:, :, rows] = together
        if sinks_H is not None:
            together = torch.logaddexp(total, sinks_H.float()[:, None])
            merged *= (total - together).exp()[..., None]
            total = together
        out = merged.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks_H, out, total)
        ctx.steps, ctx.source = steps, source
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_H, out, total = ctx.saved_tensors
        of_q = torch.zeros(q.shape, device=q.device)
        differentiate = _kernel(q, ctx.steps).backward

        def parts() -> Iterator[Tensor]:
            """The gradients of each step's keys and values, in float32."""
            for steps_of_part, (keys, values) in zip(ctx.steps, ctx.source.passed_on(k, v), strict=True):
                of_keys_and_values = torch.zeros((2, *keys.shape), device=k.device)
                for rows, seen, visible in steps_of_part:
                    own_gradient, own_q, own_out, own_total = (of[:, :, rows] for of in (gradient, q, out, total))
                    # Contiguous: torch's kernels on a GPU do not look at the strides of the log-sum-exp.
                    part = own_gradient, own_q, own_out, own_total.contiguous(), keys[:, :, seen], values[:, :, seen]
                    found = differentiate(*part, visible)
                    of_q[:, :, rows] += found[0]
                    of_keys_and_values[0, :, :, seen] += found[1]
                    of_keys_and_values[1, :, :, seen] += found[2]
                yield of_keys_and_values

        of_k, of_v = ctx.source.brought_home(parts())
        of_sinks = None
        if sinks_H is not None:
            shares = (sinks_H.float()[:, None] - total).exp()
            of_sinks = -(shares * (gradient.float() * out).sum(dim=-1)).sum(dim=(0, 2)).to(sinks_H.dtype)
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), of_sinks, None, None


class _Kernel(NamedTuple):
    forward: Callable[[Tensor, Tensor, Tensor, Visible], tuple[Tensor, Tensor]]
    """(q, k, v, visible) -> result (B, H, S, K) and log-sum-exp (B, H, S), which is -inf where a query sees no key."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Visible], tuple[Tensor, ...]]
    """(gradient, q, result, log-sum-exp, k, v, visible) -> gradients of q, k, v; the middle two are of all steps."""


def _kernel(q: Tensor, steps: list[list[Step]]) -> _Kernel:
    """The CPU's fused kernel; on a GPU torch's flash attention, which has no mask and no float32, or FlexAttention."""
    if q.device.type == "cpu":
        return _Kernel(_forward_on_cpu, _backward_on_cpu)
    masked = any(each.visible.made is not None for part in steps for each in part)
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
