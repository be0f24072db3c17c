"""The configuration that all model families share."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from models.hugging_face import FIELDS, FIXED, ROPE_TYPES
from models.rotary import RopeScaling

HiddenAct = Literal["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2"]
"""Names of activations, which are Hugging Face's."""
ACTIVATIONS: dict[HiddenAct, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
"""Name -> function."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes and options of a model."""

    hf_fields: ClassVar[dict[str, str]] = FIELDS
    """Field of this class -> field of Hugging Face's config.json."""
    hf_fixed: ClassVar[dict[str, Any]] = FIXED
    """Fields of config.json whose value is the same for every model of the family."""
    positive: ClassVar[tuple[str, ...]] = (
        *("dim", "n_layers", "n_heads", "n_kv_heads", "head_size", "ffn_dim", "vocab_size", "context_length"),
        *("query_size", "logits_scaling", "window", "rope_theta", "window_rope_theta"),
    )
    """Fields that are above 0, if they are not None."""
    counts: ClassVar[tuple[str, ...]] = ("norm_eps", "full_every", "no_rope_every", "mtp_layers")
    """Fields that are not below 0."""
    hf_defaults: ClassVar[dict[str, dict[str, Any]]] = {}
    """model_type -> transformers' defaults for fields that a config.json omits: default_sizes and more."""
    hf_rope_types: ClassVar[dict[str, str]] = ROPE_TYPES
    """rope_type of config.json -> rope_type of RopeScaling."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    context_length: int
    """Sequence length that the published weights were trained for; used in config.json, and to scale RoPE."""
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    head_size: int | None = None
    """Width of each head; dim / n_heads by default."""
    rotary_fraction: float = 1.0
    """Part of a head's columns, from the first, that RoPE rotates."""
    qk_norm: bool | Literal["all_heads"] = False
    """Queries and keys are normalized before RoPE: each head by itself (True), or all heads of a token together."""
    qkv_bias: bool = False
    """The query, key and value projections have biases."""
    output_bias: bool = False
    """The output projection of attention has a bias."""
    ffn_bias: bool = False
    """The three matrices of a feed-forward have biases."""
    hidden_act: HiddenAct = "silu"
    """Activation of the feed-forward's gate."""
    norms: Literal["before", "after", "both"] = "before"
    """Place of the norms of attention and feed-forward, inside the residual connection."""
    sinks: bool = False
    """Each head has a sink: a learned logit in the softmax that has no value (arXiv:2309.17453)."""
    query_size: int | None = None
    """Logits are q k / sqrt(query_size); the head width by default."""
    attention_multiplier: float | None = None
    """Logits are q k times this number; query_size decides by default."""
    embedding_multiplier: float = 1.0
    """Factor of the embeddings."""
    residual_multiplier: float = 1.0
    """Factor of what attention and feed-forward add to the residual stream."""
    logits_scaling: float = 1.0
    """The head's logits are divided by this number."""
    window: int | None = None
    """Sliding window: the most tokens that a query sees, its own included; None for no window."""
    full_every: int = 0
    """Layers whose number, counted from 1, is a multiple of full_every have no window; 0: all layers have it."""
    window_rope_theta: float | None = None
    """rope_theta of layers with a window, which then have no RoPE scaling; None: all layers have the same RoPE."""
    no_rope_every: int = 0
    """Layers whose number, counted from 1, is a multiple of no_rope_every have no RoPE; 0: all layers have it."""
    mtp_layers: int = 0
    """Layers of multi-token prediction (models/mtp.py), which training has beside the model's own."""
    frozen: tuple[str, ...] = ()
    """Patterns, as in KINDS, of parameters that are not trained, for example ("tok_embeddings", "layers.0")."""

    def __post_init__(self) -> None:
        """Raises ValueError if a size is out of bounds, or if heads or the rotary positions do not fit."""
        for names, least in ((self.positive, "above 0"), (self.counts, "not below 0")):
            for name in names:
                value = getattr(self, name)
                if value is not None and (value < 0 or (value == 0 and names is self.positive)):
                    raise ValueError(f"{name} = {value}: a number {least} is needed")
        if self.head_size is None and self.dim % self.n_heads:
            raise ValueError(f"dim = {self.dim}, n_heads = {self.n_heads}: heads need equal widths; set head_size")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads = {self.n_heads}, n_kv_heads = {self.n_kv_heads}: groups of heads must be equal")
        scaling, width = self.rope_scaling, self.rotary_dim
        if width % 2 or not 0 < width <= self.head_dim:
            raise ValueError(
                f"rotary_fraction = {self.rotary_fraction:g}: RoPE would rotate {width} of {self.head_dim} columns of "
                "each head, and can rotate an even number; use another fraction, or heads of another width"
            )
        for name in ("short_factor", "long_factor") if scaling and scaling.rope_type == "longrope" else ():
            factors = getattr(scaling, name)
            if len(factors) != width // 2 or not all(0 < factor < math.inf for factor in factors):
                raise ValueError(f"{name} has {len(factors)} numbers: use {width // 2} positive numbers")

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads if self.head_size is None else self.head_size

    @property
    def mtp_numbers(self) -> range:
        """Numbers of the layers of multi-token prediction, which follow those of the model's layers."""
        return range(self.n_layers, self.n_layers + self.mtp_layers)

    @property
    def holds_table_twice(self) -> bool:
        """Whether a pipeline's last stage copies the embedding table: as its head, or for tokens further ahead."""
        return self.tie_embeddings or self.mtp_layers > 0

    @property
    def query_factor(self) -> float:
        """Factor of queries, beside the 1 / sqrt(head_dim) of the kernels."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier * self.head_dim**0.5
        return 1.0 if self.query_size is None else (self.head_dim / self.query_size) ** 0.5

    @property
    def embedding_factor(self) -> float:
        """Factor between the table's rows and the first layer's input."""
        return self.embedding_multiplier

    @property
    def rotary_dim(self) -> int:
        """Width of the part of a head that RoPE rotates."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def value_dim(self) -> int:
        """Width of a head's value."""
        return self.head_dim

    @property
    def tp_columns(self) -> dict[str, int]:
        """Columns that tensor parallel splits, by name: those of feed-forwards, and of eh_proj."""
        return {"ffn_dim": self.ffn_dim} | self.mtp_columns

    @property
    def mtp_columns(self) -> dict[str, int]:
        """Columns of eh_proj, which multi-token prediction adds to tp_columns."""
        return {"2 x dim": 2 * self.dim} if self.mtp_layers else {}

    @property
    def whole_widths(self) -> dict[str, int]:
        """Widths of matrix inputs that tensor parallel does not split, by name."""
        return {"dim": self.dim}

    @property
    def hf_derived(self) -> dict[str, Any]:
        """Fields of config.json that follow from other fields."""
        return {}

    @property
    def hf_written(self) -> dict[str, Any]:
        """Fields that are written into config.json, whatever is read from there."""
        return {"head_dim": self.head_dim}

    def has_window(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has the window."""
        return self.window is not None and not (self.full_every and (layer + 1) % self.full_every == 0)

    def has_rope(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has RoPE."""
        return not (self.no_rope_every and (layer + 1) % self.no_rope_every == 0)

    def keys_seen(self, layer: int, seq_len: int) -> tuple[float, float]:
        """Two counts of keys per query: PaLM's (seq_len, or the window if smaller), and the mean of visible keys."""
        if self.window is None or not self.has_window(layer) or self.window >= seq_len:
            return seq_len, seq_len / 2
        return self.window, self.window - self.window * (self.window - 1) / (2 * seq_len)
