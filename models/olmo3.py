"""OLMo 3 (arXiv:2512.13961) in its published sizes: OLMo 2 with a window in three of four layers.

YaRN stretches the rotary positions of the layers without a window.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from models.hugging_face import default_sizes
from models.olmo2 import Olmo2, Olmo2Config
from models.rotary import RopeScaling

_STRETCHED = RopeScaling("yarn", 8.0, 8192)


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(Olmo2Config):
    """Defaults that all flavors share."""

    hf_fields: ClassVar[dict[str, str]] = Olmo2Config.hf_fields | {
        "window": "sliding_window",
        "window_rope_theta": "rope_local_base_freq",
    }
    hf_defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "olmo3": default_sizes(4096, 32, 32, None, 11_008, 50_304, 2048)
        | {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "rope_local_base_freq": 500_000.0, "sliding_window": 4096},
    }
    vocab_size: int = 100_278
    window_rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = _STRETCHED
    context_length: int = 65_536
    window: int | None = 4096
    full_every: int = 4


FLAVORS = {
    "debug": Olmo3Config(
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        ffn_dim=768,
        vocab_size=4096,
        window=64,
        full_every=2,
        rope_scaling=RopeScaling("yarn", 8.0, 256),
        context_length=2048,
    ),
    "7B": Olmo3Config(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, ffn_dim=11_008),
    "32B": Olmo3Config(dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, ffn_dim=27_648),
}


class Olmo3(Olmo2):
    """OLMo 3."""

    hf_type = "olmo3"
    hf_class = "Olmo3ForCausalLM"


MODEL = Olmo3
