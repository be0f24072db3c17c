"""The planner's time beside measured and published speeds, beside real pipelines, and beside steps of this machine.

python -m tests.benchmarks.plan_time --measured     the rows of one H100 (docs/gpu.md), by which shares were chosen
python -m tests.benchmarks.plan_time --published    points of other projects, none of which was used to choose a number
python -m tests.benchmarks.plan_time --recipes      each recipe's layout beside the best plan for its devices
python -m tests.benchmarks.plan_time --pipeline     schedules on gloo ranks that sleep, beside their simulation
python -m tests.benchmarks.plan_time --ranking      layouts of two ranks of one thread here, in turns (four minutes)
"""

import argparse
import json
import re
import statistics
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from components.config import ROOT, JobConfig, load_config
from components.data.tokenizer import with_rows
from parallelize.mesh import resolve_degrees
from parallelize.plan.auto import line_of
from parallelize.plan.devices import Device, find_device
from parallelize.plan.memory import Known, Placement
from parallelize.plan.search import Planner
from parallelize.plan.time import Times, step_times
from parallelize.rules.chosen import resolved
from tests.benchmarks.ranked import LAYOUTS, time_steps
from tests.benchmarks.ranked import job_of as job_of_layout
from tests.benchmarks.sleeping import Sleepers, sleep
from tests.ranks import Ranks

RECIPES = ROOT / "tests" / "benchmarks" / "plan_recipes.jsonl"
PUBLISHED = ROOT / "tests" / "benchmarks" / "published.toml"
_ONE = {"parallelism.data_parallel_shard_degree": 1, "activation_checkpoint.mode": "none", "compile.enable": False}
_COMPILED = {"compile.enable": True}
_FULL = {"activation_checkpoint.mode": "full"}
_OP = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
_FLOAT8 = {"model.converters": ["quantize.linear.float8"]} | _COMPILED
_LORA = {"lora.rank": 16, "lora.base": "bfloat16"}
_ROWS: list[tuple[str, int, int, dict[str, Any], int]] = [
    ("1B", 4, 4096, {}, 49_294),
    ("1B", 4, 4096, _COMPILED, 59_570),
    ("1B", 4, 4096, _FLOAT8, 63_641),
    ("1B", 4, 4096, _COMPILED | _FULL, 47_778),
    ("1B", 4, 4096, _FULL, 38_050),
    ("1B", 4, 4096, _OP, 41_686),
    ("3B", 2, 4096, {}, 19_476),
    ("3B", 2, 4096, _COMPILED, 22_432),
    ("3B", 2, 4096, _FLOAT8, 24_163),
    ("3B", 2, 4096, _COMPILED | _FULL, 17_761),
    ("3B", 2, 4096, _OP, 16_599),
    ("1B", 2, 8192, {}, 44_563),
    ("1B", 2, 8192, _COMPILED, 52_921),
    ("1B", 2, 8192, _FLOAT8, 55_487),
    ("3B", 1, 8192, _COMPILED, 20_377),
    ("8B", 1, 4096, _LORA | _COMPILED, 14_616),
    ("8B", 1, 4096, _LORA, 12_568),
    ("8B", 2, 4096, _LORA | _COMPILED, 14_998),
    ("8B", 2, 4096, _LORA, 12_828),
    ("8B", 1, 4096, _COMPILED | _FULL | {"optimizer.state_offload": True}, 2_149),
]


def job_of(recipe: str, settings: dict[str, Any]) -> JobConfig:
    """A recipe with other settings."""
    words = [
        word
        for key, value in settings.items()
        for word in (f"--{key}", value if isinstance(value, str) else json.dumps(value))
    ]
    return resolved(load_config(["--job.config_file", str(ROOT / f"recipes/{recipe}.toml"), *words]))


def planned(job: JobConfig, ranks: int, device: Device) -> tuple[float, Times]:
    """Tokens per second on a device, and the time of a step."""
    times = step_times(Placement(Known(job, device.kernels), job, resolve_degrees(job, ranks)), device)
    return job.training.global_batch_size * job.training.seq_len / times.total / ranks, times


