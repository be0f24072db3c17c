"""SmolLM3 in its published size. Every fourth layer has no rotary positions (arXiv:2501.18795)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from models.config import TransformerConfig
from models.hugging_face import ATTENTION_BIAS, FIELDS, default_sizes
from models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(TransformerConfig):
    """Defaults that all flavors share."""

    hf_fields: ClassVar[dict[str, str]] = {
        **FIELDS,
        **ATTENTION_BIAS,
        "ffn_bias": "mlp_bias",
        "hidden_act": "hidden_act",
        "no_rope_every": "no_rope_layer_interval",
    }
    hf_fixed: ClassVar[dict[str, Any]] = {"use_sliding_window": False}
    hf_defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "smollm3": default_sizes(2048, 36, 16, 4, 11_008, 128_256, 32_768)
        | {"rope_theta": 2_000_000.0, "tie_word_embeddings": True},
    }
    n_kv_heads: int = 4
    vocab_size: int = 128_256
    norm_eps: float = 1e-6
    rope_theta: float = 5_000_000.0
    context_length: int = 65_536
    no_rope_every: int = 4
    tie_embeddings: bool = True


FLAVORS = {
    "debug": SmolLM3Config(
        dim=256, n_layers=4, n_heads=8, ffn_dim=768, vocab_size=4096, context_length=2048, no_rope_every=2
    ),
    "3B": SmolLM3Config(dim=2048, n_layers=36, n_heads=16, ffn_dim=11_008),
}


class SmolLM3(Transformer):
    """SmolLM3."""

    hf_type = "smollm3"
    hf_class = "SmolLM3ForCausalLM"


MODEL = SmolLM3
