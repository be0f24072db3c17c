"""DeepSeek-V2 and V3 (arXiv:2405.04434, arXiv:2412.19437): latent attention, and experts after the first layers.

Shapes are named as in models/layers.py. Further letters:

- R: width of the latent of keys and values
- N, P: widths of the parts of a head without and with RoPE (K = N + P)
- W: width of a value
- E: a width that is split further
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import AttentionCore, Visible
from models.hugging_face import FIELDS, FIXED, Part, default_sizes
from models.moe import MixtureConfig, SharedMixtureTransformer
from models.parameters import MATRIX, NORM, Kind
from models.rotary import RopeScaling, apply_rotary

_SHARED_DEFAULTS: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(MixtureConfig):
    """Defaults that all flavors share. There are as many key and value heads as query heads."""

    hf_fields: ClassVar[dict[str, str]] = {name: hf_name for name, hf_name in FIELDS.items() if name != "head_size"} | {
        "n_dense_layers": "first_k_dense_replace",
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "nope_dim": "qk_nope_head_dim",
        "rope_dim": "qk_rope_head_dim",
        "v_dim": "v_head_dim",
        "n_experts": "n_routed_experts",
        "top_k": "num_experts_per_tok",
        "expert_dim": "moe_intermediate_size",
        "n_shared": "n_shared_experts",
        "score": "scoring_func",
        "normalised": "norm_topk_prob",
        "route_scale": "routed_scaling_factor",
        "n_groups": "n_group",
        "top_groups": "topk_group",
    }
    hf_fixed: ClassVar[dict[str, Any]] = FIXED | {"moe_layer_freq": 1, "rope_interleave": True}
    hf_defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "deepseek_v3": _SHARED_DEFAULTS
        | default_sizes(7168, 61, 128, 128, 18_432, 129_280, 4096)
        | {
            "first_k_dense_replace": 3,
            "n_routed_experts": 256,
            "moe_intermediate_size": 2048,
            "n_shared_experts": 1,
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
        },
        "deepseek_v2": _SHARED_DEFAULTS
        | default_sizes(4096, 32, 32, None, 11_008, 102_400, 2048)
        | {
            "first_k_dense_replace": 0,
            "n_routed_experts": 64,
            "moe_intermediate_size": 1407,
            "n_shared_experts": 2,
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "num_experts_per_tok": None,
            "n_group": None,
            "topk_group": None,
        },
    }

    positive: ClassVar[tuple[str, ...]] = (
        *MixtureConfig.positive,
        *("q_lora_rank", "kv_lora_rank", "nope_dim", "rope_dim", "v_dim"),
    )

    q_lora_rank: int | None = None
    """Width of the queries' latent; None: queries are projected directly."""
    kv_lora_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    context_length: int = 163_840

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def rotary_dim(self) -> int:
        return self.rope_dim

    @property
    def value_dim(self) -> int:
        return self.v_dim

    @property
    def whole_widths(self) -> dict[str, int]:
        latents = {"q_lora_rank": self.q_lora_rank or 0, "kv_lora_rank": self.kv_lora_rank, "rope_dim": self.rope_dim}
        return super().whole_widths | latents

    @property
    def hf_derived(self) -> dict[str, Any]:
        if self.score == "sigmoid":
            return {"topk_method": "noaux_tc"}
        return {"topk_method": "greedy" if self.n_groups == 1 else "group_limited_greedy", "norm_topk_prob": False}

    @property
    def hf_written(self) -> dict[str, Any]:
        return {"head_dim": self.rope_dim}

    def __post_init__(self) -> None:
        """Raises ValueError if n_kv_heads differs from n_heads, head_size is set, or values are wider than keys."""
        super().__post_init__()
        if self.v_dim > self.head_dim:
            raise ValueError(f"v_dim = {self.v_dim}: values are at most as wide as keys, {self.head_dim}")
        if self.n_kv_heads != self.n_heads or self.head_size is not None:
            raise ValueError(
                f"n_kv_heads = {self.n_kv_heads}, head_size = {self.head_size}: {self.n_heads} heads need as many keys "
                f"and values; use n_kv_heads = {self.n_heads}, and set widths by nope_dim, rope_dim and v_dim"
            )


