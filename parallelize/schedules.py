"""The table of pipeline schedules, and how layers are cut into stages for a schedule: plain numbers and names."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from components.config import Parallelism
from parallelize.tables import Order, order_of_parts, read_table, stages_of_table


def _one_a_stage(count: int, pp: int, stages: int) -> str:
    return "" if count >= stages else f"as many as stages, {stages}"


def _even_rounds(count: int, pp: int, stages: int) -> str:
    rounds, below = max(1, count // pp), count // pp * pp
    return f"a multiple of {rounds}: {below} or {below + pp} would be" if count % rounds else ""


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: the class that runs it, and what rules and stages need to know of it."""

    found: str
    """Module and name of its class, which has the interface of torch's own."""
    stages_a_rank: tuple[int, float] = (1, 1)
    """Least and most stages that a rank may have."""
    v_shaped: bool = False
    """A rank has one stage from the front and its counterpart from the back."""
    splits_backward: bool = False
    """Gradients of inputs and gradients of weights are computed apart."""
    lacks: Callable[[int, int, int], str] = lambda count, pp, stages: ""
    """(micro-batches, ranks, stages) -> how many micro-batches the schedule needs, in words; empty if that many fit."""

    @property
    def one_stage(self) -> bool:
        """The class takes one stage instead of a list of stages."""
        return self.stages_a_rank[1] == 1

    def load(self) -> Any:
        """The class; imports torch."""
        module, _, name = self.found.rpartition(".")
        return getattr(import_module(module), name)


_TORCH, _TWO, _MORE = "torch.distributed.pipelining.Schedule", (2, 2), (2, math.inf)
SCHEDULES = {
    "1F1B": Schedule(f"{_TORCH}1F1B", lacks=_one_a_stage),
    "GPipe": Schedule(f"{_TORCH}GPipe"),
    "Interleaved1F1B": Schedule(f"{_TORCH}Interleaved1F1B", _MORE, lacks=_even_rounds),
    "LoopedBFS": Schedule(f"{_TORCH}LoopedBFS", _MORE),
    "InterleavedZeroBubble": Schedule(
        f"{_TORCH}InterleavedZeroBubble", _MORE, splits_backward=True, lacks=_even_rounds
    ),
    "ZBVZeroBubble": Schedule(f"{_TORCH}ZBVZeroBubble", _TWO, v_shaped=True, splits_backward=True),
    "DualPipeV": Schedule(f"{_TORCH}DualPipeV", _TWO, v_shaped=True, splits_backward=True, lacks=_one_a_stage),
}
"""parallelism.pipeline_parallel_schedule -> Schedule."""


def schedule_of(parallelism: Parallelism) -> Schedule:
    """The row of SCHEDULES, or a Schedule for the job file's own table of actions."""
    if not parallelism.pipeline_parallel_schedule_csv:
        return SCHEDULES[parallelism.pipeline_parallel_schedule]
    orders = read_table(parallelism.pipeline_parallel_schedule_csv)
    kinds = {kind for order in orders for step in order for kind, _, _ in step}
    return Schedule("", (1, math.inf), splits_backward="W" in kinds)


def table_of(parallelism: Parallelism, micro_batches: int) -> Order | None:
    """The steps of each rank, if the schedule is a table: that for parts of sequences, or the job file's own."""
    splits = parallelism.pipeline_parallel_sequence_splits
    if splits > 1:
        return order_of_parts(parallelism.pipeline_parallel_degree, micro_batches, splits)
    path = parallelism.pipeline_parallel_schedule_csv
    return read_table(path) if path else None


def name_of_schedule(parallelism: Parallelism) -> str:
    return parallelism.pipeline_parallel_schedule_csv or parallelism.pipeline_parallel_schedule


def splits_backward(parallelism: Parallelism) -> bool:
    """Whether a pipeline computes gradients of inputs and of weights apart."""
    return parallelism.pipeline_parallel_degree > 1 and schedule_of(parallelism).splits_backward


def number_of_stages(parallelism: Parallelism, layers: int) -> int:
    """Number of stages: as listed, by layers_per_stage, as in the table of actions, or the fewest possible."""
    if parallelism.module_fqns_per_model_part:
        return len(parallelism.module_fqns_per_model_part)
    if parallelism.pipeline_parallel_layers_per_stage:
        return math.ceil(_weight(parallelism, layers) / parallelism.pipeline_parallel_layers_per_stage)
    if parallelism.pipeline_parallel_schedule_csv:
        return 1 + max(stage for row in stages_of_table(parallelism.pipeline_parallel_schedule_csv) for stage in row)
    return parallelism.pipeline_parallel_degree * schedule_of(parallelism).stages_a_rank[0]


def _weight(parallelism: Parallelism, layers: int) -> int:
    """The model's length in layers; embedding and head count as many layers as the job file says."""
    ends = parallelism.pipeline_parallel_first_stage_less_layers + parallelism.pipeline_parallel_last_stage_less_layers
    return layers + ends


def layers_of_stages(parallelism: Parallelism, layers: int) -> list[int]:
    """Layers of each stage: equal shares of the model's length; earlier stages have the remainder."""
    stages = number_of_stages(parallelism, layers)
    each, rest = divmod(_weight(parallelism, layers), stages)
    counts = [each + (stage < rest) for stage in range(stages)]
    counts[0] -= parallelism.pipeline_parallel_first_stage_less_layers
    counts[-1] -= parallelism.pipeline_parallel_last_stage_less_layers
    return counts


def modules_of_stages(parallelism: Parallelism, layers: int) -> list[list[str]]:
    """Names of the modules of each stage."""
    if parallelism.module_fqns_per_model_part:
        return parallelism.module_fqns_per_model_part
    names = iter([f"layers.{layer}" for layer in range(layers)])
    stages = [[next(names) for _ in range(count)] for count in layers_of_stages(parallelism, layers)]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages


def stages_of_rank(parallelism: Parallelism, rank: int, stages: int) -> list[int]:
    """Which stages a rank of the pipeline holds."""
    if parallelism.pipeline_parallel_schedule_csv:
        return stages_of_table(parallelism.pipeline_parallel_schedule_csv)[rank]
    if schedule_of(parallelism).v_shaped:
        return [rank, stages - 1 - rank]
    return list(range(rank, stages, parallelism.pipeline_parallel_degree))


def describe_stages(parallelism: Parallelism, layers: int) -> str:
    """The stages and modules of each rank of the pipeline, as lines of text."""
    modules = modules_of_stages(parallelism, layers)
    lines = []
    for rank in range(parallelism.pipeline_parallel_degree):
        stages = stages_of_rank(parallelism, rank, len(modules))
        lines.append(f"pp {rank}: " + "; ".join(f"stage {stage}: {_shorten(modules[stage])}" for stage in stages))
    return "\n".join(lines)


def _shorten(names: list[str]) -> str:
    """layers.3, layers.4, layers.5 -> layers 3-5."""
    numbers = [name.removeprefix("layers.") for name in names if name.startswith("layers.")]
    span = f"layers {numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else "".join(f"layer {one}" for one in numbers)
    return ", ".join(dict.fromkeys(span if name.startswith("layers.") else name for name in names))
