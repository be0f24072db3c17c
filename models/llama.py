"""Llama 3 (arXiv:2407.21783) in its published sizes."""

from dataclasses import dataclass
from typing import Any, ClassVar

from models.config import TransformerConfig
from models.hugging_face import ATTENTION_BIAS, FIELDS, default_sizes
from models.rotary import RopeScaling
from models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(TransformerConfig):
    """Defaults that all flavors share."""

    hf_fields: ClassVar[dict[str, str]] = FIELDS | ATTENTION_BIAS | {"ffn_bias": "mlp_bias", "hidden_act": "hidden_act"}
    hf_fixed: ClassVar[dict[str, Any]] = {}
    hf_defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "llama": default_sizes(4096, 32, 32, None, 11_008, 32_000, 2048),
    }
    n_kv_heads: int = 8
    vocab_size: int = 128_256
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    context_length: int = 131_072


FLAVORS = {
    "debug": LlamaConfig(
        dim=256, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=768, vocab_size=4096, context_length=2048
    ),
    "1B": LlamaConfig(
        dim=2048, n_layers=16, n_heads=32, ffn_dim=8192, rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True
    ),
    "3B": LlamaConfig(
        dim=3072, n_layers=28, n_heads=24, ffn_dim=8192, rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True
    ),
    "8B": LlamaConfig(dim=4096, n_layers=32, n_heads=32, ffn_dim=14336, rope_scaling=RopeScaling()),
    "70B": LlamaConfig(dim=8192, n_layers=80, n_heads=64, ffn_dim=28672, rope_scaling=RopeScaling()),
    "405B": LlamaConfig(dim=16384, n_layers=126, n_heads=128, ffn_dim=53248, rope_scaling=RopeScaling()),
}


class Llama(Transformer):
    """Llama 3."""

    hf_type = "llama"
    hf_class = "LlamaForCausalLM"


MODEL = Llama
