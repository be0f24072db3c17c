"""The planner's memory beside the dry run's, real steps' and an H100's; docs/plan.md has the figures.

python -m tests.benchmarks.plan              all layouts of plan.jsonl, beside the dry runs' figures there: one minute
python -m tests.benchmarks.plan tp cp        layouts whose words have one of these
python -m tests.benchmarks.plan --dry-run    runs the dry runs again, and rewrites their figures: about twenty minutes
python -m tests.benchmarks.plan --gloo       beside steps of two gloo ranks, whose peaks it writes to plan_gloo.jsonl
python -m tests.benchmarks.plan --h100       beside the measured peaks of docs/gpu.md
"""

import json
import multiprocessing
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from components.commands.dry_run import HIGHEST, dry_run
from components.config import ROOT, JobConfig, load_config
from components.data.tokenizer import with_rows
from parallelize.mesh import resolve_degrees
from parallelize.plan.memory import GIB, Known, Placement, memory
from parallelize.rules.chosen import resolved
from parallelize.sharding import local_part

KEYS = {
    "tp": "parallelism.tensor_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "fsdp": "parallelism.data_parallel_shard_degree",
    "ddp": "parallelism.data_parallel_replicate_degree",
    "layers": "model.sizes.n_layers",
    "mtp": "model.sizes.mtp_layers",
    "ac": "activation_checkpoint.mode",
    "local": "training.local_batch_size",
    "every": "activation_checkpoint.selective_ac_option",
    "batch": "training.global_batch_size",
    "method": "parallelism.context_parallel_method",
    "schedule": "parallelism.pipeline_parallel_schedule",
    "reshard": "parallelism.fsdp_reshard_after_forward",
    "reduce": "parallelism.fsdp_reduce_gradients",
    "sp": "parallelism.sequence_parallel",
    "splits": "parallelism.pipeline_parallel_sequence_splits",
    "seq": "training.seq_len",
    "lora": "lora.rank",
    "base": "lora.base",
    "state": "optimizer.state_dtype",
    "optimizer": "optimizer.name",
    "micro": "parallelism.pipeline_parallel_microbatch_size",
    "cpu_offload": "training.enable_cpu_offload",
    "state_offload": "optimizer.state_offload",
    "converters": "model.converters",
    "stage": "parallelism.pipeline_parallel_layers_per_stage",
    "precision": "training.mixed_precision_param",
}
"""A word of a layout -> key of the job file."""

TABLE = Path(__file__).with_suffix(".jsonl")
"""A line for each layout: the dry run's GiB at the highest point of rank 0, or of a rank of the pipeline."""


GLOO = TABLE.with_name("plan_gloo.jsonl")
"""A line for each layout of two gloo ranks: MiB at the highest point of rank 0, measured and planned."""
_SMALL = "layers=4 seq=512 local=4 batch=-1"
_ZBV = "pp=2 schedule=ZBVZeroBubble"
ON_GLOO = (
    *("fsdp=2", "fsdp=2 reshard=never", "fsdp=2 ac=full", "fsdp=2 ac=selective every=op", "fsdp=2 precision=bfloat16"),
    *("fsdp=2 batch=8 local=1", "fsdp=2 batch=8 local=1 reduce=each", "fsdp=2 lora=8", "fsdp=2 optimizer=Muon"),
    *("ddp=2", "ddp=2 batch=8 local=1", "ddp=2 precision=bfloat16"),
    *("tp=2", "tp=2 sp=false", "tp=2 ac=full", "tp=2 ac=selective every=op"),
    *("cp=2 method=ring", "cp=2 method=ulysses", "cp=2 method=allgather_kv"),
    *("pp=2 schedule=1F1B", "pp=2 schedule=Interleaved1F1B", _ZBV, f"{_ZBV} ac=full", f"{_ZBV} precision=bfloat16"),
)
"""Words of layouts; _SMALL comes first."""


def job_of(words: str) -> tuple[JobConfig, int]:
    """The job of a line of LAYOUTS, and its number of ranks."""
    recipe, ranks, *settings = words.split()
    given = _keys(settings)
    return resolved(with_rows(load_config(["--job.config_file", str(ROOT / f"recipes/{recipe}.toml"), *given]))), int(
        ranks
    )


def _keys(settings: list[str]) -> list[str]:
    pairs = (each.split("=") for each in settings)
    return [word for name, value in pairs for word in (f"--{KEYS[name]}", value)]


