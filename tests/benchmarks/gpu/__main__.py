"""Layouts of several ranks on NCCL, speeds of training steps, and every fast path against float32 on the CPU.

python -m tests.benchmarks.gpu                      all of it, on the first GPU; goes on where it was stopped
python -m tests.benchmarks.gpu --minutes 9          what tells most, and nothing that could end later than that
python -m tests.benchmarks.gpu --minutes 9 --dry    prints what that would be; needs no GPU
python -m tests.benchmarks.gpu --processes 6        as many checks at once; speeds are measured one after another
python -m tests.benchmarks.gpu --only "8B, 1 × 4096"  what has these words in its name; of several, in their order
python -m tests.benchmarks.gpu --tables             tables and picture of what is in --folder; needs no GPU
python -m tests.benchmarks.gpu --nccl               only layouts of 2 to 8 ranks on NCCL, which may share a GPU
python -m tests.benchmarks.gpu --cpu                a few small ones without a GPU: shows that the kit runs

Results are added to results.jsonl in --folder, and shown in tables.md and speeds.png beside it. Rows without a result
come first, then those of other code than today's. torchtitan is measured if .cache/peers has it (`python -m
tests.benchmarks.peers.sides` installs it, where the network allows it).
"""

import argparse
import gzip
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# A rank is forked from a process that may ask for GPUs but not use one.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

from components.config import ROOT, Model
from components.config.model import Lora
from components.observe.metrics import git_revision, peak_flops
from models import meta_model
from tests.benchmarks.gpu import nccl
from tests.benchmarks.gpu.checks import Row, Work, at_once, checks
from tests.benchmarks.gpu.rows import LORA, PATHS, SAME_BITS, STEPS, TINY, Step
from tests.benchmarks.peers import sides

MOST_SECONDS = 240
"""Of a side: compiling 8B takes a minute or two."""
CODE = ("components", "models", "parallelize")
"""Folders whose code a result is of."""
SHOWN = {"here": "tab:blue", "torchtitan": "tab:orange", "bare loop": "tab:gray"}
"""Sides in the tables, with their colours."""


def time_of(side: str, step: Step, device: str) -> Row:
    """Seconds of a step and bytes at its peak; or why there are none."""
    if side in sides.PEERS and not (sides.FOLDER / side).exists():
        return {"why": "not installed"}
    try:
        return dict(sides.measure(side, step.job(device), MOST_SECONDS))
    except subprocess.TimeoutExpired:
        return {"why": f"longer than {MOST_SECONDS} s"}
    except RuntimeError as error:
        return {"why": "out of memory" if "OutOfMemory" in str(error) else str(error).strip().splitlines()[-1][:200]}


def profile(step: Step, device: str, folder: Path) -> Row:
    """Time by operation of one step: the 25 longest, of the GPU's kernels if there is a GPU."""
    words = ("--profiling.enable_profiling", "true", "--profiling.profile_freq", "10")
    job = step.job(device) | {"folder": str(folder / "profile"), "steps": 12}
    sides.measure("here", job | {"words": (*step.words, *words)}, MOST_SECONDS)
    (trace,) = (folder / "profile").glob("profile_traces/step-10/rank_0.json.gz")
    spent: Counter[str] = Counter()
    for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        if event.get("cat") == ("kernel" if device == "cuda" else "cpu_op"):
            spent[event["name"]] += event["dur"]
    return {"step": step.name, "milliseconds": {name: us / 1e3 for name, us in spent.most_common(25)}}


def flops(step: Step) -> tuple[int, int]:
    """Of a token, with attention counted full and half."""
    lora = Lora(rank=16) if step.words == LORA else Lora()
    return meta_model(Model(name="llama", flavor=step.flavor, lora=lora)).flops_per_token(step.seq)


def tokens_per_second(step: Step, row: Row) -> float:
    return step.batch * step.seq / row["wall"]


def mfu(step: Step, row: Row, device_name: str) -> str:
    """The model's FLOP/s over the device's peak, with attention counted full and half."""
    peak = peak_flops(device_name)
    if not peak or "wall" not in row:
        return ""
    tokens = tokens_per_second(step, row)
    return " / ".join(f"{tokens * count / peak:.1%}" for count in flops(step))


@dataclass(frozen=True)
class Round:
    """Rows of one kind."""

    kind: str
    seconds: float
    """A row is assumed to take so long until one has been measured."""
    most: float
    """Seconds that no row exceeds."""
    work: list[Work]
    processes: int = 1


