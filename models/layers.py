"""Layers that the model families share, in plain single-device PyTorch.

Shapes are named by letters: B batch, S sequence, D model width, H heads, G key/value heads, K head size,
F feed-forward width, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import AttentionCore, Visible
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
    turns = scaling.original_max_position / (2 * math.pi / frequencies)
    smooth = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return frequencies * (smooth + (1 - smooth) / scaling.factor)


def rotary_cos_sin(positions_BS: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, (B, S, 1, K/2) float32: broadcast over heads."""
    angles = positions_BS[..., None, None].float() * frequencies
    return angles.cos(), angles.sin()


def apply_rotary(x_BSHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head's first half against its second, in float32 (the order that Hugging Face weights have)."""
    first, second = x_BSHK.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x_BSHK)


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

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, visible: Visible) -> Tensor:
        q, k, v = (projection(x_BSD).unflatten(-1, (-1, self.head_dim)) for projection in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        out_BHSK = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), visible)
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
    """Projection to the vocabulary; with labels, the loss."""

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.cross_entropy: CrossEntropy = cross_entropy
        """The loss of a chunk of logits; tensor parallel replaces it."""

    def forward(self, x_BSD: Tensor, labels_BS: Tensor | None = None) -> Tensor:
        """Logits (B, S, V), or the float32 sum of cross-entropies over labels that are not -100."""
        if labels_BS is None:
            return super().forward(x_BSD)
        return linear_cross_entropy(x_BSD, self.weight, labels_BS, self.cross_entropy)
