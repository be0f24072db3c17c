"""Prediction and measurement of a run side by side: python -m parallelize.plan compare RUN"""

import argparse
import gzip
import json
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from components.config import ConfigError, from_json
from components.config.bounds import path_argument
from components.config.files import read_json_if_whole
from components.observe.report import read_rows
from parallelize.mesh import global_batch_size, resolve_degrees
from parallelize.plan.devices import find_device, name_of_gpu
from parallelize.plan.search import Planner, with_settings

WARM_UP = 2
"""Logged steps that are left out: they compile, allocate and fill caches."""


def main(argv: list[str]) -> int:
    """Print the comparison; returns 2 for a folder that has none."""
    parser = argparse.ArgumentParser(prog="python -m parallelize.plan compare", description=__doc__)
    parser.add_argument("run", type=path_argument, help="a run's dump folder")
    parser.add_argument("--device", help="as for a plan; if unset, the device that run.json names")
    options = parser.parse_args(argv)
    try:
        print("\n".join(compare(options.run, options.device)))
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def compare(folder: Path, device: str | None = None) -> list[str]:
    """Lines of the comparison. Raises ConfigError, also for a run without enough steps, and OSError."""
    file, metrics = folder / "run.json", folder / "metrics.jsonl"
    run = read_json_if_whole(file)
    try:
        job, ranks, card = from_json(json.dumps(run["config"])), int(run["ranks"]), str(run["device"])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{file}: missing, cut short or of another version; name the dump folder of a run") from None
    degrees = resolve_degrees(job, ranks)
    job = with_settings(job, {"training.global_batch_size": global_batch_size(job, degrees)})
    rows = [row for row in read_rows(metrics) if row.get("tokens_per_second")]
    last = max((at for at, (old, new) in enumerate(pairwise(rows), 1) if new["seconds"] < old["seconds"]), default=0)
    pairs = [*pairwise(rows[last:])][WARM_UP - 1 :]
    if not pairs:
        counted = f"{len(rows[last:])} logged steps since its last start"
        raise ConfigError(f"{metrics}: {counted}; a comparison needs more than {WARM_UP} (metrics.log_freq)")
    seconds = median(
        (new["tokens"] - old["tokens"]) / (new["step"] - old["step"]) / new["tokens_per_second"] for old, new in pairs
    )
    name = device or name_of_gpu(card if card.startswith(("NVIDIA", "AMD Instinct")) else "")
    planner = Planner(job, ranks, find_device(name))
    plan = planner.plan(job, degrees)
    tokens = job.training.global_batch_size * job.training.seq_len / ranks
    process = plan.device.reserved_gib if plan.device.kernels == "cpu" else 0  # CUDA's allocator counts its own alone
    traces = (folder / job.profiling.save_traces_folder).glob("step-*/rank_0.json.gz")
    found = measured_share(sorted(traces, key=lambda path: int(path.parent.name[5:])))
    numbers = {
        "memory, GiB": (plan.gib["total"] + process, max(row["memory_gib"] for row in rows[last:])),
        "step, seconds": (plan.times.total, seconds),
        "tokens/s a device": (plan.tokens_per_second, tokens / seconds),
        "messages that nothing hides": (plan.times.sent, found),
    }
    lines = [f"{degrees}, {ranks} x {name}, {len(pairs)} logged steps", f"{'':29}{'plan':>10}{'run':>10}"]
    for title, (planned, real) in numbers.items():
        measured = "   unknown: no trace of GPUs (profiling)" if real is None else f"{real:10.4g}"
        lines.append(f"{title:29}{planned:10.4g}{measured}" + (f"{planned / real - 1:+8.0%}" if real else ""))
    return [*lines, "memory: of the worst rank in the plan, of rank 0 in the run; seconds: a median without warm-up"]


def measured_share(traces: list[Path]) -> float | None:
    """Share of the last trace's time in which NCCL's kernels run and no other kernel does; None without kernels."""
    events: list[dict[str, Any]] = []
    if traces:
        with gzip.open(traces[-1]) as file:
            events = [each for each in json.load(file)["traceEvents"] if each.get("cat") == "kernel"]
    changes = sorted((at, sign, "nccl" in each["name"]) for each in events for at, sign in _ends(each))
    running, alone = {True: 0, False: 0}, 0.0
    for (at, sign, sends), (then, *_) in pairwise(changes):
        running[sends] += sign
        alone += (then - at) * (running[True] > 0 == running[False])
    return alone / (changes[-1][0] - changes[0][0]) if changes else None


def _ends(event: dict[str, Any]) -> tuple[tuple[float, int], tuple[float, int]]:
    return (event["ts"], 1), (event["ts"] + event["dur"], -1)
