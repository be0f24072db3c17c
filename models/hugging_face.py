"""Hugging Face's names of parameters, and its config.json."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

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
    "layers.*.mtp.enorm": "model.layers.*.enorm",
    "layers.*.mtp.hnorm": "model.layers.*.hnorm",
    "layers.*.mtp.eh_proj": "model.layers.*.eh_proj",
    "layers.*.mtp.norm": "model.layers.*.shared_head.norm",
    "norm": "model.norm",
    "output": "lm_head",
}
"""Module name of this repository -> Hugging Face's."""
POST_NORMS = {
    "layers.*.attention_post_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.ffn_norm": "model.layers.*.pre_feedforward_layernorm",
    "layers.*.ffn_post_norm": "model.layers.*.post_feedforward_layernorm",
}
"""The same, for layers with norms after attention and feed-forward."""

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
"""Field of TransformerConfig -> field of config.json."""
ATTENTION_BIAS = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
"""The same, for families whose biases of attention are optional."""

_YARN = ("beta_slow", "beta_fast", "truncate", "mscale", "mscale_all_dim")
_FACTORS = ("short_factor", "long_factor")
_SCALING: dict[str, tuple[str, ...]] = {
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", *_YARN, "attention_factor"),
    "longrope": (*_FACTORS, "factor", "original_max_position_embeddings", "attention_factor"),
}
"""rope_type -> the fields of RopeScaling that it uses."""
ROPE_TYPES = {name: name for name in ("default", *_SCALING)}
"""Default of hf_rope_types."""
DROPOUTS = (
    *("attention_dropout", "attn_pdrop", "embd_pdrop", "hidden_dropout", "mlp_dropout", "resid_pdrop"),
    "router_jitter_noise",
)
"""Fields of config.json, of all families, that make training in transformers random, and change nothing else."""
_NAMES_OF_EXPERTS = ("num_experts", "num_local_experts")
"""Two names of the same field, both of which transformers reads."""
DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}
"""transformers' defaults that most families share, for fields that a config.json omits; hf_defaults has the others."""
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
"""Fields of config.json that have one value for most families; default of hf_fixed."""


def default_sizes(
    hidden_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int | None,
    intermediate_size: int,
    vocab_size: int,
    max_position_embeddings: int,
) -> dict[str, Any]:
    """The part of hf_defaults that every model type has: transformers' default sizes."""
    return dict(locals())


class Part(NamedTuple):
    """A parameter that is a slice or a transpose of a tensor in a Hugging Face folder; a value of hf_names.

    The slice has some of the tensor's columns, or some of the rows of a matrix.
    """

    name: str
    """The tensor's name."""
    transposed: bool = False
    """The tensor has the parameter's last two dimensions swapped."""
    first: int = 0
    """The index, along the tensor's last dimension, of the parameter's first column."""
    step: int = 1
    """Stride of the parameter's columns in the tensor, which interleaves `step` parameters of equal shape."""
    rows: range = range(0)
    """The parameter's rows in the tensor; empty: all."""
    all_rows: int = 0
    """Rows of the tensor, if the parameter has some of them."""

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape, given the parameter's shape."""
        swapped = self._swapped(shape)
        if self.rows:
            return self.all_rows, *swapped[1:]
        return swapped if self.step == 1 else (*swapped[:-1], swapped[-1] * self.step)

    def where(self, where: tuple[slice, ...]) -> tuple[slice, ...]:
        """The slice of the tensor that holds a non-empty slice of the parameter; `turned` then transposes it."""
        swapped = self._swapped(where)
        if self.rows:
            own = self.rows[swapped[0]]
            return slice(own.start, own.stop), *swapped[1:]
        if self.step == 1:
            return swapped
        first, last = (self.first + column * self.step for column in (swapped[-1].start, swapped[-1].stop - 1))
        return *swapped[:-1], slice(first, last + 1, self.step)

    def turned(self, tensor: Tensor) -> Tensor:
        return tensor.mT if self.transposed else tensor

    def of(self, whole: Tensor) -> Tensor:
        """The view of the tensor that has the parameter's shape."""
        if self.rows:
            whole = whole[self.rows.start : self.rows.stop]
        return self.turned(whole if self.step == 1 else whole[..., self.first :: self.step])

    def _swapped(self, dims: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*dims[:-2], dims[-1], dims[-2]) if self.transposed else dims


