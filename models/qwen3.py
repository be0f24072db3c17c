"""Dense Qwen3 (arXiv:2505.09388) in its published sizes. Queries and keys are normalized; head_size is explicit."""

from dataclasses import dataclass
from typing import Any, ClassVar

from models.config import TransformerConfig
from models.hugging_face import ATTENTION_BIAS, FIELDS, default_sizes
from models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(TransformerConfig):
    """Defaults that all flavors share."""

    hf_fields: ClassVar[dict[str, str]] = FIELDS | ATTENTION_BIAS | {"hidden_act": "hidden_act"}
    hf_fixed: ClassVar[dict[str, Any]] = {"use_sliding_window": False}
    hf_defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "qwen3": default_sizes(4096, 32, 32, 32, 22_016, 151_936, 32_768) | {"head_dim": 128},
    }
    n_kv_heads: int = 8
    head_size: int = 128
    vocab_size: int = 151_936
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    context_length: int = 40_960
    qk_norm: bool = True


FLAVORS = {
    "debug": Qwen3Config(
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        head_size=64,
        ffn_dim=768,
        vocab_size=4096,
        context_length=2048,
        tie_embeddings=True,
    ),
    "0.6B": Qwen3Config(dim=1024, n_layers=28, n_heads=16, ffn_dim=3072, tie_embeddings=True),
    "1.7B": Qwen3Config(dim=2048, n_layers=28, n_heads=16, ffn_dim=6144, tie_embeddings=True),
    "4B": Qwen3Config(dim=2560, n_layers=36, n_heads=32, ffn_dim=9728, tie_embeddings=True),
    "8B": Qwen3Config(dim=4096, n_layers=36, n_heads=32, ffn_dim=12_288),
    "14B": Qwen3Config(dim=5120, n_layers=40, n_heads=40, ffn_dim=17_408),
    "32B": Qwen3Config(dim=5120, n_layers=64, n_heads=64, ffn_dim=25_600),
}


class Qwen3(Transformer):
    """Qwen3, dense."""

    hf_type = "qwen3"
    hf_class = "Qwen3ForCausalLM"


MODEL = Qwen3
