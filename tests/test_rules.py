"""Layouts that are refused, each with its reason; and models that are not there."""

import dataclasses
import functools
import re
from typing import Any

import pytest
import torch

from components.config import ROOT, ConfigError, JobConfig, load_config
from models import MODELS
from models.llama import FLAVORS
from parallelize import rules
from parallelize.mesh import resolve_degrees
from parallelize.rules import RULES, broken_rules, check_layout, check_model, warnings
from tests.figures import broken_bars
from tests.harness import observe
from tests.small import SMALL


def config_of(*overrides: str) -> JobConfig:
    return load_config(list(overrides))


TP, CP = "--parallelism.tensor_parallel_degree", "--parallelism.context_parallel_degree"
METHOD, LENGTH = "--parallelism.context_parallel_method", "--training.seq_len"
LORA = ("--lora.rank", "4", "--lora.target_modules", '["wqq"]')
KERNEL = "--model.attention_kernel"
ROPE, SINKS = "--model.rope_scaling.", ("--model.name", "gpt_oss", "--model.flavor", "tiny")
GLOBAL, LOCAL = "--training.global_batch_size", "--training.local_batch_size"
PP, SCHEDULE = "--parallelism.pipeline_parallel_degree", "--parallelism.pipeline_parallel_schedule"
MICRO, RESHARD = "--parallelism.pipeline_parallel_microbatch_size", "--parallelism.fsdp_reshard_after_forward"
SHARD = "--parallelism.data_parallel_shard_degree"
STAGE = "--parallelism.pipeline_parallel_layers_per_stage"
LIGHTER = "--parallelism.pipeline_parallel_first_stage_less_layers"
MODULES = ("--parallelism.module_fqns_per_model_part", '[["tok_embeddings", "layers.0"], ["norm", "output"]]')
EP, EXPERTS = "--parallelism.expert_parallel_degree", ("--model.name", "qwen3_moe", "--model.flavor", "tiny")
LATENTS = ("--model.name", "deepseek_v3", "--model.flavor", "tiny")
SPLITS = "--parallelism.pipeline_parallel_sequence_splits"
REDUCE = "--parallelism.fsdp_reduce_gradients"
COMPILE = ("--compile.enable", "true")
BUDGET = ("--activation_checkpoint.mode", "memory_budget")
SCALED = ("--model.converters", '["quantize.linear.float8"]')
OP = ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op")
LOG = ("--activation_checkpoint.mode", "full", "--activation_checkpoint.debug", "true")
ASYNC = "--parallelism.enable_async_tensor_parallel"
FLOAT8 = (*SCALED, "--quantize.linear.float8.emulate", "true")
ROWWISE = (*SCALED, "--quantize.linear.float8.recipe_name", "rowwise")
BFLOAT16 = ("--training.dtype", "bfloat16")
SIX = {"n_layers": 6}
NARROW, WIDE = ({"n_heads": 16, "n_kv_heads": heads, "ffn_dim": ffn} for heads, ffn in ((2, 120), (16, 64)))


@dataclasses.dataclass(frozen=True)
class Refused:
    """A layout that breaks one rule, what the rule says, and what happens without it."""

    rule: str
    layout: tuple[str, ...]
    says: str
    without: str
    """"error", the name of a figure that breaks, or empty where no rank does anything with it yet."""
    ranks: int = 2
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Sizes that differ from the harness's tiny model."""
    run: tuple[str, ...] = ()
    """Settings that one process has too."""


