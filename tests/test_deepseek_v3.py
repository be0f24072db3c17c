"""DeepSeek-V2 and V3: published config.json files, what the family refuses, and planted faults of its layouts."""

import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from components.commands.figures import Observation, broken_bars, figures
from components.config import ConfigError, Model
from components.state import weights
from models import MODELS, meta_model
from models.hugging_face import from_hugging_face
from tests.harness import observe, rewrite

transformers = pytest.importorskip("transformers")

V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
V2: dict[str, Any] = V3 | {
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "rope_scaling": V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "vocab_size": 102400,
}
V2_LITE: dict[str, Any] = V2 | {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
}
PUBLISHED = {"671B": V3, "236B": V2, "16B": V2_LITE}
IMPLIED = ("scoring_func", "norm_topk_prob")
"""By model_type."""


@pytest.mark.parametrize("spelling", ["older", "newer", "short"])
@pytest.mark.parametrize("flavor", PUBLISHED)
def test_the_published_config_json_is_read_and_written(flavor: str, spelling: str) -> None:
    model, given = meta_model(Model(name="deepseek_v3", flavor=flavor)), PUBLISHED[flavor]
    if spelling == "newer":
        given = transformers.AutoConfig.for_model(**given).to_dict()
    elif spelling == "short":
        given = {name: value for name, value in given.items() if name not in IMPLIED}
    assert from_hugging_face(given, type(model.config)) == model.config
    assert model.hf_misfits(given) == []
    written = model.hf_config()
    different = {name for name in written.keys() & PUBLISHED[flavor].keys() if written[name] != PUBLISHED[flavor][name]}
    assert different == {"rope_scaling", "num_nextn_predict_layers"}


@pytest.mark.parametrize(
    ("flavor", "change", "reason"),
    [
        ("236B", {"topk_method": "greedy"}, "topk_method = greedy: not available"),
        ("16B", {"norm_topk_prob": True}, "norm_topk_prob = True: not available"),
        ("671B", {"num_key_value_heads": 16}, ".*: 128 heads need as many keys and values; .*"),
        ("671B", {"moe_layer_freq": 2}, "moe_layer_freq = 2: not available"),
        ("671B", {"first_k_dense_replace": 4}, "first_k_dense_replace is 4 there and 3 here"),
        ("671B", {"model_type": "deepseek_v2"}, "model_type is deepseek_v2 there and deepseek_v3 here"),
    ],
)
def test_what_the_family_does_not_have_is_refused(flavor: str, change: dict[str, Any], reason: str) -> None:
    model = meta_model(Model(name="deepseek_v3", flavor=flavor))
    (said,) = model.hf_misfits(PUBLISHED[flavor] | change)
    assert re.fullmatch(reason, said), said


def test_queries_are_scaled_before_the_core_so_that_dynamics_see_their_logits() -> None:
    """The largest logit grows by YaRN's factor, with the same weights."""
    config = MODELS["deepseek_v3"][1]["tiny"]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (1, 24), generator=generator)
    largest = []
    for mscale in (1.0, 2.0):  # cosines and sines stay as they are
        scaling = replace(config.rope_scaling, mscale=mscale, mscale_all_dim=mscale)
        torch.manual_seed(0)
        model = MODELS["deepseek_v3"][0](replace(config, rope_scaling=scaling, n_layers=1))
        for name, parameter in model.named_parameters():
            torch.nn.init.ones_(parameter) if "norm" in name else torch.nn.init.normal_(parameter, std=0.1)
        core = model.layers["0"].attention.core
        core.largest_logit = torch.tensor(-torch.inf)
        model(tokens)
        largest.append(core.largest_logit.item())
    factors = [config.rope_scaling.spread(mscale) ** 2 for mscale in (1.0, 2.0)]
    assert largest[1] / largest[0] == pytest.approx(factors[1] / factors[0], rel=1e-5)


V3_TINY = ("--model.name", "deepseek_v3", "--model.flavor", "tiny_sigmoid")
TP = ("--parallelism.tensor_parallel_degree", "2")
STYLES = "parallelize.tensor"
FAULTS: dict[str, tuple[str, str, str, str]] = {
    "latents take the gradient of one rank's heads for that of all": (
        *(STYLES, "ForOwnHeads._apply"),
        *(", partial_sum(module.weight)", ", module.weight.to_local()"),
    ),
    "the input takes it": (
        *(STYLES, "ForOwnHeads._apply"),
        *("x, weight = partial_sum(x_BSD),", "x, weight = getattr(x_BSD, 'to_local', lambda: x_BSD)(),"),
    ),
    "a head is not that of the rank": (
        *(STYLES, "RowsOfOwnHeads._apply"),
        *("(x_BSD, _rows(module, device_mesh))", "(x_BSD, _rows(module, device_mesh).roll(7, 0))"),
    ),
}


@cache
def one_process() -> Observation:
    return observe(*V3_TINY)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    observed = observe(*V3_TINY, *TP, ranks=2, mutate=partial(rewrite, *FAULTS[fault]))
    assert "gradient" in broken_bars(observed, one_process()), figures(observed, one_process())


def test_without_a_fault_it_is_the_run_of_one_process() -> None:
    assert not broken_bars(observe(*V3_TINY, *TP, ranks=2), one_process())


def test_published_files_have_a_layer_more(tmp_path: Path) -> None:
    """Which predicts a second token: its tensors are no mistake, and others behind it are."""
    model = meta_model(Model(name="deepseek_v3", flavor="tiny_sigmoid"))
    parts = [part for name, each in model.named_parameters() for part in weights._pieces(model, name, each)]
    shapes = {part.name: tuple(piece.shape) for part, piece in parts}
    behind = model.config.n_layers
    more = {f"model.layers.{behind}.eh_proj.weight": (3, 3), f"model.layers.{behind}.embed_tokens.weight": (3, 3)}
    save_file({name: torch.zeros(shape) for name, shape in (shapes | more).items()}, tmp_path / "model.safetensors")
    weights.check_weights(model, tmp_path)
    shapes[f"model.layers.{behind + 1}.eh_proj.weight"] = (3, 3)
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"model.layers.{behind + 1}.eh_proj.weight is not in this model"):
        weights.check_weights(model, tmp_path)
