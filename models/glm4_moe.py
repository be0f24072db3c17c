"""GLM-4.5 (arXiv:2508.06471) in its published sizes: experts after the first layers, and a shared expert.

The scores of experts are sigmoids, and biases balance the experts' loads. RoPE rotates half of each head.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from models.hugging_face import FIELDS, default_sizes
from models.moe import MixtureConfig, SharedMixtureTransformer


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(MixtureConfig):
    """Defaults that all flavors share."""

    hf_fields: ClassVar[dict[str, str]] = FIELDS | {
        "rotary_fraction": "partial_rotary_factor",
        "qk_norm": "use_qk_norm",
        "qkv_bias": "attention_bias",
        "n_dense_layers": "first_k_dense_replace",
        "n_experts": "n_routed_experts",
        "top_k": "num_experts_per_tok",
        "expert_dim": "moe_intermediate_size",
        "n_shared": "n_shared_experts",
        "normalised": "norm_topk_prob",
        "route_scale": "routed_scaling_factor",
        "n_groups": "n_group",
        "top_groups": "topk_group",
    }
    hf_fixed: ClassVar[dict[str, Any]] = {"hidden_act": "silu"}
    hf_defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "glm4_moe": default_sizes(4096, 46, 96, 8, 10_944, 151_552, 131_072)
        | {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "use_qk_norm": False, "attention_bias": False}
        | {"first_k_dense_replace": 1, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1}
        | {"moe_intermediate_size": 1408, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
        | {"n_group": 1, "topk_group": 1},
    }
    n_heads: int = 96
    n_kv_heads: int = 8
    vocab_size: int = 151_552
    norm_eps: float = 1e-5
    rope_theta: float = 1_000_000.0
    rotary_fraction: float = 0.5
    context_length: int = 131_072
    qkv_bias: bool = True
    n_dense_layers: int = 1
    top_k: int = 8
    n_shared: int = 1
    score: Literal["softmax", "sigmoid"] = "sigmoid"


FLAVORS = {
    "debug": Glm4MoeConfig(
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        head_size=64,
        ffn_dim=768,
        qk_norm=True,
        n_experts=16,
        top_k=4,
        expert_dim=192,
        route_scale=2.5,
        vocab_size=4096,
        context_length=2048,
    ),
    "106B-A12B": Glm4MoeConfig(dim=4096, n_layers=46, head_size=128, ffn_dim=10_944, n_experts=128, expert_dim=1408),
    "355B-A32B": Glm4MoeConfig(
        dim=5120,
        n_layers=92,
        head_size=128,
        ffn_dim=12_288,
        qk_norm=True,
        n_dense_layers=3,
        n_experts=160,
        expert_dim=1536,
        route_scale=2.5,
    ),
}


class Glm4Moe(SharedMixtureTransformer):
    """GLM-4.5, and GLM-4.5-Air, which has no norms of queries and keys."""

    hf_type = "glm4_moe"
    hf_class = "Glm4MoeForCausalLM"


MODEL = Glm4Moe
