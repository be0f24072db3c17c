"""How the layers of a pipeline are cut into stages, and which rank holds which: plain numbers and names."""

import math

from components.config import Parallelism

ONE_STAGE = ("GPipe", "1F1B")
"""Schedules with one stage a rank; the others have two or more."""
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules in which a rank has one stage from the front and its counterpart from the back."""
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that compute the gradients of inputs and those of weights apart."""


def number_of_stages(parallelism: Parallelism, layers: int) -> int:
    """Stages of the whole pipeline: as listed, or as layers_per_stage makes, or the least that a schedule has."""
    if parallelism.module_fqns_per_model_part:
        return len(parallelism.module_fqns_per_model_part)
    if parallelism.pipeline_parallel_layers_per_stage:
        return math.ceil(_weight(parallelism, layers) / parallelism.pipeline_parallel_layers_per_stage)
    a_rank = 1 if parallelism.pipeline_parallel_schedule in ONE_STAGE else 2
    return parallelism.pipeline_parallel_degree * a_rank


def _weight(parallelism: Parallelism, layers: int) -> int:
    """Layers, with the embedding and the head counted as so many."""
    ends = parallelism.pipeline_parallel_first_stage_less_layers + parallelism.pipeline_parallel_last_stage_less_layers
    return layers + ends


def layers_of_stages(parallelism: Parallelism, layers: int) -> list[int]:
    """Layers of each stage: even, but for what embedding and head count; earlier stages have the rest."""
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
    if parallelism.pipeline_parallel_schedule in V_SHAPED:
        return [rank, stages - 1 - rank]
    return list(range(rank, stages, parallelism.pipeline_parallel_degree))


def describe_stages(parallelism: Parallelism, layers: int) -> str:
    """Which rank of the pipeline has which modules, as lines of text."""
    modules = modules_of_stages(parallelism, layers)
    lines = []
    for rank in range(parallelism.pipeline_parallel_degree):
        stages = stages_of_rank(parallelism, rank, len(modules))
        lines.append(f"pp {rank}: " + "; ".join(f"stage {stage}: {_shorten(modules[stage])}" for stage in stages))
    return "\n".join(lines)


def _shorten(names: list[str]) -> str:
    """layers.3, layers.4, layers.5 -> layers 3-5."""
    layers = [name.removeprefix("layers.") for name in names if name.startswith("layers.")]
    span = [f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"] if layers else []
    others = [name for name in names if not name.startswith("layers.")]
    before = [name for name in others if name == "tok_embeddings"]
    return ", ".join(before + span + [name for name in others if name not in before])
