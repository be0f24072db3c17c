"""What the model families share. Plain single-device PyTorch.

Shapes are named by letters: B batch, S sequence, D model width, H heads, G key/value heads, K head size,
F feed-forward width, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.loss import CrossEntropy, cross_entropy, linear_cross_entropy


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of rotary frequencies to longer contexts (arXiv:2407.21783, section 3.4)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Angles per position, (K/2,) float32 (arXiv:2104.09864). Long wavelengths are divided by the scaling factor."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return frequencies * (smooth + (1 - smooth) / scaling.factor)


def rotary_cos_sin(positions_BS: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, (B, S, 1, K/2) float32: broadcast over heads."""
    angles = positions_BS[..., None, None].float() * frequencies
    return angles.cos(), angles.sin()


def apply_rotary(x_BSHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head's first half against its second, in float32 (the order that Hugging Face weights have)."""
    first, second = x_BSHK.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x_BSHK)


class AttentionMask(nn.Module):
    """Which keys a query sees, worked out once a forward. Without parameters: context parallel replaces it."""

    def forward(self, positions_BS: Tensor, document_ids_BS: Tensor | None) -> Tensor | None:
        """None for all that came before; with documents (B, 1, S, S) bool: what came before in the same one."""
        if document_ids_BS is None:
            return None
        index = torch.arange(positions_BS.shape[1], device=positions_BS.device)
        return visible(index, index, document_ids_BS, document_ids_BS)


def visible(queries: Tensor, keys: Tensor, query_documents_BS: Tensor, key_documents_BS: Tensor) -> Tensor:
    """(B, 1, queries, keys) bool: keys not after the query in the sequence, and in its document."""
    same_document = query_documents_BS[:, :, None] == key_documents_BS[:, None, :]
    return (same_document & (queries[:, None] >= keys))[:, None]


class AttentionCore(nn.Module):
    """Attention of (q, k, v) without parameters: what context parallel replaces.

    Takes q (B, H, S, K) and k, v (B, G, T, K), H a multiple of G; returns (B, H, S, K). Without a mask it is causal and
    S is T; a mask is bool and broadcasts to (B, 1, S, T), true where a query sees a key.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest_logit: Tensor | None = None
        """A float32 scalar that each forward raises to the largest logit that it sees, where there is one."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.largest_logit is not None:
            raise_to_largest_logit(self.largest_logit, q.detach(), k.detach(), mask, None)
        if q.device.type == "cpu" and k.shape[2] <= _PLAIN_ATTENTION_UP_TO.get(q.dtype, 0):
            return _plain_attention(q, k, v, mask)
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


# On CPU two products and a softmax beat the fused kernel at short sequences (tests/benchmarks/attention.py).
_PLAIN_ATTENTION_UP_TO = {torch.float32: 256, torch.bfloat16: 512}


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    batch, heads, queries, size = q.shape
    groups, keys = k.shape[1:3]
    if mask is None:
        hidden = torch.full((1, 1, queries, keys), -math.inf, dtype=q.dtype, device=q.device).triu_(1)
    else:
        hidden = torch.where(mask, 0.0, -math.inf).to(q.dtype)
    # Queries that share a key head are stacked, so that keys and values are never repeated.
    q = q.reshape(batch * groups, -1, size)
    k, v = k.reshape(batch * groups, keys, size), v.reshape(batch * groups, keys, size)
    if hidden.shape[0] == 1:
        hidden = hidden[0].repeat(1, heads // groups, 1)
    else:
        hidden = hidden.repeat(1, groups, heads // groups, 1).flatten(0, 1)
    scores = torch.baddbmm(hidden, q, k.transpose(1, 2), alpha=size**-0.5)
    return (scores.softmax(dim=-1) @ v).view(batch, heads, queries, size)


@torch.library.custom_op("meshwright::raise_to_largest_logit", mutates_args=("largest",))
def raise_to_largest_logit(largest: Tensor, q: Tensor, k: Tensor, mask: Tensor | None, places: Tensor | None) -> None:
    """Raise a scalar to the largest q k / sqrt(K) that is visible, of q (B, H, S, K) and k (B, G, T, K).

    Visible is what the mask says, as AttentionCore takes it; without one, keys up to the query's place in the sequence:
    places (S,), which are 0, 1, ... if None. An operation of its own, so that compile leaves the loop a loop.
    """
    (heads, queries), (groups, keys) = q.shape[1:3], k.shape[1:3]
    rows = max(1, _LOGITS_AT_A_TIME[q.device.type] // (q.shape[0] * heads * keys))
    index = torch.arange(keys, device=q.device)
    for start in range(0, queries, rows):
        own = slice(start, min(start + rows, queries))
        # Without places no query sees a key behind the last of them.
        seen = slice(own.stop if mask is None and places is None else keys)
        grouped = q[:, :, own].unflatten(1, (groups, -1)).flatten(2, 3)
        logits = (grouped @ k[:, :, seen].transpose(2, 3)).unflatten(2, (heads // groups, -1)).flatten(1, 2)
        if mask is None:
            visible_here = (index[own] if places is None else places[own])[:, None] >= index[seen]
        else:
            visible_here = mask[:, :, own]
        found = logits.masked_fill_(~visible_here, -math.inf).amax().float() * q.shape[3] ** -0.5
        largest.copy_(torch.maximum(largest, found))


_LOGITS_AT_A_TIME = {"cpu": 2**20, "cuda": 2**26}
"""What a cache nearly holds; 128 MiB in bfloat16, which fill a GPU."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions (arXiv:2305.13245).

    With qk_norm_eps, queries and keys are normed before they are rotated, each head by itself (arXiv:2302.05442).
    """

    def __init__(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, qk_norm_eps: float | None = None
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm, self.k_norm = (nn.RMSNorm(head_dim, eps=qk_norm_eps) for _ in range(2))
        self.core = AttentionCore()

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (projection(x_BSD).unflatten(-1, (-1, self.head_dim)) for projection in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        out_BHSK = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.wo(out_BHSK.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BSD)) * self.w3(x_BSD))


class Head(nn.Linear):
    """Projection to the vocabulary; with labels, the loss in its place."""

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.cross_entropy: CrossEntropy = cross_entropy
        """Of a chunk of logits: what tensor parallel replaces."""

    def forward(self, x_BSD: Tensor, labels_BS: Tensor | None = None) -> Tensor:
        """Logits (B, S, V), or the float32 sum of cross-entropies over labels that are not -100."""
        if labels_BS is None:
            return super().forward(x_BSD)
        return linear_cross_entropy(x_BSD, self.weight, labels_BS, self.cross_entropy)
