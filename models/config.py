"""Sizes of a model, and what its layers have in common."""

from dataclasses import dataclass
from typing import Any, ClassVar

from models.hugging_face import FIELDS, FIXED
from models.rotary import RopeScaling


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes of a model."""

    hf_fields: ClassVar[dict[str, str]] = FIELDS
    """Fields -> those of Hugging Face's config.json."""
    hf_fixed: ClassVar[dict[str, Any]] = FIXED
    """Fields of config.json that have one value for every model of the family."""
    hf_defaults: ClassVar[dict[str, dict[str, Any]]] = {}
    """model_type -> what transformers takes for fields that a config.json leaves out, where shapes do not tell."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    context_length: int
    """Tokens that the published weights were trained for; used only in Hugging Face's config.json."""
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    head_size: int | None = None
    """Width of each head; by default dim / n_heads."""
    qk_norm: bool = False
    """Queries and keys are normed, each head by itself, before they are rotated."""
    qkv_bias: bool = False
    """The projections to queries, keys and values have biases."""
    output_bias: bool = False
    """The projection of attention's result has one."""
    sinks: bool = False
    """Each head has a learned logit that takes its share of the softmax, and has no value (arXiv:2309.17453)."""
    query_size: int | None = None
    """Logits are q k / sqrt(query_size); by default the width of a head."""
    window: int | None = None
    """The most tokens that a query sees, its own included; None for no window."""
    full_every: int = 0
    """Each layer whose number, from 1, is a multiple of this has no window; 0 for none."""
    window_rope_theta: float | None = None
    """rope_theta of layers with a window, whose frequencies are not stretched then; None for that of all layers."""
    frozen: tuple[str, ...] = ()
    """Patterns, like those of KINDS, of parameters that are not trained: ("tok_embeddings", "layers.0")."""

    @property
    def head_dim(self) -> int:
        return self.head_size or self.dim // self.n_heads

    @property
    def rotary_dim(self) -> int:
        """Width of the part of a head that is rotated."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a head's value."""
        return self.head_dim

    @property
    def tp_columns(self) -> dict[str, int]:
        """Feed-forward columns that tensor parallel ranks share, by name."""
        return {"ffn_dim": self.ffn_dim}

    @property
    def whole_widths(self) -> dict[str, int]:
        """Widths of what matrices are multiplied with that every tensor parallel rank has whole, by name."""
        return {"dim": self.dim}

    @property
    def hf_derived(self) -> dict[str, Any]:
        """Fields of config.json that follow from others."""
        return {}

    def has_window(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has the window."""
        return self.window is not None and not (self.full_every and (layer + 1) % self.full_every == 0)

    def keys_seen(self, layer: int, seq_len: int) -> tuple[float, float]:
        """Keys of a query: those that PaLM counts, which are all up to the window, and the mean of those it sees."""
        if self.window is None or not self.has_window(layer) or self.window >= seq_len:
            return seq_len, seq_len / 2
        return self.window, self.window - self.window * (self.window - 1) / (2 * seq_len)
