"""What is wrong with a pipeline: each function says it in a sentence, or nothing. Asked only where there is one."""

from components.config import JobConfig
from parallelize.mesh import Degrees
from parallelize.rules.sizes import near_multiples, sizes_of
from parallelize.stages import ONE_STAGE, SPLIT_BACKWARD, V_SHAPED, layers_of_stages, number_of_stages


def stages_misfit(config: JobConfig, degrees: Degrees) -> str:
    parallelism, pp = config.parallelism, degrees.pp
    stages, schedule = number_of_stages(parallelism, sizes_of(config).n_layers), parallelism.pipeline_parallel_schedule
    if schedule in ONE_STAGE:
        wanted = "" if stages == pp else f"one stage a rank: {pp}"
    elif schedule in V_SHAPED:
        wanted = "" if stages == 2 * pp else f"two stages a rank: {2 * pp}"
    else:
        wanted = "" if stages % pp == 0 and stages >= 2 * pp else f"two or more stages a rank: {2 * pp}, {3 * pp}, ..."
    if not wanted:
        return ""
    return f"it needs {wanted}, not {stages} (pipeline_parallel_layers_per_stage, module_fqns_per_model_part)"


def layers_misfit(config: JobConfig, degrees: Degrees) -> str:
    if config.parallelism.module_fqns_per_model_part:
        return ""
    layers = sizes_of(config).n_layers
    counts = layers_of_stages(config.parallelism, layers)
    # The ends have the embedding and the head: they may do without a layer.
    if min(counts[0], counts[-1]) >= 0 and min(counts[1:-1], default=1) > 0:
        return ""
    stages = number_of_stages(config.parallelism, layers)
    return (
        f"{layers} layers are too few for {stages} stages, with first_stage_less_layers = "
        f"{config.parallelism.pipeline_parallel_first_stage_less_layers} and last_stage_less_layers = "
        f"{config.parallelism.pipeline_parallel_last_stage_less_layers}; fewer stages, or 0 for these, would do"
    )


def modules_misfit(config: JobConfig, degrees: Degrees) -> str:
    given = config.parallelism.module_fqns_per_model_part
    if not given:
        return ""
    layers = [f"layers.{layer}" for layer in range(sizes_of(config).n_layers)]
    wanted, listed = ["tok_embeddings", *layers, "norm", "output"], [name for stage in given for name in stage]
    if listed == wanted and all(given):
        return ""
    wrong = [name for name in listed if name not in wanted] or [name for name in wanted if listed.count(name) != 1]
    return f"every module has to be in one stage, in the model's order; look at {', '.join(wrong) or 'their order'}"


def micro_batches_misfit(config: JobConfig, degrees: Degrees) -> str:
    local, size = config.training.local_batch_size, config.parallelism.pipeline_parallel_microbatch_size
    if local % size:
        return f"training.local_batch_size = {local} is no multiple; {near_multiples(local, size)} would be"
    count, schedule = local // size, config.parallelism.pipeline_parallel_schedule
    stages = number_of_stages(config.parallelism, sizes_of(config).n_layers)
    makes = f"training.local_batch_size = {local} makes {count} micro-batches, but {schedule} needs"
    if schedule in ("1F1B", "DualPipeV") and count < stages:
        return f"{makes} as many as stages, {stages}"
    rounds = max(1, count // degrees.pp)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and count % rounds:
        return f"{makes} a multiple of {rounds}: {near_multiples(count, degrees.pp)} would be"
    return ""


def reshard_misfit(config: JobConfig, degrees: Degrees) -> str:
    parallelism = config.parallelism
    sharded = degrees.dp_shard * degrees.cp > 1 or degrees.dp_replicate > 1
    if not (sharded and parallelism.fsdp_reshard_after_forward == "always"):
        return ""
    if parallelism.pipeline_parallel_schedule not in SPLIT_BACKWARD:
        return ""
    return (
        f"{parallelism.pipeline_parallel_schedule} computes gradients of weights after those of inputs, and torch then "
        'finds the weights freed: gradients would be wrong without an error; "default" or "never" would do'
    )


def tied_misfit(config: JobConfig, degrees: Degrees) -> str:
    if not sizes_of(config).tie_embeddings:
        return ""
    return (
        f"{config.model.name} {config.model.flavor} ties its embedding to its head, which would be in different "
        "stages, each with a table of its own; data, tensor and context parallel keep them tied"
    )