CASES = [
    Refused("stages", (PP, "2", SCHEDULE, "GPipe", STAGE, "3"), "on 2 ranks it needs 2 stages", "error", model=SIX),
    Refused("stages", (PP, "2", SCHEDULE, "DualPipeV", STAGE, "6"), "needs 4 stages, not 2", "error", model=SIX),
    Refused("stages", (PP, "2", SCHEDULE, "LoopedBFS", STAGE, "3"), "it needs 4, 6, .+ stages", "error", model=SIX),
    Refused("layers", (PP, "2", SCHEDULE, "LoopedBFS", LIGHTER, "4"), "2 layers are too few for 4 stages", "error"),
    Refused("modules", (PP, "2", *MODULES), "look at layers.1", "weights at step 0"),
    Refused("micro-batches", (PP, "2", MICRO, "5"), "local_batch_size = 36 is no multiple; 35 or 40 would", "error"),
    Refused("micro-batches", (PP, "2", MICRO, "36"), "1 micro-batches, but 1F1B needs as many as stages, 2", "error"),
    Refused(
        "micro-batches",
        (PP, "2", MICRO, "4", SCHEDULE, "Interleaved1F1B"),
        "9 micro-batches, but Interleaved1F1B needs a multiple of 4: 8 or 10 would be",
        "error",
        model=SIX,
    ),
    Refused("splits", (SPLITS, "33", PP, "2"), "sequences have 32 tokens; 32 parts or fewer would do", "", ranks=2),
    Refused("splits", (SPLITS, "2"), "parts of sequences need parallelism.pipeline_parallel_degree of 2", "", ranks=1),
    Refused("splits", (SPLITS, "2", PP, "2", SCHEDULE, "GPipe"), 'need .*schedule = "1F1B"', ""),
    Refused("splits", (SPLITS, "2", PP, "2", CP, "2"), "need .*context_parallel_degree = 1", "", ranks=4),
    Refused(
        "reshard",
        (PP, "2", SHARD, "2", LOCAL, "18", MICRO, "3", SCHEDULE, "DualPipeV", RESHARD, "always"),
        "gradients would be wrong without an error",
        "gradient",
        ranks=4,
        model=SIX,
    ),
    Refused("reduce", (PP, "2", REDUCE, "each"), '"last" would do', "", model=SIX),
    Refused("sums", (SHARD, "2", LOCAL, "6", REDUCE, "each"), '"last" adds them up in float32', "", run=BFLOAT16),
    Refused("turns", (PP, "2", LOCAL, "18", MICRO, "6"), "after each 18 sequences; 36 would be", "", run=BFLOAT16),
    Refused(
        "blocks",
        (TP, "32", "--optimizer.state_dtype", "int8"),
        "32 ranks would cut .*: n_heads x head_dim 64, ffn_dim 128; ",
        "",
        ranks=32,
        model={"n_heads": 32, "n_kv_heads": 32},
    ),
    Refused(
        "checkpointing per operation",
        (*OP, "--compile.enable", "true", CP, "2", "--parallelism.context_parallel_method", "ulysses"),
        "gradients would be wrong without an error",
        "gradient",
    ),
    Refused("log of operations", (*LOG, *OP), 'selective_ac_option = "1" would do', "error", ranks=1),
    Refused("log of operations", (*LOG, *COMPILE), "no operation that could be logged", "error", ranks=1),
    Refused("log of operations", (*LOG, PP, "2", SCHEDULE, "DualPipeV"), "each layer twice again", "error", 2, SIX),
    *(
        Refused("memory budget", (*BUDGET, *more), "the compiler keeps to the budget: it needs", "", ranks=1)
        for more in ((), (*COMPILE, "--compile.components", '["loss"]'), (*COMPILE, "--compile.backend", "eager"))
    ),
    Refused("async tensor parallel", (ASYNC, "true"), "it needs parallelism.tensor_parallel_degree of 2 or", "", 1),
    Refused("async tensor parallel", (ASYNC, "true", TP, "2"), "it needs compile.enable = true", ""),
    Refused(
        "async tensor parallel",
        (ASYNC, "true", TP, "2", "--parallelism.sequence_parallel", "false", *COMPILE),
        "it needs parallelism.sequence_parallel = true$",
        "",
    ),
    Refused("float8", (*SCALED, TP, "2"), "not so: n_kv_heads x head_dim 4, ffn_dim 60", "", model=NARROW),
    Refused("float8", (*ROWWISE, LENGTH, "30", LOCAL, "2"), r"tokens of a pass \(recipe rowwise\) 60$", "", 1, WIDE),
    Refused("backend", (*COMPILE, "--compile.backend", "inductr"), "did you mean inductor", "error", ranks=1),
    Refused("rope scaling", (ROPE + "beta_fast", "16"), "does not take beta_fast; yarn would", "", ranks=1),
    Refused("rope scaling", (ROPE + "rope_type", "yarn"), "stretches nothing with factor = 1", "", ranks=1),
    Refused("adapters", LORA, "wqq is no matrix of the layers; did you mean wq?", "error", ranks=1),
    Refused("blocks of a base", ("--lora.rank", "4", "--lora.base", "nf4", TP, "2"), "no whole blocks of 64", ""),
    Refused("attention kernel", (CP, "2", KERNEL, "sdpa"), "the ring has kernels of its own", ""),
    Refused("attention kernel", (KERNEL, "sdpa", *SINKS), "the sinks of gpt_oss has kernels of its own", "", ranks=1),
    Refused(
        "key/value heads",
        (TP, "2"),
        "3 key/value heads.*degrees that can: 1, 3, 6, 9",
        "gradient",
        model={"n_heads": 12, "n_kv_heads": 3, "dim": 96},
    ),
    Refused("key/value heads", (TP, "4", *FLOAT8), "a part of the matrices of 2 key/value heads", "gradient", ranks=4),
    Refused(
        "attention heads",
        (TP, "4"),
        "6 attention heads.*degrees that can: 1, 2, 3, 6",
        "error",
        ranks=4,
        model={"n_heads": 6, "n_kv_heads": 2, "dim": 96},
    ),
    Refused("latents", (TP, "2"), "each multiply latents with whole matrices", "gradient", run=(*LATENTS, *FLOAT8)),
    Refused("feed-forward", (TP, "2"), "131 feed-forward columns", "error", model={"ffn_dim": 131}),
    Refused(
        "vocabulary",
        (TP, "2", SHARD, "3", LOCAL, "12"),
        "share 1027 rows of the vocabulary unevenly.*; 1, 2, 4, .* FSDP ranks would do",
        "weights at step 0",
        ranks=6,
        model={"vocab_size": 1027},
    ),
    Refused(
        "ulysses",
        (CP, "4", METHOD, "ulysses"),
        "6 heads and 3 key/value heads.* context_parallel_degree = 1 or 3 would do",
        "error",
        ranks=4,
        model={"n_heads": 6, "n_kv_heads": 3, "dim": 96},
    ),
    Refused(
        "ulysses",
        (TP, "2", CP, "2", METHOD, "ulysses"),
        "3 heads and 1 key/value heads.* context_parallel_degree = 1 would do",
        "",
        ranks=4,
        model={"n_heads": 6, "n_kv_heads": 1, "dim": 96},
    ),
    Refused("experts' ranks", (TP, "2", EP, "2"), "llama changed has no experts; 1 would do", ""),
    Refused("experts' ranks", (*EXPERTS, TP, "2", EP, "4"), "8 experts on 2 ranks.*; 1 or 2 would do", ""),
    *(
        Refused(f"experts.{key}", (f"--experts.{key}", "0.1"), "llama changed has no experts; 0 would do", "", ranks=1)
        for key in ("bias_update_speed", "sequence_loss_factor", "z_loss_factor")
    ),
    Refused(
        "experts of parts",
        (*EXPERTS, PP, "2", SPLITS, "2", "--experts.sequence_loss_factor", "0.1"),
        "a part does not know the experts of later parts",
        "",
    ),
    Refused(
        "biases beside adapters",
        (*EXPERTS, "--lora.rank", "4", "--experts.bias_update_speed", "0.1"),
        "biases of routers, which are frozen beside adapters",
        "",
        ranks=1,
    ),
    Refused(
        "export of biases",
        (*EXPERTS, "--experts.bias_update_speed", "0.1", "--checkpoint.last_save_in_hf", "--checkpoint.enable"),
        "have no place for the biases",
        "",
        ranks=1,
    ),
    Refused("global_batch_size", (LOCAL, "12"), "x 2 batch ranks; 24 or 48 would be", "tokens"),
]  # fmt: skip


