"""OLMo 2 (arXiv:2501.00656) in its published sizes. Norms follow each sublayer, and span all queries or keys."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from models.config import TransformerConfig
from models.hugging_face import ATTENTION_BIAS, FIELDS, NAMES, POST_NORMS, default_sizes
from models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(TransformerConfig):
    """Defaults that all flavors share."""

    hf_fields: ClassVar[dict[str, str]] = FIELDS | ATTENTION_BIAS | {"hidden_act": "hidden_act"}
    hf_fixed: ClassVar[dict[str, Any]] = {}
    hf_defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "olmo2": default_sizes(4096, 32, 32, None, 11_008, 50_304, 2048) | {"rms_norm_eps": 1e-5},
    }
    vocab_size: int = 100_352
    norm_eps: float = 1e-6
    rope_theta: float = 500_000.0
    context_length: int = 4096
    qk_norm: bool | Literal["all_heads"] = "all_heads"
    norms: Literal["before", "after", "both"] = "after"


FLAVORS = {
    "debug": Olmo2Config(
        dim=256, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=768, vocab_size=4096, context_length=2048
    ),
    "1B": Olmo2Config(dim=2048, n_layers=16, n_heads=16, n_kv_heads=16, ffn_dim=8192),
    "7B": Olmo2Config(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, ffn_dim=11_008),
    "13B": Olmo2Config(dim=5120, n_layers=40, n_heads=40, n_kv_heads=40, ffn_dim=13_824),
    "32B": Olmo2Config(dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, ffn_dim=27_648),
}


class Olmo2(Transformer):
    """OLMo 2."""

    hf_names: ClassVar[dict[str, str]] = NAMES | POST_NORMS
    hf_type = "olmo2"
    hf_class = "Olmo2ForCausalLM"


MODEL = Olmo2