def rounds_of(steps: list[Step], device: str, processes: int, of_layouts: bool) -> list[Round]:
    """In the order of what they tell. of_layouts: also layouts of several ranks."""
    speeds = [*times(steps, device)]
    ours = [(name, make) for name, make in speeds if name.endswith(": here")]
    theirs = [(name, make) for name, make in speeds if not name.endswith(": here")]
    layouts = [Round("layouts", 8, nccl.MOST_SECONDS, [*nccl.checks()])] if of_layouts else []
    paths = Round("paths", 6, MOST_SECONDS, [*checks()], processes)
    of_others = Round("speeds of others", 45, MOST_SECONDS, theirs)
    return [*layouts, Round("speeds", 45, MOST_SECONDS, ours), paths, of_others]


def plan(rounds: list[Round], rows: dict[str, Row], words: list[str]) -> list[tuple[Round, list[Work]]]:
    """The rows that each round still has to run: first rows without a result, then rows of other code."""
    missing, other = list[tuple[Round, list[Work]]](), list[tuple[Round, list[Work]]]()
    today = code()
    for each in rounds:
        work = dict(each.work)
        chosen = dict.fromkeys(name for part in words for name in work if part in name)
        # Errors may be of what has changed since.
        none = [name for name in chosen if rows.get(name, {"verdict": "error"}).get("verdict") == "error"]
        stale = [name for name in chosen if name not in none and rows[name].get("code") != today]
        missing.append((each, [(name, work[name]) for name in none]))
        other.append((each, [(name, work[name]) for name in stale]))
    return [*missing, *other]


def dry(planned: list[tuple[Round, list[Work]]], rows: dict[str, Row], seconds: float) -> Iterator[str]:
    """A line for each row that would begin within this time, with its start."""
    spent, left = 0.0, 0
    for each, work in planned:
        for name, _ in work:
            takes = rows.get(name, {}).get("took", each.seconds) / each.processes
            if spent > seconds - each.most:
                left += 1
                continue
            yield f"{spent:6.0f} s  {name}"
            spent += takes
    yield f"{spent:6.0f} s  end, as far as is known; {left} left"


def code() -> str:
    """A hash of the code that results are of."""
    files = [ROOT / "train.py", *sorted(file for name in CODE for file in (ROOT / name).rglob("*.py"))]
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=8).hexdigest()


def machine() -> Row:
    """What measures."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    revision = (git_revision()["revision"] or "unknown")[:7]
    return {"name": name, "torch": torch.__version__, "nccl": nccl.version(), "revision": revision}


def in_table(step: Step, row: Row) -> str:
    """Two cells: tokens a second, and GiB at the peak; or why there are none."""
    if "wall" not in row:
        return f"{row.get('why', '')} | "
    return f"{tokens_per_second(step, row):,.0f} | {row['peak_bytes'] / 2**30:.1f}"


def because(row: Row) -> str:
    """Why a row has no figures, after a colon."""
    return f": {row['why']}" if "why" in row else ""


def tables(rows: dict[str, Row]) -> str:
    """Markdown of all results."""
    device_name = rows["machine"]["name"]
    lines = [f"{device_name}, torch {rows['machine']['torch']}, revision {rows['machine']['revision']}.", ""]
    lines += ["| against float32 on the CPU | error of the loss | of the worst gradient | |", "|---|---|---|---|"]
    for path in PATHS:
        if row := rows.get(path.name):
            errors = [f"{row[figure]:.1e}" if figure in row else "" for figure in ("loss", "gradient")]
            lines.append(f"| {path.name} | {' | '.join(errors)} | {row['verdict']}{because(row)} |")
    lines += ["", "| with and without it, three steps | parameters that differ | |", "|---|---|---|"]
    for same in SAME_BITS:
        if row := rows.get(same.name):
            lines.append(f"| {same.name} | {row.get('differ', '')} | {row['verdict']}{because(row)} |")
    lines += ["", *nccl.table(rows)]
    titles = ["a step", "MFU, attention full / half", *(f"{side}, tokens/s | peak, GiB" for side in SHOWN)]
    lines += ["", f"| {' | '.join(titles)} |", "|---" * (2 + 2 * len(SHOWN)) + "|"]
    for step in (*STEPS, *TINY):
        sides_of_it = [rows.get(f"{step.name}: {side}", {}) for side in SHOWN]
        if any(sides_of_it):
            used = mfu(step, sides_of_it[0], device_name)
            lines.append(f"| {step.name} | {used} | {' | '.join(in_table(step, row) for row in sides_of_it)} |")
    if found := rows.get("profile"):
        lines += ["", f"| operation, {found['step']} | ms |", "|---|---|"]
        lines += [f"| {name[:90]} | {spent:.2f} |" for name, spent in found["milliseconds"].items()]
    return "\n".join(lines) + "\n"


def draw(rows: dict[str, Row], path: Path) -> None:
    """The model's FLOP/s (attention counted full) and the peak of memory, by step and side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [step for step in (*STEPS, *TINY) if "wall" in rows.get(f"{step.name}: here", {})][::-1]
    figure, panels = plt.subplots(1, 2, figsize=(11, 0.5 * len(steps) + 1), sharey=True, layout="constrained")
    for place, (side, colour) in enumerate(SHOWN.items()):
        measured = [(height, step, rows.get(f"{step.name}: {side}", {})) for height, step in enumerate(steps)]
        bars = [(height + 0.27 * (1 - place), step, row) for height, step, row in measured if "wall" in row]
        heights = [height for height, _, _ in bars]
        speeds = [tokens_per_second(step, row) * flops(step)[0] / 1e12 for _, step, row in bars]
        peaks = [row["peak_bytes"] / 2**30 for _, _, row in bars]
        for panel, values in zip(panels, (speeds, peaks), strict=True):
            panel.barh(heights, values, 0.25, color=colour, label=side)
    panels[0].set_yticks(range(len(steps)), [step.name for step in steps])
    panels[0].set_xlabel("TFLOP/s of the model")
    panels[1].set_xlabel("peak memory, GiB")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(SHOWN))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def times(steps: list[Step], device: str) -> Iterator[Work]:
    """What needs the machine for itself."""
    for step in steps:
        for side in step.sides:
            yield f"{step.name}: {side}", partial(time_of, side, step, device)