def hugging_face_name(name: str, names: Mapping[str, str | Part]) -> str | Part:
    """Translate a parameter's name: layers.3.attention.wq.weight -> model.layers.3.self_attn.q_proj.weight.

    Keys of `names` are modules or parameters. If the value is a Part, the result is a Part with the layer's number.
    """
    pattern, number = re.sub(r"\.\d+\.", ".*.", name), re.search(r"\d+", name)
    module, _, kind = pattern.rpartition(".")
    hf_name = names[pattern] if pattern in names else f"{names[module]}.{kind}"
    if not number:
        return hf_name
    if isinstance(hf_name, Part):
        return hf_name._replace(name=hf_name.name.replace("*", number[0], 1))
    return hf_name.replace("*", number[0], 1)


def to_hugging_face(config: Any) -> dict[str, Any]:
    """The fields of config.json for a TransformerConfig."""
    fields = {hf_field: getattr(config, field) for field, hf_field in config.hf_fields.items()}
    if type(config).full_every:
        fields["layer_types"] = _layer_types(config)
    if "no_rope_every" in config.hf_fields:
        fields["no_rope_layers"] = _rope_layers(config)
    rope = rope_fields(config.rope_scaling)
    if rope is None and any("rope_scaling" in defaults for defaults in config.hf_defaults.values()):
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}  # null means transformers' default scaling
    if "window_rope_theta" in config.hf_fields:
        full = {"rope_type": "default", **(rope or {}), "rope_theta": config.rope_theta}
        windowed = {"rope_type": "default", "rope_theta": config.window_rope_theta}
        fields["rope_parameters"] = {"full_attention": full, "sliding_attention": windowed}
    return {**config.hf_fixed, **fields, "rope_scaling": rope, **config.hf_written, **config.hf_derived}


