"""config.json: what no model here has is refused, both spellings are read, and published files are the flavors'.

Exports leave nothing to the defaults of transformers, and tokens around documents are those that transformers finds.
"""

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from components.config import ConfigError, Model, RopeScaling
from components.data.tokenizer import load_tokenizer
from components.state.weights import export
from models import MODELS, meta_model, sizes
from models.hugging_face import from_hugging_face, to_hugging_face
from tests.ranks import group_of_one
from tests.test_tokenizer import BOTH, save_named

transformers = pytest.importorskip("transformers")

WINDOWS = ["sliding_attention"] * 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attention_bias": True}, "attention_bias is True there and False here"),
        ({"mlp_bias": True}, "mlp_bias is True there and False here"),
        (
            {"layer_types": WINDOWS},
            f"layer_types = {WINDOWS}: not available, as in transformers' model of this family",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type = dynamic: not available"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
            "mscale_all_dim = 1.0 beside rope_type = linear: not available",
        ),
        ({"hidden_act": "mish"}, "hidden_act = mish: not available"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu there and silu here"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: not available"),
    ],
)
def test_what_no_model_here_has_is_refused(change: dict[str, Any], reason: str) -> None:
    model = meta_model(Model(name="llama", flavor="debug"))
    assert model.hf_misfits(model.hf_config()) == []
    assert model.hf_misfits(model.hf_config() | change) == [reason]


def test_a_window_that_the_model_lacks_and_stretched_positions_in_it_are_refused() -> None:
    mistral, gemma = (meta_model(Model(name=name, flavor="debug")) for name in ("mistral", "gemma3"))
    for window in (None, 63):
        assert mistral.hf_misfits(mistral.hf_config() | {"sliding_window": window}) == [
            f"sliding_window is {window} there and 64 here"
        ]
    given = transformers.AutoConfig.for_model(**gemma.hf_config()).to_dict()
    assert gemma.hf_misfits(given) == []
    given["rope_parameters"]["sliding_attention"]["rope_type"] = "linear"
    assert gemma.hf_misfits(given) == ["rope_type = linear of sliding_attention: not available"]
    given = gemma.hf_config() | {"layer_types": ["full_attention"] + 3 * ["sliding_attention"]}
    assert "layer_types = ['full_attention', " in gemma.hf_misfits(given)[0]


@pytest.mark.parametrize("spelling", ["older", "newer"])
@pytest.mark.parametrize(
    ("name", "flavor"),
    [
        *(("llama", "8B"), ("llama", "1B"), ("qwen2", "7B"), ("mistral", "7B-v0.1"), ("mistral", "7B")),
        *(("gemma3", "1B"), ("gemma3", "27B"), ("olmo2", "7B"), ("olmo3", "7B"), ("smollm3", "3B")),
        *(("granite", "3.3-8B"), ("mixtral", "8x7B"), ("glm4_moe", "106B-A12B"), ("glm4_moe", "355B-A32B")),
        *(("phi3", "3-mini-4k"), ("phi3", "3-mini-128k"), ("phi3", "4"), ("phi3", "4-mini")),
    ],
)
def test_both_spellings_of_config_json_are_read(spelling: str, name: str, flavor: str) -> None:
    model = meta_model(Model(name=name, flavor=flavor))
    given = model.hf_config()
    if spelling == "newer":
        given = transformers.AutoConfig.for_model(**given).to_dict()
        assert "rope_scaling" not in given
    assert from_hugging_face(given, type(model.config)) == MODELS[name][1][flavor] or model.hf_misfits(given) == []
    assert model.hf_misfits(given) == []


