"""The models against Hugging Face's, on small random configurations: everything later is proven equal to these."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from components import config
from components.config import JobConfig, Model, to_dict
from components.state.folder import chosen_model
from components.state.init import initialize_weights
from models import MODELS, meta_model, qwen3, sizes
from models.config import TransformerConfig
from models.hugging_face import Part
from models.llama import FLAVORS, Llama
from models.rotary import RopeScaling
from models.transformer import Transformer
from parallelize import parallelize_model
from parallelize.mesh import Degrees, Mesh
from tests.ranks import group_of_one

transformers = pytest.importorskip("transformers")

QWEN3 = {"n_heads": 4, "head_size": 24}
EXPERTS = {"n_experts": 8, "top_k": 3, "expert_dim": 20}
YARN = RopeScaling("yarn", 8.0, 32, truncate=False)
GEMMA3 = {"head_size": 24, "query_size": 40, "window": 7, "full_every": 2}
OLMO3 = {"window": 7, "full_every": 2, "rope_scaling": RopeScaling("yarn", 8.0, 32)}
GRANITE = {"attention_multiplier": 0.5, "logits_scaling": 3.0, "embedding_multiplier": 7.0, "residual_multiplier": 0.3}
DEEPSEEK = {
    "family": "deepseek_v3",
    "n_kv_heads": 8,
    "n_dense_layers": 1,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "nope_dim": 12,
    "rope_dim": 8,
    "v_dim": 10,
    "n_shared": 2,
    "rope_scaling": RopeScaling("yarn", 40.0, 16, mscale=0.707, mscale_all_dim=0.707),
    **EXPERTS,
}
GLM4 = {"family": "glm4_moe", "head_size": 24, "route_scale": 2.5, **EXPERTS}
LONG = RopeScaling("longrope", 8.0, 128, short_factor=(1.0, 1.5, 2.0, 3.5), long_factor=(1.0, 2.0, 7.5, 30.0))
PHI3 = {"dim": 128, "rotary_fraction": 0.5, "rope_scaling": LONG, "context_length": 1024}
SIGMOID = {"score": "sigmoid", "n_groups": 4, "top_groups": 2, "route_scale": 2.5}
SOFTMAX = {"score": "softmax", "normalised": False}
CASES: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "one key head": {"n_kv_heads": 1},
    "all key heads": {"n_kv_heads": 8},
    "scaled rotary": {"rope_scaling": RopeScaling(factor=8.0, original_max_position_embeddings=32)},
    "tied": {"tie_embeddings": True},
    "tied and scaled": {
        "tie_embeddings": True,
        "rope_scaling": RopeScaling(factor=32.0, original_max_position_embeddings=16),
    },
    "qwen3": {"family": "qwen3", **QWEN3},
    "qwen3, tied": {"family": "qwen3", "tie_embeddings": True, **QWEN3},
    "biases and another gate": {**dict.fromkeys(("qkv_bias", "output_bias", "ffn_bias"), True), "hidden_act": "gelu"},
    "qwen3, biases": {"family": "qwen3", "qkv_bias": True, "output_bias": True, "hidden_act": "relu2", **QWEN3},
    "olmo2": {"family": "olmo2"},
    "olmo2, all key heads": {"family": "olmo2", "n_kv_heads": 8},
    "olmo3": {"family": "olmo3", **OLMO3},
    "olmo3, two bases, not stretched": {"family": "olmo3", **OLMO3, "window_rope_theta": 1e4, "rope_scaling": None},
    "olmo3, windows in all layers": {"family": "olmo3", **OLMO3, "full_every": 0, "hidden_act": "relu"},
    "smollm3": {"family": "smollm3", "n_layers": 5, "no_rope_every": 2},
    "smollm3, biases": {"family": "smollm3", "qkv_bias": True, "output_bias": True, "ffn_bias": True},
    "smollm3, stretched": {"family": "smollm3", "n_layers": 4, "rope_scaling": YARN, "tie_embeddings": False},
    "granite": {"family": "granite", **GRANITE},
    "granite, not tied": {"family": "granite", "tie_embeddings": False, "ffn_bias": True, **GRANITE},
    "qwen2": {"family": "qwen2"},
    "qwen2, one key head, tied": {"family": "qwen2", "n_kv_heads": 1, "tie_embeddings": True},
    "mistral": {"family": "mistral", "window": 7},
    "mistral, no window": {"family": "mistral"},
    "gemma3": {"family": "gemma3", "tie_embeddings": False, **GEMMA3},
    "gemma3, tied and stretched": {
        "family": "gemma3",
        "rope_scaling": RopeScaling("linear", factor=8.0),
        **GEMMA3,
    },
    "deepseek_v3": {**DEEPSEEK, **SIGMOID},
    "deepseek_v3, not stretched": {**DEEPSEEK, **SIGMOID, "rope_scaling": None, "q_lora_rank": None},
    "deepseek_v2": {**DEEPSEEK, **SOFTMAX, "q_lora_rank": None},
    "deepseek_v2, in groups": {**DEEPSEEK, **SOFTMAX, "n_groups": 4, "top_groups": 2, "route_scale": 16.0},
    "qwen3_moe": {"family": "qwen3_moe", **QWEN3, **EXPERTS},
    "gpt_oss": {"family": "gpt_oss", **EXPERTS, "n_kv_heads": 2, "head_size": 16, "window": 17, "rope_scaling": YARN},
    "yarn": {"rope_scaling": RopeScaling("yarn", 4.0, 512)},
    "linear scaling": {"family": "qwen3", **QWEN3, "rope_scaling": RopeScaling("linear", 4.0)},
    "qwen3_moe, not normalised": {"family": "qwen3_moe", "normalised": False, **QWEN3, **EXPERTS},
    "mixtral": {"family": "mixtral", **EXPERTS, "window": 7},
    "mixtral, another head width": {"family": "mixtral", **EXPERTS, "head_size": 24},
    "glm4_moe": {**GLM4, "qk_norm": True, "n_groups": 4, "top_groups": 2},
    "glm4_moe, a part of the rotation scaled": {**GLM4, "qkv_bias": False, "normalised": False, "rope_scaling": YARN},
    "phi3": {"family": "phi3", "window": 7},
    "phi3, longrope": {"family": "phi3", **PHI3},
    "phi3, another amplitude": {"family": "phi3", **PHI3, "context_length": 2048, "tie_embeddings": True},
    "yarn, another amplitude": {"rope_scaling": RopeScaling("yarn", 4.0, 512, attention_factor=1.3)},
    "longrope": {"rope_scaling": replace(LONG, factor=16.0, attention_factor=0.8)},
}


def build_pair(length: int, family: str = "llama", **changes: Any) -> tuple[Transformer, torch.nn.Module]:
    sized = type(MODELS[family][1]["debug"])(
        **{"dim": 64, "n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "ffn_dim": 96, "vocab_size": 300, **changes}
    )
    ours = MODELS[family][0](sized)
    # A token that pads has no gradient there.
    given = ours.hf_config() | {"attn_implementation": "eager", "pad_token_id": None}
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**given))
    initialize_weights(ours, ours.init_std, seed=0)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if ours.kind(name).role == "norm":  # ones would hide a norm that is left out
                parameter.add_(torch.linspace(-0.5, 0.5, parameter.numel()))
            elif ours.kind(name).role == "bias":
                parameter.copy_(torch.linspace(-0.2, 0.2, parameter.numel()).view_as(parameter))
            elif name != "tok_embeddings.weight":
                parameter.mul_(5)  # attention that is not close to uniform
            if name.endswith("router.bias") and ours.hf_name(name):
                parameter.copy_(torch.linspace(-0.3, 0.3, parameter.numel()))
            if ours.hf_name(name):
                theirs_of(ours, theirs, name, lambda reference: reference).copy_(parameter)
    return ours, theirs


def theirs_of(ours: Transformer, theirs: torch.nn.Module, name: str, of: Callable[[Any], Any]) -> Tensor:
    """Their parameter, or its gradient; transformers stacks the matrices of experts, two of them in one."""
    there = ours.hf_name(name)
    if isinstance(there, Part):
        return there.of(of(theirs.get_parameter(there.name)))
    module, _, projection = there.replace("block_sparse_moe", "mlp").partition(".*.")
    if not projection:
        owner, _, leaf = module.rpartition(".")
        return of(getattr(theirs.get_submodule(owner), leaf))
    experts: Any = theirs.get_submodule(module)
    if projection in ("down_proj.weight", "w2.weight"):
        return of(experts.down_proj)
    return of(experts.gate_up_proj).chunk(2, 1)[projection in ("up_proj.weight", "w3.weight")]


def relative_error(value: Tensor, reference: Tensor) -> float:
    return ((value - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("length", [96, 300], ids=["plain attention", "fused attention"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_those_of_transformers(case: str, length: int) -> None:
    ours, theirs = build_pair(length, **CASES[case])
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 300, (2, length), generator=generator)
    labels = torch.randint(0, 300, (2, length), generator=generator)
    labels[0, :40] = -100

    logits = theirs(tokens).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    assert relative_error(ours(tokens), logits) < 1e-5
    ours(tokens, labels).backward()
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert relative_error(parameter.grad, theirs_of(ours, theirs, name, lambda each: each.grad)) < 1e-5, name


def test_positions_move_the_rotation() -> None:
    ours, _ = build_pair(64)
    tokens = torch.arange(64)[None]
    shifted = ours(tokens, positions=torch.arange(64)[None] + 1000)
    assert relative_error(shifted, ours(tokens)) < 1e-4, "rotary attention sees only differences of positions"
    stretched = ours(tokens, positions=torch.arange(64)[None] * 2)
    assert relative_error(stretched, ours(tokens)) > 1e-3


def test_no_valid_label_is_a_loss_of_zero_with_gradients_of_zero() -> None:
    ours, _ = build_pair(32)
    loss = ours(torch.zeros(1, 32, dtype=torch.long), torch.full((1, 32), -100))
    loss.backward()
    assert loss.item() == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in ours.parameters())


@pytest.mark.parametrize(
    ("flavor", "billions"), [("1B", 1.236), ("3B", 3.213), ("8B", 8.030), ("70B", 70.554), ("405B", 405.853)]
)
def test_published_sizes(flavor: str, billions: float) -> None:
    with torch.device("meta"):
        model = Llama(FLAVORS[flavor])
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 3) == billions


@pytest.mark.parametrize(
    ("flavor", "billions"), [("0.6B", 0.44), ("1.7B", 1.41), ("4B", 3.63), ("8B", 6.95), ("14B", 13.21), ("32B", 31.21)]
)
def test_published_sizes_of_qwen3(flavor: str, billions: float) -> None:
    """Published are parameters without embedding and head: 0.44, 1.4, 3.6, 6.95, 13.2 and 31.2 billion."""
    with torch.device("meta"):
        model = qwen3.Qwen3(qwen3.FLAVORS[flavor])
    ends = ("tok_embeddings.weight", "output.weight")
    numbers = [parameter.numel() for name, parameter in model.named_parameters() if name not in ends]
    assert round(sum(numbers) / 1e9, 2) == billions


PUBLISHED = {
    ("qwen2", "0.5B"): 494_032_768,
    ("qwen2", "1.5B"): 1_543_714_304,
    ("qwen2", "3B"): 3_085_938_688,
    ("qwen2", "7B"): 7_615_616_512,
    ("qwen2", "14B"): 14_770_033_664,
    ("qwen2", "32B"): 32_763_876_352,
    ("qwen2", "72B"): 72_706_203_648,
    ("mistral", "7B-v0.1"): 7_241_732_096,
    ("mistral", "7B"): 7_248_023_552,
    ("olmo2", "1B"): 1_484_916_736,
    ("olmo2", "7B"): 7_298_617_344,
    ("olmo2", "13B"): 13_716_198_400,
    ("olmo2", "32B"): 32_234_279_936,
    ("olmo3", "7B"): 7_298_011_136,
    ("olmo3", "32B"): 32_233_522_176,
    ("smollm3", "3B"): 3_075_098_624,
    ("granite", "3.3-2B"): 2_533_539_840,
    ("granite", "3.3-8B"): 8_170_864_640,
    ("mixtral", "8x7B"): 46_702_792_704,
    ("mixtral", "8x22B"): 140_620_634_112,
    ("phi3", "3-mini-4k"): 3_821_079_552,
    ("phi3", "3-mini-128k"): 3_821_079_552,
    ("phi3", "3-medium-4k"): 13_960_238_080,
    ("phi3", "4"): 14_659_507_200,
    ("phi3", "4-mini"): 3_836_021_760,
    ("gemma3", "270M"): 268_098_176,
    ("gemma3", "1B"): 999_885_952,
    ("gemma3", "4B"): 4_300_079_472 - 416_866_032 - 1152 * (2560 + 1),
    ("gemma3", "12B"): 12_187_325_040 - 416_866_032 - 1152 * (3840 + 1),
    ("gemma3", "27B"): 27_432_406_640 - 416_866_032 - 1152 * (5376 + 1),
}
"""Parameters in the files of published weights, without the part of Gemma 3 that looks at pictures."""


@pytest.mark.parametrize(("family", "flavor"), PUBLISHED)
def test_as_many_parameters_as_in_published_files(family: str, flavor: str) -> None:
    with torch.device("meta"):
        model = MODELS[family][0](MODELS[family][1][flavor])
    published = (parameter for name, parameter in model.named_parameters() if model.hf_name(name))
    assert sum(parameter.numel() for parameter in published) == PUBLISHED[family, flavor]


def test_flops_follow_the_published_formulas() -> None:
    """8B at 8192 tokens: torchtitan's formula, by hand."""
    with torch.device("meta"):
        model = Llama(FLAVORS["8B"])
    full, causal = model.flops_per_token(8192)
    norms = 65 * 4096
    matmul = sum(parameter.numel() for parameter in model.parameters()) - norms - 128_256 * 4096
    assert full == 6 * matmul + 12 * 32 * 32 * 128 * 8192
    assert causal == 6 * matmul + 6 * 32 * 32 * 128 * 8192


