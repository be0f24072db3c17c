"""Granite 3.3 and 4.1 in published sizes: Llama with four multipliers (arXiv:2408.13359)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from models.config import TransformerConfig
from models.hugging_face import default_sizes
from models.llama import LlamaConfig
from models.transformer import Transformer

_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(TransformerConfig):
    """Defaults that all flavors share."""

    hf_fields: ClassVar[dict[str, str]] = LlamaConfig.hf_fields | {name: name for name in _MULTIPLIERS}
    hf_fixed: ClassVar[dict[str, Any]] = {}
    hf_defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "granite": default_sizes(4096, 32, 32, None, 11_008, 32_000, 2048) | dict.fromkeys(_MULTIPLIERS, 1.0),
    }
    n_kv_heads: int = 8
    vocab_size: int = 49_159
    norm_eps: float = 1e-5
    rope_theta: float = 10_000_000.0
    context_length: int = 131_072
    tie_embeddings: bool = True
    embedding_multiplier: float = 12.0
    attention_multiplier: float = 0.015625
    residual_multiplier: float = 0.22


FLAVORS = {
    "debug": GraniteConfig(
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        ffn_dim=768,
        vocab_size=4096,
        rope_theta=10_000.0,
        context_length=2048,
        attention_multiplier=0.03125,
        logits_scaling=2.0,
    ),
    "3.3-2B": GraniteConfig(dim=2048, n_layers=40, n_heads=32, ffn_dim=8192, logits_scaling=8.0),
    "3.3-8B": GraniteConfig(
        dim=4096, n_layers=40, n_heads=32, ffn_dim=12_800, attention_multiplier=0.0078125, logits_scaling=16.0
    ),
    "4.1-3B": GraniteConfig(dim=2560, n_layers=40, n_heads=40, ffn_dim=8192, vocab_size=100_352, logits_scaling=10.0),
}


class Granite(Transformer):
    """Granite, dense."""

    hf_type = "granite"
    hf_class = "GraniteForCausalLM"


MODEL = Granite
