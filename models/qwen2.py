"""Qwen2.5 (arXiv:2412.15115) in the published sizes of its base models. Queries, keys and values have biases."""

from dataclasses import dataclass
from typing import Any, ClassVar

from models.config import TransformerConfig
from models.hugging_face import FIELDS, default_sizes
from models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(TransformerConfig):
    """Defaults that all flavors share."""

    hf_fields: ClassVar[dict[str, str]] = FIELDS | {"hidden_act": "hidden_act"}
    hf_fixed: ClassVar[dict[str, Any]] = {"use_sliding_window": False}
    hf_defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "qwen2": default_sizes(4096, 32, 32, 32, 22_016, 151_936, 32_768),
    }
    vocab_size: int = 152_064
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    context_length: int = 131_072
    qkv_bias: bool = True


_SMALL: dict[str, Any] = {"n_kv_heads": 2, "vocab_size": 151_936, "tie_embeddings": True}

FLAVORS = {
    "debug": Qwen2Config(
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        ffn_dim=768,
        vocab_size=4096,
        context_length=2048,
        tie_embeddings=True,
    ),
    "0.5B": Qwen2Config(dim=896, n_layers=24, n_heads=14, ffn_dim=4864, context_length=32_768, **_SMALL),
    "1.5B": Qwen2Config(dim=1536, n_layers=28, n_heads=12, ffn_dim=8960, **_SMALL),
    "3B": Qwen2Config(dim=2048, n_layers=36, n_heads=16, ffn_dim=11_008, context_length=32_768, **_SMALL),
    "7B": Qwen2Config(dim=3584, n_layers=28, n_heads=28, n_kv_heads=4, ffn_dim=18_944),
    "14B": Qwen2Config(dim=5120, n_layers=48, n_heads=40, n_kv_heads=8, ffn_dim=13_824, norm_eps=1e-5),
    "32B": Qwen2Config(dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, ffn_dim=27_648, norm_eps=1e-5),
    "72B": Qwen2Config(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=29_568, norm_eps=1e-5),
}


class Qwen2(Transformer):
    """Qwen2.5, dense."""

    hf_type = "qwen2"
    hf_class = "Qwen2ForCausalLM"


MODEL = Qwen2