PUBLISHED: dict[tuple[str, str], dict[str, Any]] = {
    ("qwen2", "0.5B"): {
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    ("mistral", "7B-v0.1"): {
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    ("gemma3", "1B"): {
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    ("olmo2", "32B"): {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "max_position_embeddings": 4096,
        "num_attention_heads": 40,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
    ("olmo3", "32B"): {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "layer_types": 16 * [*3 * ["sliding_attention"], "full_attention"],
        "max_position_embeddings": 65536,
        "num_attention_heads": 40,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 100278,
    },
    ("smollm3", "3B"): {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "layer_types": 36 * ["full_attention"],
        "max_position_embeddings": 65536,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": 9 * [1, 1, 1, 0],
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 128256,
    },
    ("granite", "3.3-8B"): {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12800,
        "logits_scaling": 16.0,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49159,
    },
    ("mixtral", "8x7B"): {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    ("glm4_moe", "106B-A12B"): {
        "attention_bias": True,
        "attention_dropout": 0.0,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
    ("phi3", "4-mini"): {
        "attention_dropout": 0.0,
        "embd_pdrop": 0.0,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "num_attention_heads": 24,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": [*MODELS["phi3"][1]["4-mini"].rope_scaling.long_factor],
            "short_factor": 48 * [1.0],
            "type": "longrope",
        },
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "vocab_size": 200064,
    },
}
"""What is published as config.json of these models, but for names and numbers of tokens."""


@pytest.mark.parametrize(("name", "flavor"), PUBLISHED)
def test_published_config_json_is_that_of_the_flavor(name: str, flavor: str) -> None:
    model, given = meta_model(Model(name=name, flavor=flavor)), PUBLISHED[name, flavor]
    assert model.hf_misfits(given | {"model_type": model.hf_type}) == []
    assert from_hugging_face(given, type(model.config)) == model.config


KINDS = {
    kind: flavors["16B" if kind == "deepseek_v2" else "debug"]
    for model_class, flavors in MODELS.values()
    for kind in dict.fromkeys((model_class.hf_type, *flavors["debug"].hf_defaults))
}
"""model_type -> sizes of a model of this type."""


def read(given: dict[str, Any], sizes: Any) -> dict[str, Any]:
    return to_hugging_face(from_hugging_face(given, type(sizes)))


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_that_a_config_leaves_out_is_what_transformers_takes(kind: str) -> None:
    sizes = KINDS[kind]
    whole = {**to_hugging_face(sizes), "model_type": kind}
    names = [name for name in whole if name != "model_type"]
    seen = set()
    for absent in [*([name] for name in names), [name for name in names if name != "num_experts_per_tok"]]:
        rest = {name: value for name, value in whole.items() if name not in absent}
        for given in (rest, rest | dict.fromkeys(absent)):
            try:
                theirs = transformers.AutoConfig.for_model(**given).to_dict()
            except (IndexError, TypeError, ValueError, huggingface_hub.errors.StrictDataclassError):
                continue  # refused there: then it may be read here
            seen |= {*absent}
            if theirs.get("head_dim") is None:  # so do the models of transformers
                theirs["head_dim"] = theirs["hidden_size"] // theirs["num_attention_heads"]
            theirs["rope_parameters"].setdefault("partial_rotary_factor", 1.0)  # so do their models
            try:
                right = read(theirs, sizes)
            except ValueError as error:
                reason = "head" if "of each head" in str(error) else re.escape(str(error))
                with pytest.raises(ValueError, match=reason):
                    read(given, sizes)
            else:
                assert read(given, sizes) == right, absent
    assert seen == {*names}


NO_EFFECT = (
    *("attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp"),
    *("use_cache", "output_router_logits", "router_aux_loss_coef", "num_mtp_layers", "rope_parameters", "layer_types"),
    *("sliding_window", "max_window_layers", "resid_pdrop", "embd_pdrop", "router_jitter_noise"),
)
"""Fields of transformers that change no logits if they are not refused, or do so beside a field that is looked at."""


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_of_transformers_that_changes_logits_is_looked_at(kind: str) -> None:
    common = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    theirs = {field.name for field in dataclasses.fields(transformers.AutoConfig.for_model(kind))}
    assert theirs - common - {*NO_EFFECT} <= to_hugging_face(KINDS[kind]).keys() | {"head_dim"}


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("smollm3", {"no_rope_layers": [1, 0, 0, 1]}, "no_rope_layers = [1, 0, 0, 1]: not available"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window = True: not available"),
        ("smollm3", {"layer_types": WINDOWS}, "layer_types = "),
        ("granite", {"logits_scaling": 0}, "logits_scaling = 0: "),
        ("olmo2", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = dynamic: not available"),
        ("olmo3", {"layer_types": ["full_attention", *WINDOWS[1:]]}, "layer_types = "),
        ("olmo3", {"rope_parameters": {"rope_type": "yarn", "factor": 8.0}}, "without full_attention"),
    ],
)
def test_what_a_family_cannot_compute_is_refused_by_name(kind: str, changes: dict[str, Any], said: str) -> None:
    sizes = KINDS[kind]
    given = {name: value for name, value in to_hugging_face(sizes).items() if name != "rope_parameters"}
    with pytest.raises(ValueError, match=re.escape(said)):
        from_hugging_face(given | changes, type(sizes))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"qkv_bias": True, "output_bias": True, "ffn_bias": True, "hidden_act": "gelu"}),
        ("olmo3", {"full_every": 0, "window_rope_theta": 1e4}),
        ("olmo3", {"full_every": 1}),
        ("gemma3_text", {"full_every": 0}),
        ("smollm3", {"no_rope_every": 0}),
        ("smollm3", {"no_rope_every": 1}),
        ("granite", {"attention_multiplier": 0.0, "residual_multiplier": 2.0, "embedding_multiplier": 3}),
    ],
)
def test_settings_survive_config_json_and_transformers(kind: str, changes: dict[str, Any]) -> None:
    sizes = dataclasses.replace(KINDS[kind], **changes)
    written = to_hugging_face(sizes)
    assert from_hugging_face(written, type(sizes)) == dataclasses.replace(sizes, head_size=sizes.head_dim)
    theirs = transformers.AutoConfig.for_model(kind, **written).to_dict()
    assert to_hugging_face(from_hugging_face(theirs, type(sizes))) == written


def test_a_field_of_another_type_and_one_without_a_value_are_named() -> None:
    model = meta_model(Model(name="llama", flavor="debug"))
    given = model.hf_config()
    for change, said in (
        ({"hidden_size": "256"}, "hidden_size = 256: not available"),
        (
            {"num_hidden_layers": None, "vocab_size": 4096.0},
            "num_hidden_layers = None, vocab_size = 4096.0: not available",
        ),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1: not available"),
    ):
        assert model.hf_misfits(given | change) == [said]
    v2 = meta_model(Model(name="deepseek_v3", flavor="16B"))
    assert v2.hf_misfits({"model_type": "deepseek_v2"}) == ["num_experts_per_tok = None: not available"]
    assert "hidden_size is 4096 there and 256 here" in model.hf_misfits({"model_type": "new"})


def test_rotary_settings_that_no_model_here_has_are_refused_and_the_length_is_found() -> None:
    model = meta_model(Model(name="llama", flavor="debug"))
    plain = model.hf_config() | {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert from_hugging_face(plain, type(model.config)).rope_scaling.original_max_position_embeddings == 64
    longer = plain | {"original_max_position_embeddings": 32}
    assert from_hugging_face(longer, type(model.config)).rope_scaling.original_max_position_embeddings == 32
    for change, reason in (
        ({"rope_type": "linear", "attention_factor": 1.0}, "attention_factor = 1.0"),
        ({"factor": None}, "without a factor"),
    ):
        with pytest.raises(ValueError, match=reason):
            from_hugging_face(plain | {"rope_scaling": plain["rope_scaling"] | change}, type(model.config))


def test_settings_of_longrope_are_read_in_each_spelling_and_refused_by_name() -> None:
    model = meta_model(Model(name="phi3", flavor="debug"))
    given, scaling = model.hf_config(), model.config.rope_scaling
    assert given["rope_scaling"].keys() == {"type", "short_factor", "long_factor"}  # versions 4 take no other keys
    for change in ({"type": "su"}, {"type": "yarn"}, {"rope_type": "longrope"}, {"factor": 8.0}):
        assert model.hf_misfits(given | {"rope_scaling": given["rope_scaling"] | change}) == []
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"short_factor": None}, "short_factor = None: not available"),
        ({"long_factor": "1, 2"}, "long_factor = 1, 2: not available"),
        ({"long_factor": 12 * ["1"]}, "long_factor = ['1', "),
        ({"long_factor": [1.0]}, "long_factor has 1 numbers: use 12 positive numbers"),
        ({"type": "llama3"}, "rope_type = llama3: not available"),
    ]
    for setting, said in wrong:
        (misfit,) = model.hf_misfits(given | {"rope_scaling": given["rope_scaling"] | setting})
        assert misfit.startswith(said)
    assert (
        model.hf_misfits(given | {"max_position_embeddings": 4096})[0]
        == "max_position_embeddings is 4096 there and 2048 here"
    )
    assert model.hf_misfits(given | {"head_dim": 64}) == ["head_dim = 64: not available"]
    theirs = transformers.AutoConfig.for_model(**given).to_dict()
    assert theirs["rope_parameters"]["partial_rotary_factor"] == 0.75
    assert from_hugging_face(theirs, type(model.config)) == model.config
    other = replace(model.config, rope_scaling=replace(scaling, factor=2.0, attention_factor=1.5))
    assert from_hugging_face(to_hugging_face(other), type(other)) == other