def rope_fields(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """rope_scaling of config.json."""
    if scaling is None:
        return None
    values = {name: getattr(scaling, name) for name in ("rope_type", *_SCALING[scaling.rope_type])}
    values |= {name: [*values[name]] for name in _FACTORS if name in values}
    return {name: value for name, value in values.items() if value is not None}


def _layer_types(config: Any) -> list[str]:
    kinds = ("full_attention", "sliding_attention")
    return [kinds[config.has_window(layer)] for layer in range(config.n_layers)]


def _rope_layers(config: Any) -> list[int]:
    return [int(config.has_rope(layer)) for layer in range(config.n_layers)]


def _every(marked: list[bool]) -> int:
    """The number, counted from 1, of the first marked layer; 0 if there is none."""
    return marked.index(True) + 1 if True in marked else 0


def from_hugging_face(given: dict[str, Any], config_class: Any) -> Any:
    """The config_class for a config.json, which may have the older or the newer spelling of RoPE and expert settings.

    Raises ValueError for a setting that the model family does not have.
    """
    tables = config_class.hf_defaults
    defaults = DEFAULTS | tables.get(given.get("model_type"), next(iter(tables.values()), {}))
    experts = {name: given[other] for name in _NAMES_OF_EXPERTS for other in _NAMES_OF_EXPERTS if other in given}
    scaling = given.get("rope_scaling")
    given = defaults | experts | given
    if given.get("hidden_act") == "swish":
        given["hidden_act"] = "silu"
    unsupported: list[str] = []
    by_type, length = given.get("rope_parameters") or {}, "original_max_position_embeddings"
    for name, table in (("rope_scaling", scaling or {}), ("rope_parameters", by_type)):
        if not isinstance(table, dict):
            raise ValueError(f"{name} = {table}: not available")
    is_by_type = "full_attention" in by_type
    rope = by_type if is_by_type else scaling or by_type or defaults.get("rope_scaling") or {}  # null is the default
    lengths = [] if is_by_type else [given.get(length)]
    if is_by_type:
        windowed, rope = rope.get("sliding_attention", {}), rope["full_attention"]
        if "rope_theta" in windowed:
            given = given | {"rope_local_base_freq": windowed["rope_theta"]}
        if windowed.get("rope_type", "default") != "default":
            unsupported.append(f"rope_type = {windowed['rope_type']} of sliding_attention")
    elif given.get("rope_parameters") and "window_rope_theta" in config_class.hf_fields:
        unsupported.append(f"rope_parameters = {rope} without full_attention")  # transformers ignores such settings
    given_type = rope.get("rope_type", rope.get("type", "default"))
    rope_type = config_class.hf_rope_types.get(str(given_type))
    fraction = rope.get("partial_rotary_factor", given.get("partial_rotary_factor"))
    fixed = {name: given.get(name, value) for name, value in config_class.hf_fixed.items()}
    unsupported += [
        f"{name} = {value}"
        for name, value in fixed.items()
        if value != (own := config_class.hf_fixed[name]) and (own or value is not None)  # null means false, or []
    ]
    if rope_type is None:
        unsupported.append(f"rope_type = {given_type}")
    elif rope_type == "longrope":
        unsupported += [f"{name} = {rope.get(name)}" for name in _FACTORS if not _is_list_of_numbers(rope.get(name))]
    elif rope_type in _SCALING and rope.get("factor") is None:
        unsupported.append(f"rope_type = {rope_type} without a factor")
    if rope.get("attention_factor") is not None and "attention_factor" not in _SCALING.get(rope_type or "", ()):
        unsupported.append(f"attention_factor = {rope['attention_factor']}")
    if rope.get("mscale_all_dim") and rope_type != "yarn":
        unsupported.append(f"mscale_all_dim = {rope['mscale_all_dim']} beside rope_type = {rope_type}")
    if fraction not in (None, 1) and "rotary_fraction" not in config_class.hf_fields:
        unsupported.append(f"partial_rotary_factor = {fraction}")
    if unsupported:
        raise ValueError(f"{', '.join(unsupported)}: not available")
    values = {**given, "rope_theta": rope.get("rope_theta", given.get("rope_theta")), "partial_rotary_factor": fraction}
    sizes = _sizes(values, config_class)
    scaling = None
    if rope_type in _SCALING:
        lengths += [rope.get(length), given.get("max_position_embeddings")]
        rope = rope | {length: next((value for value in lengths if value is not None), None)}
        if rope_type == "longrope":
            rope |= {name: tuple(rope[name]) for name in _FACTORS}
            if rope.get("factor") is None:
                rope["factor"] = given["max_position_embeddings"] / rope[length]
        scaling = RopeScaling(
            rope_type, **{name: rope[name] for name in _SCALING[rope_type] if rope.get(name) is not None}
        )
    if scaling and scaling.attention_factor is not None:
        derived = replace(scaling, attention_factor=None)
        scaling = derived if math.isclose(derived.amplitude, scaling.amplitude) else scaling
    config = config_class(**sizes, rope_scaling=scaling)
    if unsupported := [
        f"{name} = {given[name]}" for name, value in config.hf_derived.items() if given.get(name) not in (None, value)
    ]:
        raise ValueError(f"{', '.join(unsupported)}: not available")
    types = given.get("layer_types")
    if types and _layer_types(config) != types:
        if not config_class.full_every:
            raise ValueError(f"layer_types = {types}: not available, as in transformers' model of this family")
        config = replace(config, full_every=_every([kind == "full_attention" for kind in types]))
        if _layer_types(config) != types:
            raise ValueError(f"layer_types = {types}: not available; only every n-th layer can differ from the others")
    rotated = given.get("no_rope_layers") and given["no_rope_layers"][: config.n_layers]  # as transformers
    if "no_rope_every" in config.hf_fields and rotated is not None and _rope_layers(config) != rotated:
        config = replace(config, no_rope_every=_every([not rope for rope in rotated]))
        if _rope_layers(config) != rotated:
            raise ValueError(
                f"no_rope_layers = {rotated}: not available; only every n-th layer can differ from the others"
            )
    return config


def _sizes(values: dict[str, Any], config_class: Any) -> dict[str, Any]:
    """The fields of a config_class. Raises ValueError if one is missing, has another type, or is a meaningless null."""
    hints, sizes, wrong = get_type_hints(config_class), {}, []
    needed = {field.name for field in dataclasses.fields(config_class) if field.default is dataclasses.MISSING}
    for field, name in config_class.hf_fields.items():
        if name not in values and field not in needed:
            continue
        value = values.get(name)
        if value is None:
            value = _meaning_of_null(field, values, config_class)
        if not _fits(value, hints[field]):
            wrong.append(f"{name} = {value}" if name in values else f"no {name}")
        sizes[field] = value
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: not available")
    return sizes


def _meaning_of_null(field: str, values: dict[str, Any], config_class: Any) -> Any:
    dim, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if field == "head_size" and config_class.head_size is not None and dim and heads:
        return dim // heads
    without_biases = dict.fromkeys(("qkv_bias", "output_bias", "ffn_bias"), False)
    others = {"n_kv_heads": heads, "n_groups": 1, "top_groups": 1, "rotary_fraction": 1.0}
    return (others | without_biases).get(field)


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) in (int, float) for each in value)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON has the type of a field."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    kinds = get_args(hint) or (hint,)
    return type(value) in kinds or (float in kinds and type(value) is int)
