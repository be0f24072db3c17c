"""Mixtral (arXiv:2401.04088) in its published sizes: Mistral with experts in every layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from models.config import TransformerConfig
from models.hugging_face import Part, default_sizes
from models.moe import MixtureConfig, MixtureTransformer

_HF_MIXTURE = "model.layers.*.block_sparse_moe"


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(MixtureConfig):
    """Defaults that all flavors share. ffn_dim, the width of layers without experts, is not used."""

    hf_fields: ClassVar[dict[str, str]] = {
        **{name: hf_name for name, hf_name in TransformerConfig.hf_fields.items() if name != "ffn_dim"},
        "n_experts": "num_local_experts",
        "top_k": "num_experts_per_tok",
        "expert_dim": "intermediate_size",
        "window": "sliding_window",
    }
    hf_fixed: ClassVar[dict[str, Any]] = {"hidden_act": "silu"}
    hf_defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "mixtral": default_sizes(4096, 32, 32, 8, 14_336, 32_000, 131_072)
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    }
    n_kv_heads: int = 8
    ffn_dim: int = 14_336
    n_experts: int = 8
    top_k: int = 2
    vocab_size: int = 32_000
    norm_eps: float = 1e-5
    rope_theta: float = 1_000_000.0
    context_length: int = 32_768


FLAVORS = {
    "debug": MixtralConfig(
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        expert_dim=384,
        vocab_size=4096,
        rope_theta=10_000.0,
        context_length=2048,
        window=64,
    ),
    "8x7B": MixtralConfig(dim=4096, n_layers=32, n_heads=32, expert_dim=14_336),
    "8x22B": MixtralConfig(dim=6144, n_layers=56, n_heads=48, expert_dim=16_384, context_length=65_536),
}


class Mixtral(MixtureTransformer):
    """Mixtral."""

    hf_names: ClassVar[Mapping[str, str | Part]] = {
        **MixtureTransformer.hf_names,
        "layers.*.feed_forward.router": f"{_HF_MIXTURE}.gate",
        "layers.*.feed_forward.experts.w1": f"{_HF_MIXTURE}.experts.*.w1.weight",
        "layers.*.feed_forward.experts.w2": f"{_HF_MIXTURE}.experts.*.w2.weight",
        "layers.*.feed_forward.experts.w3": f"{_HF_MIXTURE}.experts.*.w3.weight",
    }
    hf_type = "mixtral"
    hf_class = "MixtralForCausalLM"


MODEL = Mixtral
