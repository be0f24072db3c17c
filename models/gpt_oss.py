"""gpt-oss (arXiv:2508.10925) in its published sizes. Every layer has experts, and every other layer has a window."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from models.hugging_face import ATTENTION_BIAS, FIELDS, Part, default_sizes
from models.moe import MixtureConfig, MixtureTransformer
from models.rotary import RopeScaling

_HF_EXPERTS = "model.layers.*.mlp.experts"
_STRETCHED = RopeScaling("yarn", 32.0, 4096, truncate=False)


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(MixtureConfig):
    """Defaults that all flavors share. ffn_dim, the width of layers without experts, is not used."""

    hf_fields: ClassVar[dict[str, str]] = {
        **{name: hf_name for name, hf_name in FIELDS.items() if name != "ffn_dim"},
        **ATTENTION_BIAS,
        "n_experts": "num_local_experts",
        "top_k": "num_experts_per_tok",
        "expert_dim": "intermediate_size",
        "window": "sliding_window",
    }
    hf_fixed: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    }
    hf_defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "gpt_oss": default_sizes(2880, 36, 64, 8, 2880, 201_088, 131_072)
        | {
            "head_dim": 64,
            "num_local_experts": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "sliding_window": 128,
            "num_experts_per_tok": 4,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    }
    n_kv_heads: int = 8
    head_size: int = 64
    ffn_dim: int = 2880
    expert_dim: int = 2880
    top_k: int = 4
    vocab_size: int = 201_088
    norm_eps: float = 1e-5
    rope_theta: float = 150_000.0
    rope_scaling: RopeScaling | None = _STRETCHED
    context_length: int = 131_072
    qkv_bias: bool = True
    output_bias: bool = True
    sinks: bool = True
    window: int | None = 128
    full_every: int = 2
    router_bias: bool = True
    expert_bias: bool = True
    activation: Literal["swiglu", "clamped_swiglu"] = "clamped_swiglu"


FLAVORS = {
    "debug": GptOssConfig(
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        n_experts=16,
        expert_dim=192,
        vocab_size=4096,
        window=64,
        rope_scaling=RopeScaling("yarn", 8.0, 256, truncate=False),
        context_length=2048,
    ),
    "20b": GptOssConfig(dim=2880, n_layers=24, n_heads=64, n_experts=32),
    "120b": GptOssConfig(dim=2880, n_layers=36, n_heads=64, n_experts=128),
}


class GptOss(MixtureTransformer):
    """gpt-oss."""

    hf_names: ClassVar[Mapping[str, str | Part]] = {
        **MixtureTransformer.hf_names,
        "layers.*.attention.sinks.weight": "model.layers.*.self_attn.sinks",
        "layers.*.feed_forward.router": "model.layers.*.mlp.router",
        "layers.*.feed_forward.router.logit_bias": "model.layers.*.mlp.router.bias",
        "layers.*.feed_forward.experts.w1": Part(f"{_HF_EXPERTS}.gate_up_proj", transposed=True, first=0, step=2),
        "layers.*.feed_forward.experts.w2": Part(f"{_HF_EXPERTS}.down_proj", transposed=True),
        "layers.*.feed_forward.experts.w3": Part(f"{_HF_EXPERTS}.gate_up_proj", transposed=True, first=1, step=2),
        "layers.*.feed_forward.experts.b1": Part(f"{_HF_EXPERTS}.gate_up_proj_bias", first=0, step=2),
        "layers.*.feed_forward.experts.b2": f"{_HF_EXPERTS}.down_proj_bias",
        "layers.*.feed_forward.experts.b3": Part(f"{_HF_EXPERTS}.gate_up_proj_bias", first=1, step=2),
    }
    hf_type = "gpt_oss"
    hf_class = "GptOssForCausalLM"


MODEL = GptOss
