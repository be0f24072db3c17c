"""Rotary positions (arXiv:2104.09864), and how they are stretched to longer contexts.

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
    """How rotary frequencies are stretched. The names are those of Hugging Face's config.json."""

    rope_type: RopeType = "llama3"
    """llama3: Llama 3.1's (arXiv:2407.21783, section 3.4); linear: all by one factor (arXiv:2306.15595); yarn:
    arXiv:2309.00071."""
    factor: float = 8.0
    """Of the longest wavelengths; linear: of all."""
    original_max_position_embeddings: int = 8192
    """Length that the model was trained for before it was stretched; linear does not look at it."""
    low_freq_factor: float = 1.0
    """llama3: at most so many turns in the original length, and a frequency is divided by the whole factor."""
    high_freq_factor: float = 4.0
    """llama3: at least so many turns, and a frequency stays."""
    beta_slow: float = 1.0
    """The same for yarn."""
    beta_fast: float = 32.0
    """The same for yarn."""
    truncate: bool = True
    """yarn: the first and the last frequency that are divided in part are rounded to whole numbers."""
    mscale: float = 0.0
    """yarn: with mscale_all_dim, in place of 1 in attention_factor."""
    mscale_all_dim: float = 0.0
    """yarn: DeepSeek's factor of logits; 0 for none."""

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines, so that logits keep their spread over more tokens."""
        if self.rope_type != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return self.spread(self.mscale) / self.spread(self.mscale_all_dim)
        return self.spread(1.0)

    def spread(self, scale: float) -> float:
        """1 + scale ln(factor) / 10 (arXiv:2309.00071, section 3.4)."""
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Angles per position, (K/2,) float32."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling.rope_type == "llama3":
        turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:
        first, last = (_place(turns, head_dim, theta, scaling) for turns in (scaling.beta_fast, scaling.beta_slow))
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        places = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
        kept = 1 - (places - first) / (last - first or 0.001)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _place(turns: float, head_dim: int, theta: float, scaling: RopeScaling) -> float:
    """The place of the frequency that makes so many turns in the original length."""
    wavelength = scaling.original_max_position_embeddings / turns
    return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))


def rotary_cos_sin(positions_BS: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles times a factor, (B, S, 1, K/2) float32: broadcast over heads."""
    angles = positions_BS[..., None, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def apply_rotary(x_BSHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head's first half against its second, in float32 (the order that Hugging Face weights have)."""
    first, second = x_BSHK.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x_BSHK)
