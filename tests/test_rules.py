"""Layouts that are refused, each with its reason; and models that are not there."""

import dataclasses
import functools
import re
from typing import Any
from unittest import mock

import pytest
import torch

from components.commands.figures import broken_bars
from components.config import ROOT, ConfigError, JobConfig, Rule, broken_rules, load, load_config
from components.config.contradictions import CONTRADICTIONS
from components.config.optimizer import OPTIMIZER_KEYS
from models import MODELS
from models.llama import FLAVORS
from parallelize import rules
from parallelize.mesh import resolve_degrees
from parallelize.rules import RULES, check_layout, check_model, warnings
from parallelize.rules.device import DEVICE_RULES, Device
from tests import refused
from tests.harness import observe
from tests.jobs import refused as messages
from tests.refused import BFLOAT16, CASES, LACKING, LOCAL, PP, REDUCE, SCHEDULE, SHARD, SPLITS, Refused
from tests.small import SMALL


def config_of(*overrides: str) -> JobConfig:
    return load_config(list(overrides))


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
    broken = broken_rules(RULES, config, resolve_degrees(config, case.ranks))
    assert len(broken) == 1
    assert re.search(case.says, broken[0])


def test_every_rule_has_a_case() -> None:
    assert len({case.rule for case in CASES}) == len(RULES)


@pytest.mark.parametrize(("words", "key"), refused.CONTRADICTIONS)
def test_keys_that_contradict_each_other(words: str, key: str) -> None:
    (message,) = messages(*words.split())
    assert f": {key} = " in message


def test_every_contradiction_has_a_case() -> None:
    """But for those of optimizers without keys that all of this repository's have: tests/test_optimizer.py."""
    shared = set.intersection(*map(set, OPTIMIZER_KEYS.values()))
    keys = [rule.key for rule in CONTRADICTIONS if not any(rule.misfit(job) for job in contradicting())]
    assert sorted(keys) == sorted({f"optimizer.{key}" for key in shared} | {"training.dtype"})


def contradicting() -> list[JobConfig]:
    with mock.patch.object(load, "CONTRADICTIONS", []):
        return [config_of(*words.split()) for words, _ in refused.CONTRADICTIONS]


def device(**facts: Any) -> Device:
    """A CPU whose environment has nothing to say, but for these facts."""
    return Device(**{"cuda": None, "environment": {}, "torch_path": "/torch"} | facts)


def refusals() -> str:
    """docs/refusals.md: each rule, what it says of its first case, and why."""
    said: dict[Rule, str] = {}

    def hear(table: list[Rule], config: JobConfig, *facts: Any) -> None:
        for rule in table:
            if reason := rule.misfit(config, *facts):
                said.setdefault(rule, re.sub("not one of [^;]*", "not one of ...", str(reason)))

    for case in CASES:
        plant(case.model, without_rules=False)
        config = config_of(*SMALL, *settings(case))
        hear(RULES, config, resolve_degrees(config, case.ranks))
    for words, facts, _ in LACKING:
        hear(DEVICE_RULES, config_of(*words.split()), device(**facts))
    for job in contradicting():
        hear(CONTRADICTIONS, job)
    lines = [
        *("# What is refused, and why", ""),
        "Written by `python -m tests.test_rules` from three tables of rules. A job that breaks a rule is refused",
        "before launch. Each row has the rule's key, and what the rule says of a case of `tests/refused.py`.",
        *(
            "",
            "## Layouts",
            "",
            "Table: `parallelize/rules/__init__.py`. The last column says why such a layout cannot",
        ),
        *("be, or what it would take.", "", "| key | for example | why |", "|---|---|---|"),
        *(f"| `{rule.key}` | {said[rule]} | {rule.why} |" for rule in RULES),
        *("", "## Settings that contradict each other", "", "Table: `components/config/contradictions.py`.", ""),
        *_rows(CONTRADICTIONS, said),
        *("", "## Devices, installations and environment variables", "", "Table: `parallelize/rules/device.py`.", ""),
        *_rows(DEVICE_RULES, said),
    ]
    return "\n".join(lines) + "\n"


def _rows(table: list[Rule], said: dict[Rule, str]) -> list[str]:
    rows = (f"| `{rule.key}` | {said[rule]} |" for rule in table if rule in said)
    return ["| key | for example |", "|---|---|", *dict.fromkeys(rows)]


REFUSALS = ROOT / "docs" / "refusals.md"


def test_the_page_of_refusals_is_the_table_of_rules() -> None:
    """If it is not: python -m tests.test_rules"""
    assert REFUSALS.read_text() == refusals()


@pytest.mark.slow
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