def measured_jobs() -> list[tuple[str, JobConfig, int]]:
    """Name, job and measured tokens per second of each row of docs/gpu.md."""
    found = []
    for flavor, batch, seq, more, speed in _ROWS:
        sizes = {"training.seq_len": seq, "training.local_batch_size": batch, "training.global_batch_size": batch}
        words = [f"{key.partition('.')[2]} {value}" for key, value in more.items()]
        name = ", ".join((flavor, f"{batch} x {seq}", *words))
        found.append((name, job_of(f"llama{flavor.lower()}", _ONE | sizes | more), speed))
    return found


def measured() -> None:
    """Print the rows of one H100 beside plans."""
    device = find_device("h100-80g")
    for name, job, speed in measured_jobs():
        plan, times = planned(job, 1, device)
        _line(name, plan, speed, times)


def points() -> list[dict[str, Any]]:
    """The points of published.toml."""
    found: list[dict[str, Any]] = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))["point"]
    return found


def planned_point(point: dict[str, Any]) -> tuple[float, Times]:
    """As `planned`, of a published point."""
    return planned(job_of(point["recipe"], point["set"]), point["devices"], find_device(point["device"]))


def published(page: Path | None = None) -> None:
    """Print the published points beside plans, and the median error; with a page, replace its table."""
    errors, rows = (
        [],
        ["| point | source | published | plan | error | assumed, or why it is missed |", "|---|---|---|---|---|---|"],
    )
    for point in points():
        speed = point["tokens_per_second"]
        plan, times = planned_point(point)
        _line(point["name"], plan, speed, times)
        errors.append(plan / speed - 1)
        notes = "; ".join(point[key] for key in ("assumed", "missed") if key in point)
        rows.append(f"| {point['name']} | {point['source']} | {speed:,} | {plan:,.0f} | {errors[-1]:+.0%} | {notes} |")
    sizes = [abs(error) for error in errors]
    words = f"{len(errors)} points: median error {statistics.median(sizes):.0%}, largest {max(sizes):.0%}"
    print(words)
    if page:
        before, _, rest = page.read_text(encoding="utf-8").partition("<!-- points -->\n")
        after = rest.partition("<!-- end -->")[2]
        table = "\n".join((*rows, "", f"{words}."))
        page.write_text(f"{before}<!-- points -->\n{table}\n<!-- end -->{after}", encoding="utf-8")


def machine_of(recipe: Path) -> tuple[int, Device]:
    """Ranks and device that the comment of a recipe names, "For: 2 nodes of 8 GPUs of 80 GB": H100s of that memory."""
    text = recipe.read_text(encoding="utf-8")
    found = re.search(r"For: (?:(\d+) nodes of )?(\d+) GPUs? of (\d+) GB", text)
    if not found:
        assert "For: any machine" in text, recipe
        return 2, find_device("cpu")
    nodes, ranks, size = (int(each or 1) for each in found.groups())
    h100 = find_device("h100-80g")
    return nodes * ranks, replace(h100, memory_gib=h100.memory_gib * size / 80, ranks_per_node=ranks)


def compared(recipe: Path) -> dict[str, Any]:
    """The recipe's own layout beside the best plan for the devices that its comment names."""
    ranks, device = machine_of(recipe)
    job = resolved(with_rows(load_config(["--job.config_file", str(recipe)])))
    planner = Planner(job, ranks, device)
    own = planner.plan(job, resolve_degrees(job, ranks))
    plans, _ = planner.search(1)
    row: dict[str, Any] = {"recipe": recipe.stem, "ranks": ranks, "memory_gib": device.memory_gib, "own": line_of(own)}
    if plans:
        row |= {"best": line_of(plans[0]), "slower": round(1 - plans[0].times.total / own.times.total, 3)}
    return row | (
        {} if own.fits else {"misses_gib": round(own.gib["total"] + device.reserved_gib - device.memory_gib, 1)}
    )


def recipes() -> None:
    """Print each recipe's layout beside the best plan, write plan_recipes.jsonl, and print those without a reason."""
    rows = []
    for recipe in sorted((ROOT / "recipes").glob("*.toml")):
        rows.append(compared(recipe))
        print(json.dumps(rows[-1]), flush=True)
    RECIPES.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    missed = [row["recipe"] for row in rows if is_slower(row)]
    print(f"{len(missed)} of {len(rows)} are more than 10 % slower than the best plan: {', '.join(missed)}")