def plant(model: dict[str, Any], without_rules: bool) -> None:
    """Give the harness's model other sizes; take the rules away."""
    FLAVORS["changed"] = dataclasses.replace(FLAVORS["tiny"], **model)
    if without_rules:
        rules.RULES.clear()


def each(cases: list[Refused]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.rule)


def settings(case: Refused) -> list[str]:
    return ["--model.flavor", "changed", *case.run, *case.layout]


@each(CASES)
def test_each_rule_refuses_its_case_and_no_other(case: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FLAVORS, "changed", dataclasses.replace(FLAVORS["tiny"], **case.model))
    config = config_of(*SMALL, *settings(case))
    broken = list(broken_rules(config, resolve_degrees(config, case.ranks)))
    assert len(broken) == 1
    assert re.search(case.says, broken[0])


def test_every_rule_has_a_case() -> None:
    assert len({case.rule for case in CASES}) == len(RULES)


def refusals() -> str:
    """docs/refusals.md: each rule, what it says of its first case here, and why."""
    said: dict[str, str] = {}
    for case in CASES:
        plant(case.model, without_rules=False)
        config = config_of(*SMALL, *settings(case))
        for rule in RULES:
            if reason := rule.misfit(config, resolve_degrees(config, case.ranks)):
                said.setdefault(rule.why, re.sub("not one of [^;]*", "not one of ...", reason))
    lines = [
        *("# What is refused, and why", ""),
        "Written by `python -m tests.test_rules` from the table of rules, `parallelize/rules/`. A layout that breaks a",
        "rule is refused before launch. Of each rule: the key that it names, what it says of a case of",
        "`tests/test_rules.py`, and why such a layout cannot be, or what it would take.",
        *("", "| key | for example | why |", "|---|---|---|"),
        *(f"| `{rule.key}` | {said[rule.why]} | {rule.why} |" for rule in RULES),
    ]
    return "\n".join(lines) + "\n"