def test_a_scaling_that_config_json_cannot_have_is_not_exported(tmp_path: Path) -> None:
    model = meta_model(Model(name="phi3", flavor="debug", rope_scaling=RopeScaling(rope_type="linear", factor=2.0)))
    with pytest.raises(ConfigError, match="cannot describe this model: rope_type = linear: not available"):
        export(model, {}, tmp_path / "folder", "assets/tokenizer", torch.float32)
    assert not (tmp_path / "folder").exists()


def test_settings_of_rotary_positions_that_are_written_twice_are_read_as_transformers_does() -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 5e5}
    length = "original_max_position_embeddings"
    given = {
        "llama": {"rope_scaling": llama3 | {length: 32}, "rope_parameters": {"rope_type": "default"}},
        "olmo3": {length: 64, "rope_parameters": {"full_attention": yarn, "sliding_attention": {}}},
    }
    for name, changes in given.items():
        base = {key: value for key, value in to_hugging_face(MODELS[name][1]["debug"]).items() if key[:4] != "rope"}
        theirs = transformers.AutoConfig.for_model(name, **base | {"rope_theta": 5e5} | changes).rope_parameters
        theirs = theirs.get("full_attention", theirs)
        found = from_hugging_face(base | {"rope_theta": 5e5} | changes, type(MODELS[name][1]["debug"]))
        scaling = found.rope_scaling
        assert (scaling.rope_type, scaling.factor) == (theirs["rope_type"], theirs["factor"])
        assert scaling.original_max_position_embeddings == theirs[length]
    swish = to_hugging_face(MODELS["llama"][1]["debug"]) | {"hidden_act": "swish"}
    assert from_hugging_face(swish, type(MODELS["llama"][1]["debug"])).hidden_act == "silu"


