"""Dynamics for tests: the runs of one process, a layout of one of them, and what is wrong in its tables."""

import functools
from collections.abc import Callable

from torch import Tensor

import train
from components.commands.figures import BARS, Observation, Tables, table_errors
from tests.harness import Case, observe_all

GLOBAL, LOCAL = "--training.global_batch_size", "--training.local_batch_size"
SHARD, REPLICATE = "--parallelism.data_parallel_shard_degree", "--parallelism.data_parallel_replicate_degree"
TP, CP, PP = (f"--parallelism.{axis}_parallel_degree" for axis in ("tensor", "context", "pipeline"))
METHOD = "--parallelism.context_parallel_method"
UNBALANCED = ("--parallelism.context_parallel_load_balancer", "none")
NO_SEQUENCE_PARALLEL = ("--parallelism.sequence_parallel", "false")
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
CHECKPOINTED, COMPILED = (
    ("--activation_checkpoint.mode", "full"),
    ("--compile.enable", "--compile.backend", "aot_eager"),
)
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


def first_batch(run: train.Run) -> dict[str, Tensor]:
    """The first global batch: that of one process."""
    run.sequences = 0
    return next(train.local_batches(run))


def case(kind: str, *layout: str, ranks: int = 1, mutate: Callable[[], None] | None = None) -> Case:
    every = 2 if kind == "llama" else 1
    overrides = (*RUNS[kind], "--metrics.dynamics_freq", str(every), *layout)
    return Case(overrides, ranks, steps=every, mutate=mutate, at_end=first_batch)


@functools.cache
def one_process() -> dict[str, Observation]:
    found = dict(zip(RUNS, observe_all([case(kind) for kind in RUNS]), strict=True))
    assert not [error for error in found.values() if isinstance(error, Exception)]
    return found  # type: ignore[return-value]


def wrong(tables: Tables, references: Tables) -> list[tuple[str, str]]:
    """Tables and parts whose numbers differ by more than the bar."""
    return [name for name, error in table_errors(tables, references).items() if not error <= BARS["dynamics"]]
