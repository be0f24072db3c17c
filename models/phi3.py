"""Phi-3 (arXiv:2404.14219) and Phi-4 (arXiv:2412.08905, arXiv:2503.01743) in their published sizes.

Files have queries, keys and values in one tensor, and gate and up projections in one. Some sizes have a window, and
RoPE scaled by factors for each frequency; RoPE of Phi-4-mini rotates three quarters of each head.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from models.config import TransformerConfig
from models.hugging_face import FIELDS, NAMES, Part, default_sizes, rope_fields
from models.rotary import RopeScaling
from models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Phi3Config(TransformerConfig):
    """Defaults that all flavors share."""

    hf_fields: ClassVar[dict[str, str]] = {
        **{name: hf_name for name, hf_name in FIELDS.items() if name != "head_size"},
        "hidden_act": "hidden_act",
        "rotary_fraction": "partial_rotary_factor",
        "window": "sliding_window",
    }
    hf_fixed: ClassVar[dict[str, Any]] = {}
    hf_defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "phi3": default_sizes(3072, 32, 32, None, 8192, 32_064, 4096)
        | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    }
    hf_rope_types: ClassVar[dict[str, str]] = {"default": "default"} | dict.fromkeys(
        ("longrope", "su", "yarn"), "longrope"
    )
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    context_length: int = 4096

    @property
    def hf_derived(self) -> dict[str, Any]:
        return {"head_dim": self.head_dim}

    @property
    def hf_written(self) -> dict[str, Any]:
        """RoPE scaling as in published files, because versions 4 of transformers take no other fields than these."""
        scaling = self.rope_scaling
        if scaling is None:
            return {}
        written, length = rope_fields(scaling) or {}, scaling.original_max_position_embeddings
        rope = {"type": written.pop("rope_type"), **written}
        rope.pop("original_max_position_embeddings", None)
        if scaling.factor == self.context_length / length:
            rope.pop("factor")
        return {"rope_scaling": rope, "original_max_position_embeddings": length}


_PHI3_SHORT = (
    *(1.1, 1.1, 1.1, 1.3000000000000003, 1.3500000000000003, 1.3500000000000003, 1.4000000000000004),
    *(1.5500000000000005, 2.000000000000001, 2.000000000000001, 2.000000000000001, 2.000000000000001),
    *(2.000000000000001, 2.000000000000001, 2.000000000000001, 2.000000000000001, 2.000000000000001),
    *(2.000000000000001, 2.000000000000001, 2.000000000000001, 2.000000000000001, 2.000000000000001),
    *(2.000000000000001, 2.000000000000001, 2.000000000000001, 2.0500000000000007, 2.0500000000000007),
    *(2.0500000000000007, 2.0500000000000007, 2.0500000000000007, 2.0500000000000007, 2.1000000000000005),
    *(2.1000000000000005, 2.1500000000000004, 2.25, 2.25, 2.25, 2.25, 2.25, 2.3999999999999995, 2.4499999999999993),
    *(2.499999999999999, 2.6999999999999984, 2.6999999999999984, 2.7499999999999982, 2.799999999999998),
    *(2.8999999999999977, 3.049999999999997),
)
_PHI3_LONG = (
    *(1.0700000524520874, 1.1200000047683716, 1.149999976158142, 1.4199999570846558, 1.5699999332427979),
    *(1.7999999523162842, 2.129999876022339, 2.129999876022339, 3.009999990463257, 5.910000324249268),
    *(6.950000286102295, 9.070000648498535, 9.930000305175781, 10.710000038146973, 11.130000114440918),
    *(14.609999656677246, 15.409998893737793, 19.809999465942383, 37.279998779296875, 38.279998779296875),
    *(38.599998474121094, 40.12000274658203, 46.20000457763672, 50.940006256103516, 53.66000747680664),
    *(54.9373893737793, 56.89738845825195, 57.28738784790039, 59.98738479614258, 60.86738586425781),
    *(60.887386322021484, 61.71739196777344, 62.91739273071289, 62.957393646240234, 63.41739273071289),
    *(63.8173942565918, 63.83739471435547, 63.897396087646484, 63.93739700317383, 64.06739807128906),
    *(64.11434936523438, 64.12435150146484, 64.15435028076172, 64.19435119628906, 64.24435424804688),
    *(64.57435607910156, 64.69000244140625, 64.76000213623047),
)
_PHI4_LONG = (
    *(1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898),
    *(2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424),
    *(6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252),
    *(16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6),
    *(32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
)


def _stretched(short: tuple[float, ...], long: tuple[float, ...]) -> dict[str, Any]:
    """Fields of a flavor that was trained on 4,096 tokens, and then on 131,072."""
    scaling = RopeScaling("longrope", 32.0, 4096, short_factor=short, long_factor=long)
    return {"rope_scaling": scaling, "context_length": 131_072, "window": 262_144}


_MINI: dict[str, Any] = {"dim": 3072, "n_layers": 32, "ffn_dim": 8192}
_MEDIUM: dict[str, Any] = {"dim": 5120, "n_layers": 40, "n_heads": 40, "n_kv_heads": 10, "ffn_dim": 17_920}

FLAVORS = {
    "debug": Phi3Config(
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        ffn_dim=768,
        vocab_size=4096,
        window=64,
        rotary_fraction=0.75,
        rope_scaling=RopeScaling(
            "longrope",
            8.0,
            256,
            short_factor=tuple(1 + 0.1 * index for index in range(12)),
            long_factor=tuple(1 + 0.7 * index for index in range(12)),
        ),
        context_length=2048,
    ),
    "3-mini-4k": Phi3Config(**_MINI, n_heads=32, n_kv_heads=32, vocab_size=32_064, window=2047),
    "3-mini-128k": Phi3Config(
        **_MINI, n_heads=32, n_kv_heads=32, vocab_size=32_064, **_stretched(_PHI3_SHORT, _PHI3_LONG)
    ),
    "3-medium-4k": Phi3Config(**_MEDIUM, vocab_size=32_064, window=2047),
    "4": Phi3Config(**_MEDIUM, vocab_size=100_352, rope_theta=250_000.0, context_length=16_384),
    "4-mini": Phi3Config(
        **_MINI,
        n_heads=24,
        n_kv_heads=8,
        vocab_size=200_064,
        tie_embeddings=True,
        rotary_fraction=0.75,
        **_stretched((1.0,) * 48, _PHI4_LONG),
    ),
}

_ATTENTION, _FEED_FORWARD = "model.layers.*.self_attn.qkv_proj.weight", "model.layers.*.mlp.gate_up_proj.weight"


class Phi3(Transformer):
    """Phi-3 and Phi-4."""

    hf_type = "phi3"
    hf_class = "Phi3ForCausalLM"

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        heads = config.n_heads, config.n_kv_heads, config.n_kv_heads
        attention = _parts(_ATTENTION, "attention", "wq wk wv", [count * config.head_dim for count in heads])
        feed_forward = _parts(_FEED_FORWARD, "feed_forward", "w1 w3", [config.ffn_dim] * 2)
        self.hf_names = NAMES | attention | feed_forward  # type: ignore[misc]


def _parts(there: str, module: str, matrices: str, sizes: list[int]) -> dict[str, Part]:
    """Name of each matrix of a module -> its rows in the tensor `there`, which has the matrices one below another."""
    ends = [*accumulate(sizes)]
    return {
        f"layers.*.{module}.{matrix}.weight": Part(there, rows=range(end - size, end), all_rows=ends[-1])
        for matrix, size, end in zip(matrices.split(), sizes, ends, strict=True)
    }


MODEL = Phi3
