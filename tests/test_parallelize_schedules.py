"""Each schedule's row says of torch's class what is so; and how layers are cut into stages, and who holds which."""

from typing import Any

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from components.config import Parallelism, load_config
from components.observe.describe import describe
from parallelize.mesh import resolve_degrees
from parallelize.schedules import (
    SCHEDULES,
    describe_stages,
    layers_of_stages,
    modules_of_stages,
    number_of_stages,
    stages_of_rank,
)
from parallelize.timeline import actions, simulate
from tests.small import RECIPE

ENDS = (("first", 0), ("last", 2))


def settings(schedule: str, degree: int, **more: Any) -> Parallelism:
    return Parallelism(pipeline_parallel_schedule=schedule, pipeline_parallel_degree=degree, **more)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_row_is_what_its_class_does(name: str) -> None:
    row, steps = SCHEDULES[name], [action for order in actions(name, 2, 4) for step in order for action in step]
    held = [{stage for step in order for _, stage, _ in step} for order in actions(name, 2, 4)]
    assert row.one_stage == issubclass(row.load(), PipelineScheduleSingle)
    assert row.splits_backward == any(kind == "W" for kind, _, _ in steps)
    assert row.v_shaped == (0 in held[0] and len(held[0] | held[1]) - 1 in held[0])
    assert len(held[0]) == row.stages_a_rank[0]


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_row_takes_the_numbers_of_micro_batches_that_its_class_takes(name: str, pp: int) -> None:
    """It is refused before launch if and only if torch would refuse it, or its ranks would wait for ever."""
    row = SCHEDULES[name]
    for count in range(1, 3 * pp + 2):
        lacks = row.lacks(count, pp, pp * int(row.stages_a_rank[0]))
        try:
            simulate(actions(name, pp, count))
        except (ValueError, AssertionError):
            assert lacks, count
        else:
            assert not lacks, count


@pytest.mark.parametrize(
    ("schedule", "degree", "more", "layers"),
    [
        ("1F1B", 2, {}, [3, 3]),
        ("1F1B", 4, {}, [1, 2, 2, 1]),
        ("Interleaved1F1B", 2, {}, [1, 2, 2, 1]),
        ("Interleaved1F1B", 2, {"pipeline_parallel_layers_per_stage": 1}, [0, 1, 1, 1, 1, 1, 1, 0]),
        ("1F1B", 2, {f"pipeline_parallel_{end}_stage_less_layers": count for end, count in ENDS}, [4, 2]),
    ],
)  # fmt: skip
def test_layers_are_cut_with_lighter_ends(schedule: str, degree: int, more: dict[str, int], layers: list[int]) -> None:
    assert layers_of_stages(settings(schedule, degree, **more), 6) == layers


@pytest.mark.parametrize("schedule", ["1F1B", "LoopedBFS", "ZBVZeroBubble"])
def test_every_module_is_in_one_stage_and_every_stage_on_one_rank(schedule: str) -> None:
    parallelism = settings(schedule, 2)
    listed = [name for stage in modules_of_stages(parallelism, 6) for name in stage]
    assert listed == ["tok_embeddings", *(f"layers.{layer}" for layer in range(6)), "norm", "output"]
    stages = number_of_stages(parallelism, 6)
    held = [stage for rank in range(2) for stage in stages_of_rank(parallelism, rank, stages)]
    assert sorted(held) == list(range(stages))


def test_a_pipeline_is_introduced_with_the_parameters_of_all_stages() -> None:
    config = load_config(["--job.config_file", str(RECIPE), "--parallelism.pipeline_parallel_degree", "2"])
    assert describe(config, resolve_degrees(config, 2)).startswith("llama debug, 5,245,184 parameters\n")


def test_stages_are_described() -> None:
    assert describe_stages(settings("ZBVZeroBubble", 2), 6) == (
        "pp 0: stage 0: tok_embeddings, layer 0; stage 3: layer 5, norm, output\n"
        "pp 1: stage 1: layers 1-2; stage 2: layers 3-4"
    )
