"""Gemma 3 (arXiv:2503.19786), text only: five of six layers have a window; norms precede and follow each sublayer."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import HiddenAct, TransformerConfig
from models.hugging_face import ATTENTION_BIAS, FIELDS, NAMES, POST_NORMS, default_sizes
from models.parameters import KINDS, NORM, Kind
from models.rotary import RopeScaling
from models.transformer import Block, Transformer


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(TransformerConfig):
    """Defaults that all flavors share."""

    hf_fields: ClassVar[dict[str, str]] = {
        **FIELDS,
        **ATTENTION_BIAS,
        "hidden_act": "hidden_activation",
        "query_size": "query_pre_attn_scalar",
        "window": "sliding_window",
        "full_every": "sliding_window_pattern",
        "window_rope_theta": "rope_local_base_freq",
    }
    hf_fixed: ClassVar[dict[str, Any]] = {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    }
    hf_defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "gemma3_text": default_sizes(2304, 26, 8, 4, 9216, 262_208, 131_072)
        | {"head_dim": 256, "query_pre_attn_scalar": 256, "rope_theta": 1_000_000.0, "tie_word_embeddings": True}
        | {"sliding_window": 4096, "sliding_window_pattern": 6, "rope_local_base_freq": 10_000.0},
    }
    head_size: int = 256
    query_size: int = 256
    vocab_size: int = 262_208
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    window_rope_theta: float = 10_000.0
    window: int = 1024
    full_every: int = 6
    context_length: int = 131_072
    qk_norm: bool = True
    norms: Literal["before", "after", "both"] = "both"
    hidden_act: HiddenAct = "gelu_pytorch_tanh"
    tie_embeddings: bool = True

    @property
    def embedding_factor(self) -> float:
        return self.embedding_multiplier * self.dim**0.5


_TEXT_ONLY: dict[str, Any] = {"vocab_size": 262_144, "window": 512, "context_length": 32_768}
_STRETCHED = RopeScaling("linear", factor=8.0)

FLAVORS = {
    "debug": Gemma3Config(
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        head_size=64,
        query_size=32,
        ffn_dim=768,
        vocab_size=4096,
        window=64,
        full_every=2,
        rope_scaling=RopeScaling("linear", factor=2.0),
        context_length=2048,
    ),
    "270M": Gemma3Config(dim=640, n_layers=18, n_heads=4, n_kv_heads=1, ffn_dim=2048, **_TEXT_ONLY),
    "1B": Gemma3Config(dim=1152, n_layers=26, n_heads=4, n_kv_heads=1, ffn_dim=6912, **_TEXT_ONLY),
    "4B": Gemma3Config(dim=2560, n_layers=34, n_heads=8, n_kv_heads=4, ffn_dim=10_240, rope_scaling=_STRETCHED),
    "12B": Gemma3Config(dim=3840, n_layers=48, n_heads=16, n_kv_heads=8, ffn_dim=15_360, rope_scaling=_STRETCHED),
    "27B": Gemma3Config(
        dim=5376,
        n_layers=62,
        n_heads=32,
        n_kv_heads=16,
        head_size=128,
        query_size=168,
        ffn_dim=21_504,
        rope_scaling=_STRETCHED,
    ),
}


class Norm(nn.RMSNorm):
    """RMSNorm in float32, scaled by 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).type_as(x)


class Gemma3Block(Block):
    """A layer with norms of its own class."""

    norm = Norm


_NORM = replace(NORM, zero=True)


class Gemma3(Transformer):
    """Gemma 3, text only."""

    block = Gemma3Block
    final_norm = Norm
    kinds: ClassVar[dict[str, Kind]] = KINDS | {
        "layers.*.attention.[qk]_norm": _NORM,
        "layers.*.attention_norm": _NORM,
        "layers.*.attention_post_norm": _NORM,
        "layers.*.ffn_norm": _NORM,
        "layers.*.ffn_post_norm": _NORM,
        "layers.*.mtp.*norm": _NORM,
        "norm": _NORM,
    }
    hf_names: ClassVar[dict[str, str]] = NAMES | POST_NORMS
    hf_type = "gemma3_text"
    hf_class = "Gemma3ForCausalLM"

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens (B, S) -> embeddings (B, S, D), times sqrt(D) rounded to their precision."""
        x_BSD = super().embed(tokens)
        return x_BSD * torch.tensor(self.config.dim**0.5, dtype=x_BSD.dtype)


MODEL = Gemma3