def stretched(**rope: Any) -> TransformerConfig:
    return sizes(Model(name="qwen3", flavor="8B", rope_scaling=config.RopeScaling(**rope)))


def test_a_job_file_stretches_rotary_positions() -> None:
    flavor = MODELS["qwen3"][1]["8B"]
    assert stretched() == stretched(rope_type="none") == flavor
    longer = stretched(rope_type="yarn", factor=4.0, original_max_position_embeddings=32_768)
    assert longer == replace(flavor, rope_scaling=RopeScaling("yarn", 4.0, 32_768), context_length=131_072)
    assert stretched(rope_type="linear", factor=2.0).context_length == 2 * flavor.context_length
    none = Model(name="llama", flavor="8B", rope_scaling=config.RopeScaling(rope_type="none"))
    assert sizes(none).rope_scaling is None
    assert meta_model(none).hf_config()["rope_scaling"] is None


def test_the_training_length_chooses_the_factors_of_longrope() -> None:
    """Not the length of a forward, which may be a rank's part of a sequence. Their factors are by the last position."""
    ours: Any
    theirs: Any
    ours, theirs = build_pair(64, **CASES["phi3, longrope"])
    tokens = torch.arange(64)[None]
    assert relative_error(ours(tokens), theirs(tokens).logits) < 1e-5
    ours.seq_len = 300
    theirs.config.rope_parameters["original_max_position_embeddings"] = 32
    assert relative_error(ours(tokens), theirs(tokens).logits) < 1e-5
    with group_of_one():
        job = JobConfig(training=config.Training(seq_len=77))
        (stage,) = parallelize_model("phi3")(ours, Mesh(Degrees(), "cpu"), job)
    assert stage.seq_len == 77


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rotary_fraction": 0.7}, "rotary_fraction = 0.7: RoPE would rotate 11 of 16 columns"),
        ({"rotary_fraction": 0.0}, "rotary_fraction = 0: RoPE would rotate 0 of 16 columns"),
        ({"rotary_fraction": 1.5}, "rotary_fraction = 1.5: RoPE would rotate 24 of 16 columns"),
        (
            {"rope_scaling": replace(LONG, short_factor=(1.0,) * 5)},
            "short_factor has 5 numbers: use 4 positive numbers",
        ),
        (
            {"rope_scaling": replace(LONG, long_factor=(1.0, 0.0, 1.0, 1.0))},
            "long_factor has 4 numbers: use 4 positive",
        ),
        ({"rotary_fraction": 0.25, "rope_scaling": LONG}, "short_factor has 4 numbers: use 2 positive numbers"),
    ],
)
def test_a_rotation_that_does_not_fit_the_heads_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_pair(64, **CASES["phi3, longrope"] | change)


