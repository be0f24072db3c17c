"""Lines printed when a run starts: model, layout, batch, and a warning if the learning rate will not reach its peak."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from components.config import JobConfig, LRScheduler, RopeScaling, to_dict
from components.config.bounds import is_folder
from components.config.keys import show
from components.optim.averages import average_bytes
from components.optim.optimizer import learning_rate, rate_settings, state_bytes
from models import meta_model, sizes
from parallelize.mesh import Degrees, draw_layout, global_batch_size
from parallelize.schedules import describe_stages
from parallelize.sharding import describe_memory


def introduce(
    config: JobConfig, degrees: Degrees, stages: Sequence[nn.Module], batches: int, data: Sequence[str] = ()
) -> str:
    """The lines of describe, and this rank's memory; with job.print_config, the whole job comes first.

    batches: as in describe_memory; data: lines about the data.
    """
    job = [json.dumps(to_dict(config), indent=1)] if config.job.print_config else []
    each = config.parallelism.fsdp_reduce_gradients == "each"
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    of_state = state_bytes(stages, config.optimizer), 1 if each else batches, config.optimizer.state_offload
    memory = describe_memory(parameters, *of_state, average_bytes(stages, config.averages.ema_decay))
    return "\n".join([*job, describe(config, degrees), memory, *data])


def describe(config: JobConfig, degrees: Degrees) -> str:
    """Lines about the whole model, the layout, its stages, the batch and the rate."""
    model, training = config.model, config.training
    whole = meta_model(model).parameters()
    named = model.sizes and not is_folder(model.flavor)
    changes = "".join(f", {name} = {value}" for name, value in model.sizes.items()) if named else ""
    count = sum(parameter.numel() for parameter in whole)
    lines = [f"{model.name} {model.flavor}{changes}, {count:,} parameters"]
    if base := config.optimizer.mup_base:
        width = sizes(model).dim / sizes(replace(model, flavor=base, sizes={}, rope_scaling=RopeScaling())).dim
        lines.append(f"rates and starting values by width (muP): {width:g} times that of {base}")
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


def describe_resume(config: JobConfig, saved: dict[str, Any], step: int, sequences: int) -> str:
    """Where a run goes on, and describe_rate_change."""
    said = f"continuing after step {step}, at sequence {sequences:,}"
    return "\n".join([said, *describe_rate_change(config, saved, step)])


def describe_rate_change(config: JobConfig, saved: dict[str, Any], step: int) -> list[str]:
    """Lines about learning rates that differ from the rates of a checkpoint's run; none if no rate differs.

    If no step is left, a line says so.

    saved: rate_settings of that run; empty if an older version saved the checkpoint. step: the checkpoint's step.
    """
    steps, table = config.training.steps, "lr_scheduler."
    if step >= steps:
        return [f"no step is left: training.steps = {steps}"]
    if not saved or not step:
        return []
    now = rate_settings(config)
    changed = {key: value for key, value in saved.items() if now.get(key, value) != value}
    if not changed:
        return []
    end, peak = saved[f"{table}total_steps"], saved["optimizer.lr"]
    old = LRScheduler(**{key.removeprefix(table): value for key, value in saved.items() if key.startswith(table)})

    def rates(step: int) -> tuple[float, float]:
        own = learning_rate(step, config.lr_scheduler, config.optimizer.lr, steps)
        return own, learning_rate(min(step, end), old, peak, end)

    roles = any(key.endswith((".lr_factor", ".mup_base")) for key in changed)
    first = next((each for each in range(step + 1, steps + 1) if roles or not math.isclose(*rates(each))), None)
    if first is None:
        return []
    own, theirs = rates(first)
    changes = ", ".join(f"{key} was {show(value)} and is {show(now[key])}" for key, value in changed.items())
    changes = changes.replace("total_steps", "total_steps (training.steps if unset)")
    line = f"the learning rate of step {first} is {own:.2e}; in the schedule of the checkpoint, {theirs:.2e}: {changes}"
    if end >= steps:
        remedy = f"to keep that schedule, set {_as_settings(changed)}"
    elif step < end:
        remedy = f"that schedule ends at step {end}; to keep it, set {_as_settings(changed | {'training.steps': end})}"
    elif theirs:
        constant = {
            "optimizer.lr": float(f"{theirs:.12g}"),
            f"{table}decay_type": "constant",
            f"{table}warmup_steps": 0,
        }
        remedy = f"that schedule has ended; to stay at its last rate, set {_as_settings(constant)}"
    else:
        remedy = "that schedule has ended with the rate 0"
    return [line, remedy]


def _as_settings(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {show(value)}" if value is not None else f"no {key}" for key, value in values.items())
