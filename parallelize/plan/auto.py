"""parallelism.auto: fills in the layout of a job at launch. Jobs without it import no planner."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from components.config import ConfigError, JobConfig, mistake
from components.config.files import read_json_if_whole
from components.config.rule import value_of


def filled(config: JobConfig, ranks: int, nodes: int, on_gpu: bool) -> JobConfig:
    """The resolved job with the best layout for its ranks; unchanged without parallelism.auto. Prints the layout.

    on_gpu: the run takes this machine's GPUs, if it has any. Keys that the user has set keep their values. A resumed
    run keeps the layout of its run.json. Raises ConfigError if no layout fits.
    """
    if not config.parallelism.auto:
        return config
    from parallelize.mesh import resolve_degrees
    from parallelize.plan.devices import find_device, name_of_gpu
    from parallelize.plan.search import PLANNED, Planner, refusal, with_settings

    name = config.parallelism.auto_device
    try:
        name = name or name_of_gpu(_gpu() if on_gpu else "")
        device = find_device(name)
    except ConfigError as error:
        reason = str(error).removeprefix(f"--device {name}: ")
        raise ConfigError(mistake(config, "parallelism.auto_device", reason)) from None
    if nodes > 1:
        device = replace(device, ranks_per_node=min(device.ranks_per_node, ranks // nodes))
    planner = Planner(config, ranks, device, frozenset(config.origins))
    plans, nearest = planner.search(1)
    kept, note = _of_run(config, ranks, {key: value_of(JobConfig(), key) for key in PLANNED})
    job = with_settings(config, kept)
    if kept and refusal(job, resolve_degrees(job, ranks)):
        kept, note = {}, "; a new layout, because the one of run.json is refused now"
    if not plans and not kept:
        near = f"the nearest is {line_of(nearest[0])}" if nearest else planner.reason()
        reason = f"no layout of {ranks} x {name} fits or is accepted, with the keys that are set; {near}"
        raise ConfigError(mistake(config, "parallelism.auto", reason))
    plan = planner.plan(job, resolve_degrees(job, ranks)) if kept else plans[0]
    if kept:
        best = f"today's plan is {line_of(plans[0])}: to take it, remove run.json" if plans else "no layout fits today"
        note = "; kept from run.json" + (f", but {best}" if not plans or kept != plans[0].settings else "")
    print(f"parallelism.auto, {ranks} x {name}: {line_of(plan)}{note}", flush=True)
    return plan.job


def line_of(plan: Any) -> str:
    """A plan's layout, memory and speed, without keys that have their defaults."""
    from parallelize.layouts import Layout

    default, degrees = JobConfig(), Layout(plan.degrees)
    keys = {key: value for key, value in plan.settings.items() if key not in degrees.settings}
    words = [f"{key.rpartition('.')[2]} {value}" for key, value in keys.items() if value != value_of(default, key)]
    memory = f"{plan.gib['total']:.1f} of {plan.device.memory_gib - plan.device.reserved_gib:.1f} GiB"
    return ", ".join([str(degrees), *words, memory, f"{plan.tokens_per_second:,.0f} tokens/s a device"])


def _gpu() -> str:
    """The name of this machine's first GPU, also if it is hidden from torch; empty if there is no GPU."""
    try:  # torch would hold memory of the GPU as long as the launcher lives
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""


def _of_run(config: JobConfig, ranks: int, planned: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The layout that a resumed run has in run.json; none if it is of other ranks or keys, which the note says.

    planned: the keys of a layout, with values of their types.
    """
    folder = Path(config.job.dump_folder)
    if not config.checkpoint.enable or not any((folder / config.checkpoint.folder).glob("step-*")):
        return {}, ""
    run = read_json_if_whole(folder / "run.json")
    try:
        if not run["config"]["parallelism"]["auto"]:
            return {}, ""
        if run["ranks"] != ranks:
            return {}, f"; a new layout, because run.json has one of {run['ranks']} ranks"
        kept = {key: run["config"][key.split(".")[0]][key.split(".")[1]] for key in planned}
    except (KeyError, TypeError):
        return {}, "; a new layout, because run.json has none"
    set_now = {key: value_of(config, key) for key in planned if key in config.origins}
    if any(type(kept[key]) is not type(planned[key]) for key in planned) or any(
        value not in (-1, kept[key]) for key, value in set_now.items()
    ):
        return {}, "; a new layout, because keys are set that differ from run.json"
    return kept, ""
