"""Layouts that are refused, each with its reason; and models that are not there."""

import pytest

from components.config import ConfigError, JobConfig, load_config
from parallelize.mesh import resolve_degrees
from parallelize.rules import RULES, broken_rules, check_layout, check_model


def config_of(*overrides: str) -> JobConfig:
    return load_config(list(overrides))


CASES = {
    "parallelism.tensor_parallel_degree": ("--parallelism.tensor_parallel_degree", "2"),
    "parallelism.context_parallel_degree": ("--parallelism.context_parallel_degree", "2"),
    "parallelism.pipeline_parallel_degree": ("--parallelism.pipeline_parallel_degree", "2"),
    "training.global_batch_size": ("--training.local_batch_size", "2", "--training.global_batch_size", "6"),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.key)
def test_each_rule_refuses_its_case_and_no_other(rule: object) -> None:
    key = rule.key  # type: ignore[attr-defined]
    config = config_of(*CASES[key])
    broken = list(broken_rules(config, resolve_degrees(config, 4)))
    assert len(broken) == 1
    assert key in broken[0]


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


def test_an_unknown_model_or_flavor_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r'model.name = "lama": not one of llama; did you mean llama\?'):
        check_model(config_of("--model.name", "lama"))
    with pytest.raises(ConfigError, match=r'model.flavor = "8b": not one of .*405B.*; did you mean 8B\?'):
        check_model(config_of("--model.flavor", "8b"))
