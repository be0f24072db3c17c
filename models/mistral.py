"""Mistral 7B (arXiv:2310.06825): v0.1, whose layers all have a window, and v0.3, which has no window."""

from dataclasses import dataclass
from typing import Any, ClassVar

from models.config import TransformerConfig
from models.hugging_face import FIELDS, default_sizes
from models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class MistralConfig(TransformerConfig):
    """Defaults that all flavors share."""

    hf_fields: ClassVar[dict[str, str]] = FIELDS | {"window": "sliding_window", "hidden_act": "hidden_act"}
    hf_fixed: ClassVar[dict[str, Any]] = {}
    hf_defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "mistral": default_sizes(4096, 32, 32, 8, 14_336, 32_000, 131_072) | {"sliding_window": 4096},
    }
    n_kv_heads: int = 8
    norm_eps: float = 1e-5
    rope_theta: float = 1_000_000.0
    context_length: int = 32_768


FLAVORS = {
    "debug": MistralConfig(
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        ffn_dim=768,
        vocab_size=4096,
        rope_theta=10_000.0,
        context_length=2048,
        window=64,
    ),
    "7B-v0.1": MistralConfig(
        dim=4096, n_layers=32, n_heads=32, ffn_dim=14_336, vocab_size=32_000, rope_theta=10_000.0, window=4096
    ),
    "7B": MistralConfig(dim=4096, n_layers=32, n_heads=32, ffn_dim=14_336, vocab_size=32_768),
}


class Mistral(Transformer):
    """Mistral, dense."""

    hf_type = "mistral"
    hf_class = "MistralForCausalLM"


MODEL = Mistral