def test_gpt_oss_without_stretching_is_written_as_such() -> None:
    """With null transformers would stretch by 32."""
    chosen = Model(name="gpt_oss", flavor="debug", rope_scaling=RopeScaling(rope_type="none"))
    model = meta_model(chosen)
    theirs = transformers.AutoConfig.for_model(**model.hf_config())
    assert theirs.rope_parameters["rope_type"] == "default"
    assert theirs.rope_parameters["rope_theta"] == model.config.rope_theta
    assert model.hf_misfits(model.hf_config()) == []


def test_stretching_as_the_flavor_does_changes_no_number() -> None:
    for name, flavor, length in (("gpt_oss", "20b", 4096), ("deepseek_v3", "671B", 4096), ("llama", "8B", 8192)):
        own = sizes(Model(name=name, flavor=flavor))
        kind, factor = own.rope_scaling.rope_type, own.rope_scaling.factor
        asked = Model(name=name, flavor=flavor, rope_scaling=RopeScaling(rope_type=kind, factor=factor))
        assert sizes(asked).rope_scaling == own.rope_scaling
        assert own.rope_scaling.original_max_position_embeddings == length
    linear = Model(name="gemma3", flavor="4B", rope_scaling=RopeScaling(rope_type="linear", factor=16.0))
    assert sizes(linear).context_length == 2 * sizes(Model(name="gemma3", flavor="4B")).context_length


