"""The core of attention, which has no parameters: its kernels. What a query sees stands in visible.py.

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
    """Prepares a mask, lengths or blocks once a forward; the kernel finds the result in visible.made."""

    def prepare(self, visible: Visible) -> Visible:
        return replace(visible, made=steps.one_step(visible) if visible.sinks else self.wants(visible))


def _dense_unless_causal(visible: Visible) -> Tensor | None:
    return None if visible.is_causal else visible.dense()


class _ByBlocks(torch.autograd.Function):
    """Matrix products and a softmax for a block of queries at a time, with the keys up to the last of them alone.

    Half of the products and of the softmax are never computed. Query heads that share a key head are stacked, so that
    keys and values need no copies; probabilities are kept for backward.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        (heads, queries, size), (groups, keys) = q.shape[1:], k.shape[1:3]
        q = (q * size**-0.5).reshape(-1, heads // groups, queries, size)
        k, v = k.reshape(-1, keys, size), v.reshape(-1, keys, size)
        out, kept = [], []
        for start in range(0, queries, _QUERIES):
            rows = slice(start, start + _QUERIES)
            block = q[:, :, rows].flatten(1, 2)
            count = min(start + _QUERIES, queries)
            scores = block @ k[:, : keys - queries + count].transpose(1, 2)
            shaped = scores.view(-1, groups, heads // groups, count - start, scores.shape[2])
            if mask is None:
                hidden = torch.full((count - start,) * 2, -math.inf, dtype=q.dtype, device=q.device).triu_(1)
                shaped[..., start:] += hidden
            else:
                shaped.masked_fill_(~mask[:, :, None, rows, : scores.shape[2]], -math.inf)
            weights = scores.softmax(dim=-1)
            out.append((weights @ v[:, : scores.shape[2]]).view_as(q[:, :, rows]))
            kept += [block, weights]
        ctx.save_for_backward(k, v, *kept)
        return torch.cat(out, dim=2).view(-1, heads, queries, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        k, v, *kept = ctx.saved_tensors
        batch, heads, queries, size = gradient.shape
        gradient = gradient.reshape(len(k), -1, queries, size)
        of_q, of_k, of_v = [], [], []
        for number, (block, weights) in enumerate(zip(kept[::2], kept[1::2])):
            rows, seen = slice(number * _QUERIES, (number + 1) * _QUERIES), slice(weights.shape[2])
            own = gradient[:, :, rows].flatten(1, 2)
            of_scores = torch._softmax_backward_data(own @ v[:, seen].transpose(1, 2), weights, -1, weights.dtype)
            of_q.append((of_scores @ k[:, seen]).view_as(gradient[:, :, rows]))
            of_k.append(of_scores.transpose(1, 2) @ block)
            of_v.append(weights.transpose(1, 2) @ own)
        keys, values = (_sum_of_first_keys(parts).view(batch, -1, k.shape[1], size) for parts in (of_k, of_v))
        return torch.cat(of_q, dim=2).view(batch, heads, queries, size) * size**-0.5, keys, values, None


def _sum_of_first_keys(parts: list[Tensor]) -> Tensor:
    """The sum of tensors (N, T, K), each of the first T keys, T ascending; computed in float32, in their precision.

    Compiled, a cat takes less time than sums into slices.
    """
    ends, sums = [part.shape[1] for part in parts], []
    for number, (start, end) in enumerate(zip([0, *ends], ends)):
        own = parts[-1][:, start:end].float()
        for part in parts[number:-1]:
            own = own + part[:, start:end]
        sums.append(own)
    return torch.cat(sums, dim=1).to(parts[0].dtype)


_QUERIES = 64


def _plain(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
    """Matrix products and a softmax."""
    return _ByBlocks.apply(q, k, v, visible.made)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
    """torch's fused kernels."""
    mask, grouped = visible.made, q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


def _auto(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
    """The fastest kernel. On a GPU torch's fused ones are slow with a mask, and FlexAttention computes less."""
    if q.device.type != "cpu" and visible.made is not None:
        return flex.attend(q, k, v, visible)
    short = q.device.type == "cpu" and k.shape[2] <= _PLAIN_ATTENTION_UP_TO.get(q.dtype, 0)
    return (_plain if short else _sdpa)(q, k, v, visible)


def _mask_of_the_device(visible: Visible) -> Any:
    return (_dense_unless_causal if visible.device.type == "cpu" else flex.blocks_unless_causal)(visible)


# On CPU blocks are quicker than the fused kernel (tests/benchmarks/attention.py), but keep half of the probabilities.
_PLAIN_ATTENTION_UP_TO = {torch.float32: 256, torch.bfloat16: 512}


KERNELS: dict[str, Kernel] = {
    "auto": Kernel(_auto, _mask_of_the_device),
    "plain": Kernel(_plain, _dense_unless_causal),
    "sdpa": Kernel(_sdpa, _dense_unless_causal),
    "flex": Kernel(flex.attend, flex.blocks),
}
"""By the name that model.attention_kernel gives."""


class Visibility(nn.Module):
    """Makes the Visible of a forward. Has no parameters; context parallel replaces the module."""

    kernel = KERNELS["auto"]
    sinks = False
    """Each head has a sink."""
    padding = 0
    """Tokens at the end of a training sequence that are padding."""

    def forward(self, positions_BS: Tensor, document_ids_BS: Tensor | None, window: int | None = None) -> Visible:
        """The Visible of layers with this window; None for no window."""
        length = positions_BS.shape[1]
        return self.kernel.prepare(self.whole(length, positions_BS.device, document_ids_BS, window))

    def whole(self, length: int, device: torch.device, documents_BS: Tensor | None, window: int | None) -> Visible:
        """What the queries of whole sequences see, not yet prepared."""
        return Visible(length, length, device, documents_BS, window, padding=self.padding, sinks=self.sinks)


class AttentionCore(nn.Module):
    """Attention of (q, k, v), shaped as Kernel says. Has no parameters; context parallel and generation replace it."""

    kernel = KERNELS["auto"]

    def __init__(self) -> None:
        super().__init__()
        self.largest_logit: Tensor | None = None
        """A float32 scalar, if set: each forward raises it to the largest visible logit."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, sinks_H: Tensor | None = None) -> Tensor:
        self.observe(q, k, visible)
        if sinks_H is not None:
            return steps.attend_with_sinks(q, k, v, visible, sinks_H)
        return self.kernel.attend(q, k, v, visible)

    def observe(self, q: Tensor, k: Tensor, visible: Visible) -> None:
        """Raise largest_logit, if it is set, to the largest of queries that are not padding."""
        count = visible.queries - visible.padding
        if self.largest_logit is not None and count > 0:
            q, part = q.detach()[:, :, :count], visible.part(0, count)
            k = k.detach()[:, :, : part.keys]
            raise_to_largest_logit(self.largest_logit, q, k, part.documents_BT, part.window)


def choose_kernel(model: nn.Module, name: str) -> None:
    """Compute all attention of the model by one of KERNELS."""
    for module in model.modules():
        if isinstance(module, (AttentionCore, Visibility)):
            module.kernel = KERNELS[name]


@torch.library.custom_op("meshwright::raise_to_largest_logit", mutates_args=("largest",))
def raise_to_largest_logit(
    largest: Tensor, q: Tensor, k: Tensor, documents_BT: Tensor | None, window: int | None
) -> None:
    """Raise a scalar to the largest q k / sqrt(K) that is visible, of q (B, H, S, K) and k (B, G, T, K).

    documents_BT and window are those of Visible. It is a custom operation so that compile does not unroll the loop.
    """
    (heads, queries), (groups, keys) = q.shape[1:3], k.shape[1:3]
    visible = Visible(queries, keys, k.device, documents_BT, window)
    rows = max(1, _LOGITS_AT_A_TIME[q.device.type] // (q.shape[0] * heads * keys))
    for start in range(0, queries, rows):
        part = visible.part(start, min(start + rows, queries))
        grouped = q[:, :, start : start + rows].unflatten(1, (groups, -1)).flatten(2, 3)
        logits = grouped @ k[:, :, : part.keys].transpose(2, 3)
        logits = logits.unflatten(2, (heads // groups, -1)).flatten(1, 2)
        found = logits.masked_fill_(~part.dense(), -math.inf).amax().float() * q.shape[3] ** -0.5
        largest.copy_(torch.maximum(largest, found))


_LOGITS_AT_A_TIME = {"cpu": 2**20, "cuda": 2**26}
"""About a cache of a CPU; 128 MiB in bfloat16, which keep a GPU busy."""
