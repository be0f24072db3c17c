"""Rotary position embeddings (RoPE, arXiv:2104.09864), and their scaling to longer contexts.

Shapes are named as in models/layers.py.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RopeType = Literal["llama3", "linear", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of RoPE frequencies. Fields have the names of Hugging Face's config.json."""

    rope_type: RopeType = "llama3"
    """llama3: as Llama 3.1 (arXiv:2407.21783, section 3.4); linear: one factor for all frequencies (arXiv:2306.15595);
    yarn: arXiv:2309.00071; longrope: a factor for each frequency (arXiv:2402.13753)."""
    factor: float = 8.0
    """Factor of the longest wavelengths; linear: of all wavelengths; longrope: sets only the amplitude."""
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
    """yarn: if mscale_all_dim is set too, the amplitude is spread(mscale) / spread(mscale_all_dim)."""
    mscale_all_dim: float = 0.0
    """yarn: DeepSeek multiplies logits by spread(mscale_all_dim) ** 2; 0 for no factor."""
    attention_factor: float | None = None
    """yarn and longrope: the amplitude; None: it follows from the other fields."""
    short_factor: tuple[float, ...] = ()
    """longrope: factor of each wavelength, if sequences have at most the original length."""
    long_factor: tuple[float, ...] = ()
    """longrope: factor of each wavelength, if sequences are longer."""

    def __post_init__(self) -> None:
        """Raises ValueError if a number is out of bounds, as one of a config.json may be."""
        for name in ("factor", "original_max_position_embeddings", "low_freq_factor", "beta_slow", "attention_factor"):
            value = getattr(self, name)
            if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
                raise ValueError(f"{name} = {value}: a number above 0 is needed")
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(f"high_freq_factor = {self.high_freq_factor}: it is above low_freq_factor")

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines. It scales the logits, so that a softmax over more tokens stays as sharp."""
        if self.rope_type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "longrope":
            longer = math.log(self.factor) / math.log(self.original_max_position_embeddings) if self.factor > 1 else 0
            return math.sqrt(1 + longer)
        if self.mscale and self.mscale_all_dim:
            return self.spread(self.mscale) / self.spread(self.mscale_all_dim)
        return self.spread(1.0)

    def spread(self, scale: float) -> float:
        """1 + scale ln(factor) / 10 (arXiv:2309.00071, section 3.4)."""
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


def rotary_frequencies(
    rotary_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device, seq_len: int = 0
) -> Tensor:
    """Angle per position of each frequency, (rotary_dim / 2,) float32. seq_len: tokens of a sequence, for longrope."""
    frequencies = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim)
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling.rope_type == "longrope":
        is_long = seq_len > scaling.original_max_position_embeddings
        factors = scaling.long_factor if is_long else scaling.short_factor
        # Filled on the device number by number, because the host would wait for a copy of the list.
        return frequencies / torch.cat([torch.full((1,), factor, device=device) for factor in factors])
    if scaling.rope_type == "llama3":
        turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
        unscaled = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:
        first, last = (_place(turns, rotary_dim, theta, scaling) for turns in (scaling.beta_fast, scaling.beta_slow))
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_dim - 1)
        indices = torch.arange(rotary_dim // 2, dtype=torch.float32, device=device)
        unscaled = 1 - (indices - first) / (last - first or 0.001)
    unscaled = unscaled.clamp(0, 1)
    return frequencies * (unscaled + (1 - unscaled) / scaling.factor)


def _place(turns: float, rotary_dim: int, theta: float, scaling: RopeScaling) -> float:
    """The (fractional) index of the frequency that makes this many turns in the original length."""
    wavelength = scaling.original_max_position_embeddings / turns
    return rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))


def rotary_cos_sin(positions_BS: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position's angles, times a factor: (B, S, 1, frequencies) float32.

    The third dimension is for heads.
    """
    angles = positions_BS[..., None, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def apply_rotary(x_BSHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head's first half against its second half, in float32, as Hugging Face's weights are ordered.

    With fewer than K/2 frequencies, the first columns of a head are rotated so, and the others stay as they are.
    """
    width = 2 * cos.shape[-1]
    first, second = x_BSHK[..., :width].float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x_BSHK)
    return rotated if width == x_BSHK.shape[-1] else torch.cat((rotated, x_BSHK[..., width:]), dim=-1)
