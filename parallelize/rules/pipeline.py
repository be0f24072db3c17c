"""Rules on pipelines: each function gives the reason why a pipeline is refused, or an empty string."""

from components.config import JobConfig
from parallelize.mesh import Degrees, global_batch_size
from parallelize.rules.sizes import near_multiples, not_among, sizes_of
from parallelize.schedules import SCHEDULES, layers_of_stages, name_of_schedule, number_of_stages, schedule_of
from parallelize.tables import read_table, stages_of_table, wrong_with
from parallelize.wrapping import wrapping_of


def schedule_misfit(config: JobConfig, degrees: Degrees) -> str:
    name = config.parallelism.pipeline_parallel_schedule
    return "" if name in SCHEDULES else not_among(name, SCHEDULES)


def table_misfit(config: JobConfig, degrees: Degrees) -> str:
    """Checked without a pipeline too, because other rules read the file."""
    parallelism = config.parallelism
    if not parallelism.pipeline_parallel_schedule_csv:
        return ""
    needed = {
        "parallelism.pipeline_parallel_degree of 2 or more": degrees.pp > 1,
        "no other schedule in pipeline_parallel_schedule": parallelism.pipeline_parallel_schedule == "1F1B",
    }
    if missing := [name for name, there in needed.items() if not there]:
        return f"a table of actions needs {', '.join(missing)}"
    try:
        orders = read_table(parallelism.pipeline_parallel_schedule_csv)
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    count, rest = divmod(config.training.local_batch_size, parallelism.pipeline_parallel_microbatch_size)
    return "" if rest else wrong_with(orders, degrees.pp, count)  # another rule refuses a remainder


def stages_misfit(config: JobConfig, degrees: Degrees) -> str:
    keys = "pipeline_parallel_layers_per_stage, module_fqns_per_model_part"
    stages = number_of_stages(config.parallelism, sizes_of(config).n_layers)
    if path := config.parallelism.pipeline_parallel_schedule_csv:
        count = 1 + max(map(max, stages_of_table(path)))
        return "" if stages == count else f"{path} has {count} stages, not {stages} ({keys})"
    pp, (least, most) = degrees.pp, schedule_of(config.parallelism).stages_a_rank
    if stages % pp == 0 and least <= stages // pp <= most:
        return ""
    wanted = f"{least * pp}" if least == most else f"{least * pp}, {(least + 1) * pp}, ..."
    return f"on {pp} ranks it needs {wanted} stages, not {stages} ({keys})"


def layers_misfit(config: JobConfig, degrees: Degrees) -> str:
    if config.parallelism.module_fqns_per_model_part:
        return ""
    layers = sizes_of(config).n_layers
    counts = layers_of_stages(config.parallelism, layers)
    # The first and the last stage may be without a layer: they have the embedding and the head.
    if min(counts[0], counts[-1]) >= 0 and min(counts[1:-1], default=1) > 0:
        return ""
    stages = number_of_stages(config.parallelism, layers)
    return (
        f"{layers} layers are too few for {stages} stages, with first_stage_less_layers = "
        f"{config.parallelism.pipeline_parallel_first_stage_less_layers} and last_stage_less_layers = "
        f"{config.parallelism.pipeline_parallel_last_stage_less_layers}; use fewer stages, or 0 for these"
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
    count, schedule = local // size, schedule_of(config.parallelism)
    if config.parallelism.pipeline_parallel_sequence_splits > 1:
        return ""  # parts allow any number of micro-batches
    lacks = schedule.lacks(count, degrees.pp, number_of_stages(config.parallelism, sizes_of(config).n_layers))
    name = config.parallelism.pipeline_parallel_schedule
    makes = f"training.local_batch_size = {local} makes {count} micro-batches, but {name} needs"
    return f"{makes} {lacks}" if lacks else ""


def reshard_misfit(config: JobConfig, degrees: Degrees) -> str:
    parallelism = config.parallelism
    wrapping = wrapping_of(config, degrees, hasattr(sizes_of(config), "n_experts"))
    freed = wrapping.wrapped and wrapping.reshard == "always"
    if not (freed and schedule_of(parallelism).splits_backward):
        return ""
    return (
        f"{name_of_schedule(parallelism)} computes gradients of weights after those of inputs, and torch then "
        'finds the weights freed: gradients would be wrong without an error; use "default" or "never"'
    )


def ahead_misfit(config: JobConfig, degrees: Degrees) -> str:
    from models.parameters import covers

    sizes, parallelism = sizes_of(config), config.parallelism
    once = sizes.mtp_layers + sizes.tie_embeddings <= 1 or sizes.mtp_layers == 0
    frozen = config.model.lora.rank > 0 or any(covers(each, "tok_embeddings.weight") for each in sizes.frozen)
    if once or frozen or not schedule_of(parallelism).splits_backward:
        return ""
    tied = ", and is the head" if sizes.tie_embeddings else ""
    return (
        f"{name_of_schedule(parallelism)} computes gradients of weights apart from those of inputs, and the last "
        f"stage's table embeds tokens for {sizes.mtp_layers} layers of multi-token prediction{tied}; use 1F1B, "
        "Interleaved1F1B, LoopedBFS or GPipe, or mtp_layers = 1 and no tied head"
    )


def reduce_misfit(config: JobConfig, degrees: Degrees) -> str:
    if config.parallelism.fsdp_reduce_gradients == "last":
        return ""
    return 'a stage adds up the gradients of all micro-batches and reduces them once; use "last"'


def turns_misfit(config: JobConfig, degrees: Degrees) -> str:
    size, local = global_batch_size(config, degrees), config.training.local_batch_size
    needed = size // degrees.batch_ranks
    if degrees.pp == 1 or config.training.dtype == "float32" or needed <= local:
        return ""
    return (
        f"a pipeline rounds the gradients of weights in bfloat16 after each {local} sequences; {needed} would be one "
        "turn, in micro-batches as small as before"
    )


def splits_misfit(config: JobConfig, degrees: Degrees) -> str:
    parallelism = config.parallelism
    splits, length = parallelism.pipeline_parallel_sequence_splits, config.training.seq_len
    if splits == 1:
        return ""
    if config.training.dataset_format == "preference":
        return "parts of a pair come one after another, and its loss needs all of them at once; use 1"
    if splits > length:
        return f"sequences have {length} tokens; use {length} parts or fewer"
    needed = {
        "parallelism.pipeline_parallel_degree of 2 or more": degrees.pp > 1,
        'parallelism.pipeline_parallel_schedule = "1F1B"': parallelism.pipeline_parallel_schedule == "1F1B",
        "no parallelism.pipeline_parallel_schedule_csv": not parallelism.pipeline_parallel_schedule_csv,
        "parallelism.context_parallel_degree = 1": degrees.cp == 1,
    }
    missing = [name for name, there in needed.items() if not there]
    return f"parts of sequences need {', '.join(missing)}" if missing else ""
