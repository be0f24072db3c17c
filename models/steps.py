"""Attention in steps: each step covers some of the keys, and also returns the log-sum-exp of its logits.

The log-sum-exps merge the results of all steps, in float32. Shapes are named as in models/layers.py.
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


class AttentionStep(NamedTuple):
    """Attention of a slice of the queries over a slice of one part of the keys and values."""

    queries: slice
    keys: slice
    visible: Visible
    """Which of the keys in the slice each query in the slice sees."""


def step(queries: slice, keys: slice, visible: Visible) -> AttentionStep:
    """Build a step. Its mask is prepared, unless the queries see all keys or have the plain causal mask."""
    whole = visible.documents_BT is None and visible.window is None and visible.before >= visible.keys
    plain = whole or visible.is_causal
    return AttentionStep(queries, keys, replace(visible, made=None if plain else _wanted(visible)))


class KeyValueSource(Protocol):
    """Provides the parts of keys and values that the steps use, and takes their gradients."""

    def passed_on(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the given keys and values (B, G, S, K), then those of each further part."""

    def brought_home(self, gradients: Iterable[Tensor]) -> Tensor:
        """The complete gradient (2, B, G, S, K) of the given keys and values.

        gradients: the gradient (2, ...) of each part that passed_on yields, in the same order.
        """


class Own(NamedTuple):
    """A KeyValueSource of the given keys and values only."""

    def passed_on(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        yield k, v

    def brought_home(self, gradients: Iterable[Tensor]) -> Tensor:
        (gradient,) = gradients
        return gradient


def attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, visible: Visible, sinks_H: Tensor) -> Tensor:
    """Attention in the single step visible.made. The softmax of each head includes its sink."""
    return AttentionInSteps.apply(q, k, v, sinks_H, [[visible.made]], Own())


def one_step(visible: Visible) -> AttentionStep:
    """The step over all queries and keys."""
    return step(slice(0, visible.queries), slice(0, visible.keys), visible)


class AttentionInSteps(torch.autograd.Function):
    """(q (B, H, S, K), k (B, G, S, K), v (B, G, S, K), sinks (H,), steps, source) -> (B, H, S, K).

    steps: a list of steps for each part that the source yields. Each query sees at least one key in its first step.
    sinks: one more logit per head, without a key and with 0 as its value vector; None for no sinks.
    Backward saves q, k, v, the result and its log-sum-exp. The source yields all other keys and values again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_H: Tensor | None,
        steps: list[list[AttentionStep]],
        source: KeyValueSource,
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
        grad_q = torch.zeros(q.shape, device=q.device)
        differentiate = _kernel(q, ctx.steps).backward

        def parts() -> Iterator[Tensor]:
            """Yields the float32 gradient (2, B, G, S, K) of the keys and values of each part."""
            for steps_of_part, (keys, values) in zip(ctx.steps, ctx.source.passed_on(k, v), strict=True):
                grad_part = torch.zeros((2, *keys.shape), device=k.device)
                for rows, seen, visible in steps_of_part:
                    grad_rows, q_rows, out_rows, total_rows = (each[:, :, rows] for each in (gradient, q, out, total))
                    # Contiguous, because torch's kernels on a GPU ignore the strides of the log-sum-exp.
                    inputs = grad_rows, q_rows, out_rows, total_rows.contiguous(), keys[:, :, seen], values[:, :, seen]
                    grads = differentiate(*inputs, visible)
                    grad_q[:, :, rows] += grads[0]
                    grad_part[0, :, :, seen] += grads[1]
                    grad_part[1, :, :, seen] += grads[2]
                yield grad_part

        grad_k, grad_v = ctx.source.brought_home(parts())
        grad_sinks = None
        if sinks_H is not None:
            shares = (sinks_H.float()[:, None] - total).exp()
            grad_sinks = -(shares * (gradient.float() * out).sum(dim=-1)).sum(dim=(0, 2)).to(sinks_H.dtype)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks, None, None


class _Kernel(NamedTuple):
    forward: Callable[[Tensor, Tensor, Tensor, Visible], tuple[Tensor, Tensor]]
    """(q, k, v, visible) -> result (B, H, S, K) and log-sum-exp (B, H, S), which is -inf where a query sees no key."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Visible], tuple[Tensor, ...]]
    """(gradient, q, result, log-sum-exp, k, v, visible) -> gradients of q, k, v.

    Result and log-sum-exp are those of all steps, merged.
    """


def _kernel(q: Tensor, steps: list[list[AttentionStep]]) -> _Kernel:
    """On a CPU, the fused kernel. On a GPU, flash attention, or FlexAttention for a mask, float32 or K % 8 > 0."""
    if q.device.type == "cpu":
        return _Kernel(_forward_on_cpu, _backward_on_cpu)
    masked = any(entry.visible.made is not None for part in steps for entry in part)
    if masked or q.dtype == torch.float32 or q.shape[3] % 8:
        return _Kernel(_flex_forward, _flex_backward)
    return _Kernel(_flash_forward, _flash_backward)


def _wanted(visible: Visible) -> Any:
    """The block mask. On a CPU: the mask to add to the logits, and a mask of the queries that see no key."""
    if visible.device.type != "cpu":
        return flex.blocks(visible)
    seen = visible.dense()
    return torch.zeros(seen.shape).masked_fill_(~seen, -math.inf), ~seen.any(dim=-1)


def _forward_on_cpu(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> tuple[Tensor, Tensor]:
    added, blind = visible.made or (None, None)
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, visible.is_causal, attn_mask=added)
    return out, logsumexp if blind is None else logsumexp.masked_fill(blind, -math.inf)  # the kernel returns 0


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
    dropout = torch.zeros((), dtype=torch.int64, device=q.device)  # seed and offset, which dropout 0 does not use
    return aten._scaled_dot_product_flash_attention_backward(
        gradient, q, k, v, out, total, *lengths, 0.0, visible.is_causal, dropout, dropout
    )


def _flex_forward(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> tuple[Tensor, Tensor]:
    return flex.attend_with_logsumexp(q, k, v, visible.made or flex.blocks(visible))


def _flex_backward(
    gradient: Tensor, q: Tensor, out: Tensor, total: Tensor, k: Tensor, v: Tensor, visible: Visible
) -> tuple[Tensor, ...]:
    """Recompute the step, then differentiate the step and its merging with the other steps by autograd."""
    with torch.enable_grad():
        inputs = q, k, v = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        step_out, logsumexp = _flex_forward(q, k, v, visible)
    share = (logsumexp.detach() - total).exp()[..., None]
    grad_logsumexp = (share * gradient * (step_out.detach() - out)).sum(dim=-1)
    return torch.autograd.grad((step_out, logsumexp), inputs, ((share * gradient).to(q.dtype), grad_logsumexp))