def is_slower(row: dict[str, Any]) -> bool:
    """Whether a row of plan_recipes.jsonl needs a comment in its recipe."""
    return "misses_gib" in row or row.get("slower", 1) > 0.1


SCHEDULES = [
    *(Sleepers(name, 4, 8) for name in ("1F1B", "GPipe")),
    *(Sleepers(name, 4, 8, 2) for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")),
    *(Sleepers(name, 4, 8, 2) for name in ("ZBVZeroBubble", "DualPipeV")),
    Sleepers("Interleaved1F1B", 2, 4, 3),
    Sleepers("1F1B", 4, 4, parts=2),
    Sleepers("1F1B", 4, 8, uneven=True),
    Sleepers("ZBVZeroBubble", 4, 8, 2, uneven=True),
]


def pipeline() -> None:
    """Print the bubble of each schedule on real ranks, and simulated; it is idle time over the longest rank's work."""
    worlds: dict[int, Ranks] = {}
    worst = 0.0
    for case in SCHEDULES:
        ranks = worlds[case.pp] = worlds.get(case.pp) or Ranks(case.pp, sleep, {})
        real, (simulated, work) = ranks.run(case), case.simulated()
        if isinstance(real, Exception):
            raise real
        worst = max(worst, abs(real - simulated) / work)
        print(f"{case.name:22} {real / work - 1:6.1%} real {simulated / work - 1:6.1%} simulated  {case}", flush=True)
    for ranks in worlds.values():
        ranks.end()
    print(f"largest difference {100 * worst:.1f} points")


def ranking(turns: int) -> None:
    """Print steps of this machine beside plans with its calibrated device, and the correlation of their ranks."""
    ranks = Ranks(2, time_steps, {})
    table = ranks.run("")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "here.toml"
        file.write_text(table, encoding="utf-8")
        device = find_device(str(file))
    print(table, flush=True)
    real: dict[str, list[list[float]]] = {name: [] for name in LAYOUTS}
    for _ in range(turns):
        for name, found in real.items():
            found.append(ranks.run(name))
            if isinstance(found[-1], Exception):
                raise found[-1]
    ranks.end()
    plans = {name: planned(job_of_layout(name), 2, device)[1] for name in LAYOUTS}
    planned_ms = [1000 * times.total for times in plans.values()]
    wall, processor = ([1000 * min(pair[kind] for pair in found) for found in real.values()] for kind in (0, 1))
    print("| layout | wall, ms | processor, ms | plan, ms |\n|---|---|---|---|")
    for row in sorted(zip(wall, processor, planned_ms, LAYOUTS, strict=True)):
        print("| {3} | {0:.0f} | {1:.0f} | {2:.0f} |".format(*row))
    busy = [1000 * (times.total - times.pipeline) for times in plans.values()]
    print(f"rank correlation {correlation(wall, planned_ms):.2f}")
    print(f"of processor time and plans without a pipeline's idle time {correlation(processor, busy):.2f}")
    for name, times in plans.items():
        turns_ms = [[round(1000 * pair[kind]) for pair in real[name]] for kind in (0, 1)]
        print(name, *turns_ms, {key: round(1000 * value) for key, value in vars(times).items() if value})


def correlation(left: list[float], right: list[float]) -> float:
    """Spearman's, without ties."""
    first, second = ([sorted(values).index(value) for value in values] for values in (left, right))
    return statistics.correlation(first, second)


def _line(name: str, plan: float, speed: float, times: Times) -> None:
    parts = ", ".join(f"{key} {value / times.total:.0%}" for key, value in vars(times).items() if value)
    print(f"{name:70} {speed:7,.0f} tokens/s, plan {plan:7,.0f}, {plan / speed - 1:+.1%} ({parts})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("measured", "published", "recipes", "pipeline", "ranking"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--write", action="store_true", help="the published points into docs/plan_points.md")
    parser.add_argument("--turns", type=int, default=5, help="of --ranking (5)")
    options = parser.parse_args()
    if options.measured:
        measured()
    if options.published or options.write:
        published(ROOT / "docs" / "plan_points.md" if options.write else None)
    if options.recipes:
        recipes()
    if options.pipeline:
        pipeline()
    if options.ranking:
        ranking(options.turns)


if __name__ == "__main__":
    main()