def test_a_longrope_of_the_flavor_gives_way_to_that_of_the_job_file() -> None:
    asked = config.RopeScaling(rope_type="yarn", factor=4.0)
    longer = sizes(Model(name="phi3", flavor="4-mini", rope_scaling=asked))
    assert (longer.rope_scaling, longer.context_length) == (RopeScaling("yarn", 4.0, 4096), 16_384)


def test_what_reads_a_run_knows_its_rotary_positions_and_adapters() -> None:
    """generate, export and merge: run.json has the whole job file, and older ones neither."""
    rope, lora = config.RopeScaling(rope_type="yarn", factor=2.0), config.Lora(rank=4, target_modules=["wq"])
    model = Model(name="qwen3", flavor="8B", rope_scaling=rope, lora=lora)
    assert chosen_model(to_dict(JobConfig(model=model))) == model
    assert chosen_model({"model": {"name": "qwen3", "flavor": "8B"}}) == Model(name="qwen3", flavor="8B")


def test_flops_of_a_window_count_the_keys_in_it() -> None:
    """gpt-oss-20b at 4096 tokens: 22.93 GFLOPs a token, of which a window's layers have 128 - 128 * 127 / 8192 keys."""
    model = meta_model(Model(name="gpt_oss", flavor="20b"))
    assert [round(each / 1e9, 2) for each in model.flops_per_token(4096)] == [24.13, 22.93]
    assert model.config.keys_seen(0, 4096) == (128, 128 - 128 * 127 / 8192)
    assert model.config.keys_seen(1, 4096) == (4096, 2048)


@pytest.mark.parametrize(("flavor", "billions"), [("20b", 20.915), ("120b", 116.829)])
def test_published_sizes_of_gpt_oss(flavor: str, billions: float) -> None:
    parameters = meta_model(Model(name="gpt_oss", flavor=flavor)).parameters()
    assert round(sum(parameter.numel() for parameter in parameters) / 1e9, 3) == billions


def test_a_layer_with_a_window_counts_the_keys_in_it() -> None:
    """Gemma 3 1B at 8192 tokens: 22 layers with windows of 512, and 4 without."""
    with torch.device("meta"):
        model = MODELS["gemma3"][0](MODELS["gemma3"][1]["1B"])
    full, causal = model.flops_per_token(8192)
    matmul = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)
    assert full == 6 * matmul + 12 * 4 * 256 * (22 * 512 + 4 * 8192)
    in_windows = sum(min(place, 512) for place in range(1, 8193)) / 8192
    assert causal == 6 * matmul + 12 * 4 * 256 * (22 * in_windows + 4 * 8192 / 2)
