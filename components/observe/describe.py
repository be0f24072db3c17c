"""Lines printed when a run starts: model, layout, batch, and a warning if the learning rate will not reach its peak."""

import json
from collections.abc import Sequence

from torch import nn

from components.config import JobConfig, to_dict
from components.optim.optimizer import state_bytes
from models import meta_model, sizes
from parallelize.mesh import Degrees, draw_layout, global_batch_size
from parallelize.schedules import describe_stages
from parallelize.sharding import describe_memory


def introduce(config: JobConfig, degrees: Degrees, stages: Sequence[nn.Module], batches: int) -> str:
    """describe, and what this rank keeps; with job.print_config the whole job first. batches: as in describe_memory."""
    job = [json.dumps(to_dict(config), indent=1)] if config.job.print_config else []
    each = config.parallelism.fsdp_reduce_gradients == "each"
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    of_state = state_bytes(stages, config.optimizer), 1 if each else batches, config.optimizer.state_offload
    memory = describe_memory(parameters, *of_state)
    return "\n".join([*job, describe(config, degrees), memory])


def describe(config: JobConfig, degrees: Degrees) -> str:
    """Lines about the whole model, the layout, its stages, the batch and the rate."""
    model, training = config.model, config.training
    whole = meta_model(model).parameters()
    lines = [f"{model.name} {model.flavor}, {sum(parameter.numel() for parameter in whole):,} parameters"]
    lines.append(draw_layout(degrees, config.parallelism.pipeline_first))
    if degrees.pp > 1:
        lines.append(describe_stages(config.parallelism, sizes(model).n_layers))
    derived = " (derived)" if training.global_batch_size == -1 else ""
    batch = f"{global_batch_size(config, degrees)} sequences of {training.seq_len} tokens a step{derived}"
    return "\n".join([*lines, batch, *describe_rate(config.lr_scheduler.warmup_steps, training.steps)])


def describe_rate(warmup_steps: int, steps: int) -> list[str]:
    """A line about a run that ends within its warm-up; none about others."""
    if steps >= warmup_steps:
        return []
    end = f"training.steps = {steps} ends within lr_scheduler.warmup_steps = {warmup_steps}"
    return [f"{end}: the rate only rises, to {steps / warmup_steps:.0%} of its peak"]
