"""Kernels of attention, the part without parameters. visible.py defines which keys a query sees.

Shapes are named as in layers.py; T is the number of keys.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import flex, steps
from models.visible import Visible


class Kernel(NamedTuple):
    """A way to compute attention."""

    attend: Callable[[Tensor, Tensor, Tensor, Visible], Tensor]
    """(q (B, H, S, K), k (B, G, T, K), v (B, G, T, K), visible) -> (B, H, S, K); H is a multiple of G."""
    wants: Callable[[Visible], Any] = lambda visible: None
    """Prepares a mask, or a block mask, once per forward; `attend` finds the result in visible.made."""

    def prepare(self, visible: Visible) -> Visible:
        return replace(visible, made=steps.one_step(visible) if visible.sinks else self.wants(visible))


def _dense_unless_causal(visible: Visible) -> Tensor | None:
    return None if visible.is_causal else visible.dense()


class _ByBlocks(torch.autograd.Function):
    """Attention by matrix products and a softmax, over one block of _QUERIES queries at a time.

    A block uses only the keys up to its last query, so half of the products and of the softmax is not computed. Query
    heads that share a key head are stacked, so that keys and values need no copies. Probabilities are saved for
    backward.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        (heads, queries, size), (groups, keys) = q.shape[1:], k.shape[1:3]
        q = (q * size**-0.5).reshape(-1, heads // groups, queries, size)
        k, v = k.reshape(-1, keys, size), v.reshape(-1, keys, size)
        out, saved = [], []
        for start in range(0, queries, _QUERIES):
            rows = slice(start, start + _QUERIES)
            block = q[:, :, rows].flatten(1, 2)
            count = min(start + _QUERIES, queries)
            scores = block @ k[:, : keys - queries + count].transpose(1, 2)
            grouped = scores.view(-1, groups, heads // groups, count - start, scores.shape[2])
            if mask is None:
                future = torch.full((count - start,) * 2, -math.inf, dtype=q.dtype, device=q.device).triu_(1)
                grouped[..., start:] += future
            else:
                grouped.masked_fill_(~mask[:, :, None, rows, : scores.shape[2]], -math.inf)
            weights = scores.softmax(dim=-1)
            out.append((weights @ v[:, : scores.shape[2]]).view_as(q[:, :, rows]))
            saved += [block, weights]
        ctx.save_for_backward(k, v, *saved)
        return torch.cat(out, dim=2).view(-1, heads, queries, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        k, v, *saved = ctx.saved_tensors
        batch, heads, queries, size = gradient.shape
        gradient = gradient.reshape(len(k), -1, queries, size)
        grads_q, grads_k, grads_v = [], [], []
        for number, (block, weights) in enumerate(zip(saved[::2], saved[1::2])):
            rows, seen = slice(number * _QUERIES, (number + 1) * _QUERIES), slice(weights.shape[2])
            grad_out = gradient[:, :, rows].flatten(1, 2)
            grad_weights = grad_out @ v[:, seen].transpose(1, 2)
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            grads_q.append((grad_scores @ k[:, seen]).view_as(gradient[:, :, rows]))
            grads_k.append(grad_scores.transpose(1, 2) @ block)
            grads_v.append(weights.transpose(1, 2) @ grad_out)
        grad_q = torch.cat(grads_q, dim=2).view(batch, heads, queries, size) * size**-0.5
        grad_k, grad_v = (_sum_of_first_keys(parts).view(batch, -1, k.shape[1], size) for parts in (grads_k, grads_v))
        return grad_q, grad_k, grad_v, None


def _sum_of_first_keys(parts: list[Tensor]) -> Tensor:
    """Sum tensors (N, T, K), each for the first T keys, sorted by T; the result is (N, largest T, K).

    Sums are computed in float32 and rounded to the dtype of the tensors. In compiled code, one cat is faster than sums
    into slices.
    """
    ends, sums = [part.shape[1] for part in parts], []
    for number, (start, end) in enumerate(zip([0, *ends], ends)):
        total = parts[-1][:, start:end].float()
        for part in parts[number:-1]:
            total = total + part[:, start:end]
        sums.append(total)
    return torch.cat(sums, dim=1).to(parts[0].dtype)


_QUERIES = 64
"""Queries per block of _ByBlocks."""


def _plain(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
    """Matrix products and a softmax."""
    return _ByBlocks.apply(q, k, v, visible.made)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
    """torch's fused kernels."""
    mask, grouped = visible.made, q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


def _auto(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
    """The fastest kernel. With a mask, a GPU uses FlexAttention, because torch's fused kernels are slow with a mask."""
    if q.device.type != "cpu" and visible.made is not None:
        return flex.attend(q, k, v, visible)
    short = q.device.type == "cpu" and k.shape[2] <= _PLAIN_ATTENTION_UP_TO.get(q.dtype, 0)
    return (_plain if short else _sdpa)(q, k, v, visible)


def _mask_of_the_device(visible: Visible) -> Any:
    return (_dense_unless_causal if visible.device.type == "cpu" else flex.blocks_unless_causal)(visible)


# Up to this many keys, a CPU uses _plain, which is faster there than the fused kernel (tests/benchmarks/attention.py).
# _plain uses more memory, because it saves half of the probabilities for backward.
_PLAIN_ATTENTION_UP_TO = {torch.float32: 256, torch.bfloat16: 512}


KERNELS: dict[str, Kernel] = {
    "auto": Kernel(_auto, _mask_of_the_device),
    "plain": Kernel(_plain, _dense_unless_causal),
    "sdpa": Kernel(_sdpa, _dense_unless_causal),
    "flex": Kernel(flex.attend, flex.blocks),
}
"""Value of model.attention_kernel -> kernel."""


class Visibility(nn.Module):
    """Builds the Visible of a forward. Has no parameters; context parallel replaces this module."""

    kernel = KERNELS["auto"]
    sinks = False
    """Each head has a sink."""
    padding = 0
    """Number of padding tokens at the end of a training sequence."""
    padded_rows = False
    """Each row has padding of its own: the tokens at position -1."""

    def forward(self, positions_BS: Tensor, document_ids_BS: Tensor | None, window: int | None = None) -> Visible:
        """The Visible, prepared by the kernel, for layers with this window (None: no window)."""
        length = positions_BS.shape[1]
        return self.kernel.prepare(self.whole(length, positions_BS.device, document_ids_BS, window))

    def whole(self, length: int, device: torch.device, documents_BS: Tensor | None, window: int | None) -> Visible:
        """The Visible of whole sequences, before the kernel prepares it."""
        return Visible(length, length, device, documents_BS, window, padding=self.padding, sinks=self.sinks)


class AttentionCore(nn.Module):
    """Attention of (q, k, v), shaped as in Kernel. Has no parameters; layouts and generation replace this module."""

    kernel = KERNELS["auto"]

    def __init__(self) -> None:
        super().__init__()
        self.largest_logit: Tensor | None = None
        """If set, a float32 scalar that each forward raises to the largest visible logit."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, sinks_H: Tensor | None = None) -> Tensor:
        self.observe(q, k, visible)
        if sinks_H is not None:
            return steps.attend_with_sinks(q, k, v, visible, sinks_H)
        return self.kernel.attend(q, k, v, visible)

    def observe(self, q: Tensor, k: Tensor, visible: Visible) -> None:
        """Raise largest_logit, if it is set, to the largest logit of the queries that are not padding."""
        count = visible.queries - visible.padding
        if self.largest_logit is not None and count > 0:
            q, part = q.detach()[:, :, :count], visible.part(0, count)
            k = k.detach()[:, :, : part.keys]
            raise_to_largest_logit(self.largest_logit, q, k, part.documents_BT, part.window)


def choose_kernel(model: nn.Module, name: str) -> None:
    """Make all attention of the model use one of KERNELS."""
    for module in model.modules():
        if isinstance(module, (AttentionCore, Visibility)):
            module.kernel = KERNELS[name]


@torch.library.custom_op("meshwright::raise_to_largest_logit", mutates_args=("largest",))
def raise_to_largest_logit(
    largest: Tensor, q: Tensor, k: Tensor, documents_BT: Tensor | None, window: int | None
) -> None:
    """Raise the scalar `largest` to the largest visible logit, q k / sqrt(K), of q (B, H, S, K) and k (B, G, T, K).

    documents_BT and window are those of Visible. A custom operation, so that compile does not unroll the loop.
    """
    (heads, queries), (groups, keys) = q.shape[1:3], k.shape[1:3]
    visible = Visible(queries, keys, k.device, documents_BT, window)
    rows = max(1, _LOGITS_AT_A_TIME[q.device.type] // (q.shape[0] * heads * keys))
    for start in range(0, queries, rows):
        part = visible.part(start, min(start + rows, queries))
        grouped = q[:, :, start : start + rows].unflatten(1, (groups, -1)).flatten(2, 3)
        logits = grouped @ k[:, :, : part.keys].transpose(2, 3)
        logits = logits.unflatten(2, (heads // groups, -1)).flatten(1, 2)
        largest_of_part = logits.masked_fill_(~part.dense(), -math.inf).amax().float() * q.shape[3] ** -0.5
        largest.copy_(torch.maximum(largest, largest_of_part))


_LOGITS_AT_A_TIME = {"cpu": 2**20, "cuda": 2**26}
"""Device type -> logits per product. A CPU's fill about one cache. A GPU's, 128 MiB in bfloat16, keep the GPU busy."""
