"""The choice whether fully_shard wraps a rank's weights and frees them, for data parallel and for rules."""

from dataclasses import dataclass
from typing import Literal

from components.config import JobConfig
from parallelize.mesh import Degrees


@dataclass(frozen=True)
class Wrapping:
    """The way in which data parallel treats the weights that a rank holds."""

    wrapped: bool
    """fully_shard gathers, frees and reduces them."""
    converts: bool
    """Products take copies of them in another precision."""
    reshard: Literal["default", "always", "never"]
    """Freed after each forward: layers alone, all, or none."""


def wrapping_of(config: JobConfig, degrees: Degrees, experts: bool) -> Wrapping:
    """A single rank gathers and reduces nothing, so its weights are wrapped in four cases only.

    - weights are offloaded
    - in a pipeline, whose micro-batches share the conversion to bfloat16
    - reshard is "always", which keeps no layer in bfloat16 from forward to backward
    - gradients of several batches are summed in float32 before they are rounded to bfloat16 weights' precision

    experts: the model has some.
    """
    training, reshard = config.training, config.parallelism.fsdp_reshard_after_forward
    shards = degrees.dp_shard * degrees.cp
    of_experts = degrees.efsdp if experts else 1
    accumulates = training.global_batch_size not in (-1, training.local_batch_size)
    adds_up = training.dtype != "float32" and (accumulates or degrees.pp > 1)
    converts = _precisions(config) != {training.mixed_precision_param}
    wrapped = degrees.dp_replicate * max(shards, of_experts) > 1 or training.enable_cpu_offload or adds_up
    wrapped = wrapped or (converts and (degrees.pp > 1 or reshard == "always"))
    # Freed weights would be gathered again for each micro-batch of a pipeline. Replicas would convert freed weights
    # again for backward.
    kept = shards == 1 and converts and not training.enable_cpu_offload
    if reshard == "default" and (degrees.pp > 1 or kept):
        reshard = "never"
    return Wrapping(wrapped, converts, reshard)


def _precisions(config: JobConfig) -> set[str]:
    """Precisions of all parameters except routers, which keep their precision, and packed matrices."""
    base = config.model.lora.base if config.model.lora.rank else ""
    return {config.training.dtype, {"": config.training.dtype, "nf4": "bfloat16"}.get(base, base)}
