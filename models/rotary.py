"""Rotary position embeddings (RoPE, arXiv:2104.09864), and their scaling to longer contexts.

Shapes are named as in models/layers.py.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RopeType = Literal["llama3", "linear", "yarn"]


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of RoPE frequencies. Fields have the names of Hugging Face's config.json."""

    rope_type: RopeType = "llama3"
    """llama3: as Llama 3.1 (arXiv:2407.21783, section 3.4); linear: one factor for all frequencies (arXiv:2306.15595);
    yarn: arXiv:2309.00071."""
    factor: float = 8.0
    """Factor of the longest wavelengths; with linear, of all wavelengths."""
    original_max_position_embeddings: int = 8192
    """Sequence length that the model was trained for before scaling; linear ignores it."""
    low_freq_factor: float = 1.0
    """llama3: frequencies of at most this many turns in the original length are divided by the whole factor."""
    high_freq_factor: float = 4.0
    """llama3: frequencies of at least this many turns in the original length stay unchanged."""
    beta_slow: float = 1.0
    """yarn: as low_freq_factor."""
    beta_fast: float = 32.0
    """yarn: as high_freq_factor."""
    truncate: bool = True
    """yarn: the range of indices of partly divided frequencies is widened to whole numbers."""
    mscale: float = 0.0
    """yarn: if mscale_all_dim is set too, attention_factor is spread(mscale) / spread(mscale_all_dim)."""
    mscale_all_dim: float = 0.0
    """yarn: DeepSeek multiplies logits by spread(mscale_all_dim) ** 2; 0 for no factor."""

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines. It scales the logits, so that a softmax over more tokens stays as sharp."""
        if self.rope_type != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return self.spread(self.mscale) / self.spread(self.mscale_all_dim)
        return self.spread(1.0)

    def spread(self, scale: float) -> float:
        """1 + scale ln(factor) / 10 (arXiv:2309.00071, section 3.4)."""
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Angle per position of each frequency, (K/2,) float32."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling.rope_type == "llama3":
        turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
        unscaled = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:
        first, last = (_place(turns, head_dim, theta, scaling) for turns in (scaling.beta_fast, scaling.beta_slow))
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        indices = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
        unscaled = 1 - (indices - first) / (last - first or 0.001)
    unscaled = unscaled.clamp(0, 1)
    return frequencies * (unscaled + (1 - unscaled) / scaling.factor)


def _place(turns: float, head_dim: int, theta: float, scaling: RopeScaling) -> float:
    """The (fractional) index of the frequency that makes this many turns in the original length."""
    wavelength = scaling.original_max_position_embeddings / turns
    return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))


def rotary_cos_sin(positions_BS: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position's angles, times a factor: (B, S, 1, K/2) float32, to broadcast over heads."""
    angles = positions_BS[..., None, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def apply_rotary(x_BSHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head's first half against its second half, in float32, as Hugging Face's weights are ordered."""
    first, second = x_BSHK.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x_BSHK)