def planned(words: str, rank: int = 0) -> float:
    """The planner's GiB at the highest point of a rank of the pipeline.

    On a CPU, the dry run cannot tell offloaded weights from others, so they count here too.
    """
    job, ranks = job_of(words)
    place = Placement(Known(job, "cpu"), job, resolve_degrees(job, ranks))
    found = memory(place, rank)["total"]
    if job.training.enable_cpu_offload:
        held = [stage.all for stage in place.of_rank[rank].values()]
        found += sum(each.weights + each.gradients + each.optimizer for each in held) / GIB
    return found


def compare(words: str, rank: int = 0) -> tuple[float, float]:
    """GiB at the highest point of a rank of the pipeline: planned, and by a dry run. For a process of its own."""
    job, ranks = job_of(words)
    found = planned(words, rank)
    first = rank * ranks // resolve_degrees(job, ranks).pp
    os.environ |= {"RANK": str(first), "WORLD_SIZE": str(ranks)}
    return found, dry_run(job).memory[HIGHEST] / GIB


def peak_of_step(run: Any) -> int:
    """Bytes of tensors at the highest point of a real step before the update, with moments."""
    from tests.test_dry_run import count_real

    moments = [tensor for state in run.optimizer.state.values() for tensor in state.values() if tensor.ndim]
    return count_real(run)[0] + sum(local_part(tensor)[1].nbytes for tensor in moments)


def on_gloo(words: str) -> tuple[float, float]:
    """MiB at the highest point of rank 0, of two gloo ranks: planned, and measured."""
    from tests.harness import observe
    from tests.small import RECIPE, small_for

    given = ["--model.flavor", "wide", *_keys(f"{_SMALL} {words}".split())]
    job = resolved(load_config(["--job.config_file", str(RECIPE), *small_for(given), *given]))
    plan = memory(Placement(Known(job, "cpu"), job, resolve_degrees(job, 2)), 0)["total"]
    return plan * 2**10, observe(*given, ranks=2, steps=1, at_end=peak_of_step).extra / 2**20


def gloo(wanted: list[str]) -> None:
    """Print and write a line for each of ON_GLOO."""
    rows, errors = [], list[float]()
    for words in ON_GLOO:
        if wanted and not any(word in words for word in wanted):
            continue
        plan, real = on_gloo(words)
        errors.append(plan / real - 1)
        rows.append({"layout": words, "measured_mib": round(real, 1), "plan_mib": round(plan, 1)})
        print(f"{words:40} plan {plan:7.1f} MiB, measured {real:7.1f} MiB, {plan / real - 1:+.1%}", flush=True)
    _summary(errors)
    if not wanted:
        GLOO.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def h100() -> None:
    """Print a row of docs/plan.md for each row of docs/gpu.md; rows are found there by their speed."""
    from tests.benchmarks.plan_time import measured_jobs

    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in page if " × " in line and line.startswith("|")]
    peaks = {int(row[3].replace(",", "")): (row[1], float(row[4])) for row in cells}
    errors = []
    for _, job, speed in measured_jobs():
        name, peak = peaks[speed]
        plan = memory(Placement(Known(job, "cuda"), job, resolve_degrees(job, 1)), 0)["total"]
        errors.append(plan / peak - 1)
        print(f"| {name} | {peak} | {plan:.1f} | {errors[-1]:+.1%} |", flush=True)
    _summary(errors)


def _summary(errors: list[float]) -> None:
    sizes = [abs(error) for error in errors]
    print(json.dumps({"layouts": len(sizes), "median": statistics.median(sizes), "worst": max(sizes)}))


def dry_runs(wanted: list[str]) -> None:
    """Print a line for each layout of plan.jsonl."""
    again, wanted = "--dry-run" in wanted, [word for word in wanted if word != "--dry-run"]
    rows = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.benchmarks.plan"])
    errors = []
    for row in rows:
        words, rank = row["layout"], row.get("rank", 0)
        if wanted and not any(word in words for word in wanted):
            continue
        with ProcessPoolExecutor(1, context) as pool:
            plan, real = (
                pool.submit(compare, words, rank).result() if again else (planned(words, rank), row["dry_run_gib"])
            )
        row["dry_run_gib"] = round(real, 3)
        errors.append(plan / real - 1)
        print(f"{words:72} {rank} plan {plan:7.2f} GiB, dry run {real:7.2f} GiB, {plan / real - 1:+.1%}", flush=True)
    if again:
        TABLE.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    _summary(errors)


def main(words: list[str]) -> None:
    """Print a line for each layout, and the median and the worst difference."""
    if words[:1] == ["--h100"]:
        h100()
    elif words[:1] == ["--gloo"]:
        gloo(words[1:])
    else:
        dry_runs(words)


if __name__ == "__main__":
    main(sys.argv[1:])