def _v2(**sizes: Any) -> DeepseekV3Config:
    sizes |= {"score": "softmax", "normalised": False, "top_k": 6, "n_shared": 2, "n_dense_layers": 1}
    stretched = RopeScaling("yarn", 40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
    return DeepseekV3Config(**sizes, vocab_size=102_400, rope_scaling=stretched)


FLAVORS = {
    "debug": DeepseekV3Config(
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=8,
        ffn_dim=768,
        n_dense_layers=1,
        q_lora_rank=96,
        kv_lora_rank=64,
        nope_dim=32,
        rope_dim=16,
        v_dim=32,
        n_experts=16,
        top_k=4,
        expert_dim=192,
        n_shared=1,
        score="sigmoid",
        route_scale=2.5,
        n_groups=4,
        top_groups=2,
        vocab_size=4096,
        context_length=2048,
    ),
    "16B": _v2(dim=2048, n_layers=27, n_heads=16, n_kv_heads=16, ffn_dim=10_944, n_experts=64, expert_dim=1408),
    "236B": _v2(
        dim=5120,
        n_layers=60,
        n_heads=128,
        n_kv_heads=128,
        ffn_dim=12_288,
        q_lora_rank=1536,
        n_experts=160,
        expert_dim=1536,
        n_groups=8,
        top_groups=3,
        route_scale=16.0,
    ),
    "671B": DeepseekV3Config(
        dim=7168,
        n_layers=61,
        n_heads=128,
        n_kv_heads=128,
        ffn_dim=18_432,
        n_dense_layers=3,
        q_lora_rank=1536,
        n_experts=256,
        top_k=8,
        expert_dim=2048,
        n_shared=1,
        score="sigmoid",
        route_scale=2.5,
        n_groups=8,
        top_groups=4,
        vocab_size=129_280,
        rope_scaling=RopeScaling("yarn", 40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
    ),
}


_LATENT_EPS = 1e-6
"""Epsilon of the latents' norms, which do not use norm_eps, as in transformers."""


class LatentAttention(nn.Module):
    """Attention whose keys and values are projected from one narrow latent per token (arXiv:2405.04434, section 2.1).

    The key of a head has a part of width N, which differs between heads, and a rotated part of width P, which all
    heads share.
    """

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.config = config
        queries, keys_and_values = config.n_heads * config.head_dim, config.n_heads * (config.nope_dim + config.v_dim)
        if config.q_lora_rank is None:
            self.wq = nn.Linear(config.dim, queries, bias=False)
        else:
            self.wq_a = nn.Linear(config.dim, config.q_lora_rank, bias=False)
            self.q_norm = nn.RMSNorm(config.q_lora_rank, eps=_LATENT_EPS)
            self.wq_b = nn.Linear(config.q_lora_rank, queries, bias=False)
        self.wkv_a = nn.Linear(config.dim, config.kv_lora_rank + config.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(config.kv_lora_rank, eps=_LATENT_EPS)
        self.wkv_b = nn.Linear(config.kv_lora_rank, keys_and_values, bias=False)
        self.wo = nn.Linear(config.n_heads * config.v_dim, config.dim, bias=False)
        scaling = config.rope_scaling
        # YaRN's factor multiplies the whole query, because cosines and sines would scale only its rotated part.
        self.query_factor = scaling.spread(scaling.mscale_all_dim) ** 2 if scaling else 1.0
        self.core = AttentionCore()

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, visible: Visible) -> Tensor:
        config = self.config
        q_BSE = self.wq(x_BSD) if config.q_lora_rank is None else self.wq_b(self.q_norm(self.wq_a(x_BSD)))
        latent_BSR, k_BSP = self.wkv_a(x_BSD).split([config.kv_lora_rank, config.rope_dim], dim=-1)
        kv_BSHE = self.wkv_b(self.kv_norm(latent_BSR)).unflatten(-1, (-1, config.nope_dim + config.v_dim))
        k_BSHN, v_BSHW = kv_BSHE.split([config.nope_dim, config.v_dim], dim=-1)
        q_BSHN, q_BSHP = q_BSE.unflatten(-1, (-1, config.head_dim)).split([config.nope_dim, config.rope_dim], dim=-1)
        q_BSHP, k_BS1P = (apply_rotary(_halves(part), cos, sin) for part in (q_BSHP, k_BSP[:, :, None]))
        q = torch.cat((q_BSHN, q_BSHP), dim=-1)
        if self.query_factor != 1:
            q = q * self.query_factor
        k = torch.cat((k_BSHN, k_BS1P.expand(-1, -1, k_BSHN.shape[2], -1)), dim=-1)
        # Values are padded with zeros to the width of keys, because all kernels, ring attention, sequence splits and
        # generation take equal widths. Padding 128 to 192 makes products with values 50% more expensive, and
        # attention as a whole 20% more expensive.
        v = F.pad(v_BSHW, (0, config.head_dim - config.v_dim))
        out_BSHK = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), visible).transpose(1, 2)
        return self.wo(out_BSHK[..., : config.v_dim].flatten(2))


def _halves(x_BSHP: Tensor) -> Tensor:
    """Reorder columns: published weights rotate 2 i against 2 i + 1, and apply_rotary rotates i against i + P / 2."""
    return x_BSHP.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


_ATTENTION = "model.layers.*.self_attn"


class DeepseekV3(SharedMixtureTransformer):
    """DeepSeek-V3, or DeepSeek-V2 if the score is softmax."""

    kinds: ClassVar[dict[str, Kind]] = SharedMixtureTransformer.kinds | {
        "layers.*.attention.w*_[ab]": MATRIX,
        "layers.*.attention.*_norm": NORM,
    }
    hf_names: ClassVar[Mapping[str, str | Part]] = {
        **SharedMixtureTransformer.hf_names,
        "layers.*.attention.wq_a": f"{_ATTENTION}.q_a_proj",
        "layers.*.attention.q_norm": f"{_ATTENTION}.q_a_layernorm",
        "layers.*.attention.wq_b": f"{_ATTENTION}.q_b_proj",
        "layers.*.attention.wkv_a": f"{_ATTENTION}.kv_a_proj_with_mqa",
        "layers.*.attention.kv_norm": f"{_ATTENTION}.kv_a_layernorm",
        "layers.*.attention.wkv_b": f"{_ATTENTION}.kv_b_proj",
    }
    hf_type = "deepseek_v3"
    hf_class = "DeepseekV3ForCausalLM"

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(config)
        if config.score == "softmax":
            self.hf_type, self.hf_class = "deepseek_v2", "DeepseekV2ForCausalLM"

    def make_layer(self, layer: int) -> nn.Module:
        """The layer with this number, counted from 0; it has latent attention."""
        block: Any = super().make_layer(layer)
        block.attention = LatentAttention(self.config)  # type: ignore[arg-type]
        return block

    def hf_name(self, name: str) -> str | Part:
        """Hugging Face's name of a parameter; empty for router biases in V2, whose files have none."""
        is_absent = self.hf_type == "deepseek_v2" and name.endswith("router.bias")
        return "" if is_absent else super().hf_name(name)


MODEL = DeepseekV3
