"""Tables of dynamics for tests: the runs of one process, a layout's tables, and how they differ."""

import functools
from collections.abc import Callable

from torch import Tensor

import train
from tests.harness import Case, Observation, observe_all

Tables = dict[str, dict[str, float]]
BAR = 1e-5
"""Relative, of every number."""

GLOBAL, LOCAL = "--training.global_batch_size", "--training.local_batch_size"
SHARD, REPLICATE = "--parallelism.data_parallel_shard_degree", "--parallelism.data_parallel_replicate_degree"
TP, CP, PP = (f"--parallelism.{axis}_parallel_degree" for axis in ("tensor", "context", "pipeline"))
METHOD, ROTATE = "--parallelism.context_parallel_method", "--parallelism.context_parallel_rotate_method"
UNBALANCED = ("--parallelism.context_parallel_load_balancer", "none")
NO_SEQUENCE_PARALLEL = ("--parallelism.sequence_parallel", "false")
SCHEDULE, MICRO = "--parallelism.pipeline_parallel_schedule", "--parallelism.pipeline_parallel_microbatch_size"
CHECKPOINTED, COMPILED = (
    ("--activation_checkpoint.mode", "full"),
    ("--compile.enable", "--compile.backend", "aot_eager"),
)
PER_OPERATION = ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op")
CLIPPED = ("--training.max_norm", "0.1")
DOCUMENTS = ("--training.document_mask", "true")

RUNS = {
    "llama": ("--model.flavor", "long", GLOBAL, "12", LOCAL, "12", *CLIPPED),
    "qwen3": (
        "--model.name",
        "qwen3",
        "--model.flavor",
        "many_heads_tied",
        *DOCUMENTS,
        GLOBAL,
        "12",
        LOCAL,
        "12",
        *CLIPPED,
    ),
    "six layers": ("--model.flavor", "long", *DOCUMENTS, GLOBAL, "8", LOCAL, "8", *CLIPPED),
}
"""Settings of one process. Steps are sampled from the first, but of Llama the second: the first must leave no trace."""


def tables_of(run: train.Run) -> tuple[Tables, dict[str, Tensor]]:
    """And the first global batch: that of one process."""
    run.sequences = 0
    return run.dynamics.tables(), next(train.local_batches(run))


def case(kind: str, *layout: str, ranks: int = 1, mutate: Callable[[], None] | None = None) -> Case:
    every = 2 if kind == "llama" else 1
    overrides = (*RUNS[kind], "--metrics.dynamics_freq", str(every), *layout)
    return Case(overrides, ranks, steps=every, mutate=mutate, at_end=tables_of)


@functools.cache
def one_process() -> dict[str, Observation]:
    found = dict(zip(RUNS, observe_all([case(kind) for kind in RUNS]), strict=True))
    assert not [error for error in found.values() if isinstance(error, RuntimeError)]
    return found  # type: ignore[return-value]


def differences(tables: Tables, references: Tables) -> list[str]:
    """Tables and parts whose numbers differ; or what is there at all, or its order."""
    shape, wanted = ({table: list(values) for table, values in each.items()} for each in (tables, references))
    if shape != wanted:
        return [f"{shape}, not {wanted}"]
    values = (
        (table, part, value, references[table][part]) for table in tables for part, value in tables[table].items()
    )
    return [
        f"{table} {part} {one} {other}"
        for table, part, one, other in values
        if not abs(one - other) <= BAR * abs(other)
    ]