REFUSALS = ROOT / "docs" / "refusals.md"


def test_the_page_of_refusals_is_the_table_of_rules() -> None:
    """If it is not: python -m tests.test_rules"""
    assert REFUSALS.read_text() == refusals()


@each([case for case in CASES if case.without])
def test_what_would_happen_without_the_rule(case: Refused) -> None:
    if "--compile.enable" in case.layout and " " in torch.__file__:
        pytest.skip("inductor cannot link with a torch whose path has a space")
    plain = functools.partial(plant, case.model, without_rules=True)
    reference = observe("--model.flavor", "changed", *case.run, mutate=plain, steps=2)
    try:
        observed = observe(*settings(case), mutate=plain, ranks=case.ranks, steps=2)
    except RuntimeError:
        assert case.without == "error"
        return
    assert case.without in broken_bars(observed, reference)


def test_one_reduction_of_gradients_in_bfloat16_is_accepted() -> None:
    config = config_of(*SMALL, *BFLOAT16, SHARD, "2", LOCAL, "18", REDUCE, "each")
    check_layout(config, resolve_degrees(config, 2))


def test_a_batch_that_does_not_divide_names_those_that_do() -> None:
    config = config_of("--training.local_batch_size", "2", "--training.global_batch_size", "30")
    with pytest.raises(ConfigError, match="24 or 32 would be"):
        check_layout(config, resolve_degrees(config, 4))


def test_an_accepted_layout_breaks_no_rule() -> None:
    config = config_of("--parallelism.data_parallel_replicate_degree", "2")
    check_layout(config, resolve_degrees(config, 8))


@pytest.mark.parametrize(
    ("overrides", "world_size", "fits"),
    [
        (("--parallelism.tensor_parallel_degree", "3"), 8, "tensor_parallel_degree = 2; tensor_parallel_degree = 4"),
        (("--parallelism.data_parallel_shard_degree", "4"), 2, "data_parallel_shard_degree = 2; NGPU=4"),
        (("--parallelism.data_parallel_shard_degree", "1"), 2, "data_parallel_replicate_degree = 2"),
    ],
)
def test_a_product_that_is_not_the_ranks_names_what_fits(
    overrides: tuple[str, ...], world_size: int, fits: str
) -> None:
    with pytest.raises(ConfigError, match=fits):
        resolve_degrees(config_of(*overrides), world_size)


def test_a_degree_that_was_set_is_used() -> None:
    for replicas in (1, 2, 4):
        degrees = resolve_degrees(config_of("--parallelism.data_parallel_replicate_degree", str(replicas)), 8)
        assert (degrees.dp_replicate, degrees.dp_shard) == (replicas, 8 // replicas)


def test_an_unknown_schedule_names_the_nearest() -> None:
    config = config_of(SCHEDULE, "DualpipeV")
    with pytest.raises(ConfigError, match=r'schedule = "DualpipeV": not one of 1F1B, .*; did you mean DualPipeV\?'):
        check_layout(config, resolve_degrees(config, 1))


def test_an_unknown_model_or_flavor_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=rf'"lama": not one of {", ".join(MODELS)}; did you mean llama\?'):
        check_model(config_of("--model.name", "lama"))
    with pytest.raises(ConfigError, match=r'model.flavor = "8b": not one of .*405B.*; did you mean 8B\?'):
        check_model(config_of("--model.flavor", "8b"))


def test_tensor_parallel_over_nodes_is_warned_of() -> None:
    config = config_of("--parallelism.tensor_parallel_degree", "4")
    degrees = resolve_degrees(config, 16)
    assert "a group of 4 ranks spans nodes of 2" in warnings(config, degrees, 2, on_cpu=False)[0]
    assert warnings(config, degrees, 8, on_cpu=False) == []


def test_a_pipeline_that_is_mostly_idle_is_warned_of() -> None:
    config = config_of(PP, "4", LOCAL, "2")
    assert (
        "2 micro-batches leave 4 pipeline ranks idle"
        in warnings(config, resolve_degrees(config, 4), 4, on_cpu=False)[0]
    )
    for enough in ((LOCAL, "4"), (LOCAL, "2", SPLITS, "2")):
        config = config_of(PP, "4", *enough)
        assert warnings(config, resolve_degrees(config, 4), 4, on_cpu=False) == []


if __name__ == "__main__":
    REFUSALS.write_text(refusals())
