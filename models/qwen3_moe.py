"""Qwen3 with experts (arXiv:2505.09388) in its published sizes: dense Qwen3, but with experts in every layer."""

from dataclasses import dataclass
from typing import Any, ClassVar

from models.hugging_face import ATTENTION_BIAS, default_sizes
from models.moe import MixtureConfig, MixtureTransformer
from models.qwen3 import Qwen3Config


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(Qwen3Config, MixtureConfig):
    """Defaults that all flavors share. ffn_dim, the width of layers without experts, is not used."""

    hf_fields: ClassVar[dict[str, str]] = MixtureConfig.hf_fields | ATTENTION_BIAS
    hf_fixed: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    hf_defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "qwen3_moe": default_sizes(2048, 24, 32, 4, 6144, 151_936, 32_768)
        | {"head_dim": None, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"norm_topk_prob": False},
    }
    n_kv_heads: int = 4
    n_experts: int = 128
    top_k: int = 8


FLAVORS = {
    "debug": Qwen3MoeConfig(
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        head_size=64,
        ffn_dim=768,
        n_experts=16,
        top_k=4,
        expert_dim=192,
        vocab_size=4096,
        context_length=2048,
    ),
    "30B-A3B": Qwen3MoeConfig(dim=2048, n_layers=48, n_heads=32, ffn_dim=6144, expert_dim=768),
    "235B-A22B": Qwen3MoeConfig(dim=4096, n_layers=94, n_heads=64, ffn_dim=12_288, expert_dim=1536),
}


class Qwen3Moe(MixtureTransformer):
    """Qwen3 with experts."""

    hf_type = "qwen3_moe"
    hf_class = "Qwen3MoeForCausalLM"


MODEL = Qwen3Moe