LEFT_OUT = {
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "router_jitter_noise": 0.0,
    "use_cache": True,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "pretraining_tp": 1,
    "max_window_layers": 28,
    "swiglu_alpha": 1.702,
    "sliding_window": None,
}
"""Fields that exports leave out: their only default is ours, or only training with transformers reads them."""
RENAMED = {"rope_theta", "partial_rotary_factor", "rope_scaling", "rope_local_base_freq", "num_experts", "torch_dtype"}
"""Fields that transformers 5 keeps under other names."""
DERIVED = {
    *("rope_parameters", "layer_types", "qk_head_dim", "num_local_experts", "_sliding_window_pattern", "dtype"),
    "_name_or_path",
}
"""Fields that follow from written ones."""


@pytest.mark.parametrize("name", [name for name, (model_class, _) in MODELS.items() if model_class.hf_type])
def test_an_export_leaves_nothing_to_the_defaults_of_transformers(name: str, tmp_path: Path) -> None:
    """With a tokenizer that has no end token: Llama's default, 2, would end a text at any such token."""
    base = transformers.PretrainedConfig().to_dict()
    for flavor in ("debug", "16B") if name == "deepseek_v3" else ("debug",):
        model, folder = meta_model(Model(name=name, flavor=flavor)), tmp_path / flavor
        with group_of_one(), pytest.MonkeyPatch.context() as patch:
            patch.setattr("components.state.weights._files", lambda *_: [])
            export(model, {}, folder, save_named(tmp_path / "tokenizer", {}), torch.float32)
        written = json.loads((folder / "config.json").read_text())
        read = transformers.AutoConfig.from_pretrained(folder).to_dict()
        assert [read[f"{token}_token_id"] for token in ("bos", "eos", "pad")] == [None] * 3
        assert {key for key in written if read.get(key, "lost") != written[key]} <= RENAMED
        left_out = read.keys() - written.keys() - RENAMED - DERIVED
        values = {key: read[key] for key in left_out if base.get(key, "none") != read[key]}
        assert values.items() <= LEFT_OUT.items()
        assert model.hf_misfits(read) == []
        generation = transformers.GenerationConfig.from_pretrained(folder)
        assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (None, None, None)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"special_tokens_map.json": BOTH},
        {"tokenizer_config.json": {"eos_token": "<s>"}, "special_tokens_map.json": BOTH},
        {"tokenizer_config.json": {"eos_token": None}, "special_tokens_map.json": {"eos_token": {"content": "</s>"}}},
        {"tokenizer_config.json": BOTH, "special_tokens_map.json": {"eos_token": None}},
        {
            "tokenizer_config.json": {"eos_token": "<s>", "added_tokens_decoder": {"0": {"content": "<s>"}}},
            "special_tokens_map.json": BOTH,
        },
    ],
    ids=["none", "map", "both", "null in settings", "null in map", "added tokens"],
)
def test_tokens_around_documents_are_those_of_transformers(files: dict[str, Any], tmp_path: Path) -> None:
    path = save_named(tmp_path, files)
    theirs, ours = transformers.PreTrainedTokenizerFast.from_pretrained(path), load_tokenizer(path)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