def main(argv: list[str]) -> int:
    """1 if a path does not hold or four ranks cannot talk, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "gpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--nccl", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args(argv)
    started = time.monotonic()
    if not options.cpu and not options.tables and not options.dry and not torch.cuda.is_available():
        print("there is no GPU that this torch can use (--cpu runs a few small steps without one)", file=sys.stderr)
        return 2
    device, steps = ("cpu", TINY) if options.cpu else ("cuda", STEPS)
    results = options.folder / "results.jsonl"
    rows: dict[str, Row] = {}
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else ():
        rows |= json.loads(line)
    if options.tables and not rows:
        print(f"there are no results in {options.folder}", file=sys.stderr)
        return 2

    rounds = rounds_of(steps, device, options.processes, options.nccl or not options.cpu)
    planned = plan(rounds[: 1 if options.nccl else None], rows, options.only)
    if options.dry:
        print(*dry(planned, rows, 60 * options.minutes), sep="\n")
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)

    def add(name: str, row: Row) -> None:
        rows[name] = row
        with open(results, "a", encoding="utf-8") as file:
            print(json.dumps({name: row}), file=file)
        print(f"{time.monotonic() - started:6.0f} s  {name}  {row}", flush=True)

    left, end, today = 0, started + 60 * options.minutes, code()
    if not options.tables and any(work for each, work in planned if each.kind == "layouts"):
        spent = nccl.smoke(4)
        print(f"four ranks cannot talk: {spent}" if isinstance(spent, Exception) else f"milliseconds: {spent}")
        if isinstance(spent, Exception):
            planned = [(each, work) for each, work in planned if each.kind != "layouts"]
            if not planned:
                return 1
    if not options.tables:
        if rows.get("machine") != machine():
            add("machine", machine())
        for each, work in planned:
            for name, row in at_once(each.processes, end - each.most, work):
                if row is None:
                    left += 1
                else:
                    add(name, row | {"code": today})
        timed = [step for step in steps if "wall" in rows.get(f"{step.name}: here", {})]
        if timed and "profile" not in rows and not left and not options.nccl and time.monotonic() <= end - MOST_SECONDS:
            best = max(timed, key=lambda step: tokens_per_second(step, rows[f"{step.name}: here"]) * flops(step)[0])
            add("profile", profile(best, device, options.folder))
    (options.folder / "tables.md").write_text(tables(rows), encoding="utf-8")
    draw(rows, options.folder / "speeds.png")
    print(f"written: {options.folder / 'tables.md'}" + f"; {left} left: the same command goes on" * bool(left))
    return int(any(row.get("verdict") in ("broken", "error") for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
