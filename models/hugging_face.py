"""Hugging Face's names of weights, and its config.json."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from models.rotary import RopeScaling

NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.attention.wq": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.wk": "model.layers.*.self_attn.k_proj",
    "layers.*.attention.wv": "model.layers.*.self_attn.v_proj",
    "layers.*.attention.wo": "model.layers.*.self_attn.o_proj",
    "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
    "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
    "layers.*.ffn_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.feed_forward.w1": "model.layers.*.mlp.gate_proj",
    "layers.*.feed_forward.w2": "model.layers.*.mlp.down_proj",
    "layers.*.feed_forward.w3": "model.layers.*.mlp.up_proj",
    "norm": "model.norm",
    "output": "lm_head",
}
"""Module names here -> there."""

FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tie_embeddings": "tie_word_embeddings",
}
"""Fields of TransformerConfig -> of config.json."""

_YARN = ("beta_slow", "beta_fast", "truncate", "mscale", "mscale_all_dim")
_SCALING: dict[str, tuple[str, ...]] = {
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", *_YARN),
}
"""Fields of RopeScaling, by rope_type."""
_NEWER = {"num_experts": "num_local_experts"}
"""Fields that transformers 5 writes under another name than the published files."""
DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
"""What transformers takes for fields that a config.json leaves out; hf_defaults has that of single model types."""
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
"""Fields of config.json that have one value for every model here."""


class Part(NamedTuple):
    """A parameter that is a part of a tensor of a Hugging Face folder, as families write it in hf_names."""

    name: str
    """Of the tensor."""
    transposed: bool = False
    """The last two dimensions are swapped there."""
    first: int = 0
    """The parameter's first column there, of the last dimension."""
    step: int = 1
    """From one of its columns there to the next; those between are of step - 1 parameters of the same shape."""

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape, from the parameter's."""
        there = self._swapped(shape)
        return there if self.step == 1 else (*there[:-1], there[-1] * self.step)

    def where(self, where: tuple[slice, ...]) -> tuple[slice, ...]:
        """The slice of the tensor that holds a slice of the parameter, one that is not empty; `turned` turns it."""
        there = self._swapped(where)
        if self.step == 1:
            return there
        first, last = (self.first + column * self.step for column in (there[-1].start, there[-1].stop - 1))
        return *there[:-1], slice(first, last + 1, self.step)

    def turned(self, tensor: Tensor) -> Tensor:
        return tensor.mT if self.transposed else tensor

    def of(self, whole: Tensor) -> Tensor:
        """A view of the tensor, with the parameter's shape."""
        return self.turned(whole if self.step == 1 else whole[..., self.first :: self.step])

    def _swapped(self, dims: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*dims[:-2], dims[-1], dims[-2]) if self.transposed else dims


def hugging_face_name(name: str, names: Mapping[str, str | Part]) -> str | Part:
    """layers.3.attention.wq.weight -> model.layers.3.self_attn.q_proj.weight; names may also name a parameter.

    A parameter that names have as a Part is one, with the number in its name.
    """
    pattern, number = re.sub(r"\.\d+\.", ".*.", name), re.search(r"\d+", name)
    module, _, kind = pattern.rpartition(".")
    found = names[pattern] if pattern in names else f"{names[module]}.{kind}"
    if not number:
        return found
    if isinstance(found, Part):
        return found._replace(name=found.name.replace("*", number[0], 1))
    return found.replace("*", number[0], 1)


def to_hugging_face(config: Any) -> dict[str, Any]:
    """config.json's fields of a TransformerConfig."""
    fields = {theirs: getattr(config, ours) for ours, theirs in config.hf_fields.items()} | {
        "head_dim": config.rotary_dim
    }
    if config.full_every:
        fields["layer_types"] = _layer_types(config)
    scaling = config.rope_scaling
    rope = scaling and {name: getattr(scaling, name) for name in ("rope_type", *_SCALING[scaling.rope_type])}
    if rope is None and any("rope_scaling" in defaults for defaults in config.hf_defaults.values()):
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}  # null would be the default there
    return {**config.hf_fixed, **fields, "rope_scaling": rope, **config.hf_derived}


def _layer_types(config: Any) -> list[str]:
    kinds = ("full_attention", "sliding_attention")
    return [kinds[config.has_window(layer)] for layer in range(config.n_layers)]


def from_hugging_face(given: dict[str, Any], config_class: Any) -> Any:
    """The config_class of a config.json, with the older or the newer spelling of rotary settings and of experts.

    Raises ValueError for a setting that no model here has.
    """
    given = DEFAULTS | config_class.hf_defaults.get(given.get("model_type"), {}) | given
    rope, foreign = given.get("rope_parameters") or given.get("rope_scaling") or {}, []
    if "full_attention" in rope:  # by types of layers
        windowed, rope = rope.get("sliding_attention", {}), rope["full_attention"]
        given = given | {"rope_local_base_freq": windowed.get("rope_theta")}
        if windowed.get("rope_type", "default") != "default":
            foreign.append(f"rope_type = {windowed['rope_type']} of sliding_attention")
    kind = rope.get("rope_type", rope.get("type", "default"))
    asked = {name: given.get(name, value) for name, value in config_class.hf_fixed.items()}
    foreign += [f"{name} = {value}" for name, value in asked.items() if value != config_class.hf_fixed[name]]
    if kind not in ("default", *_SCALING):
        foreign.append(f"rope_type = {kind}")
    elif kind in _SCALING and rope.get("factor") is None:
        foreign.append(f"rope_type = {kind} without a factor")
    if rope.get("attention_factor") is not None:
        foreign.append(f"attention_factor = {rope['attention_factor']}")
    if foreign:
        raise ValueError(f"{', '.join(foreign)}: not available")
    found = {**given, "rope_theta": rope.get("rope_theta", given.get("rope_theta"))}
    found |= {name: given[newer] for name, newer in _NEWER.items() if newer in given}
    fields = {ours: found[theirs] for ours, theirs in config_class.hf_fields.items() if found.get(theirs) is not None}
    scaling = None
    if kind in _SCALING:
        length = "original_max_position_embeddings"
        lengths = (given.get(length), rope.get(length), given.get("max_position_embeddings"))
        rope = rope | {length: next((each for each in lengths if each is not None), None)}
        scaling = RopeScaling(kind, **{name: rope[name] for name in _SCALING[kind] if rope.get(name) is not None})
    config = config_class(**fields, rope_scaling=scaling)
    if odd := [
        f"{name} = {given[name]}" for name, value in config.hf_derived.items() if given.get(name, value) != value
    ]:
        raise ValueError(f"{', '.join(odd)}: not available")
    types = given.get("layer_types")
    if types and config.window is not None and _layer_types(config) != types:
        full = "full_attention"
        config = replace(config, full_every=types.index(full) + 1 if full in types else 0)
        if _layer_types(config) != types:
            raise ValueError(f"layer_types = {types}: not available")
    return config
