"""Campaigns on what people write: mutated recipes, command lines and JSON files."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from components.config import ROOT
from components.config.files import read_json_if_whole, replace
from parallelize.groups import init_distributed
from tests.faults.mutations import Mutations

PROGRESS = ROOT / ".cache" / "faults" / "mutations.json"
SMALL = [
    *("--training.steps", "1", "--training.seq_len", "32", "--training.local_batch_size", "1"),
    *("--training.global_batch_size", "1", "--lr_scheduler.warmup_steps", "0", "--validation.no_enable"),
    *(
        "--checkpoint.no_enable",
        "--model.name",
        "llama",
        "--model.flavor",
        "debug",
        "--training.dataset_cache",
        ".cache/tokens",
    ),
]
"""What a mutated job that is taken computes."""
LAUNCH_SECONDS = 600


def campaign_mutations(launches: float = 300) -> list[str]:
    """10,000 mutated recipes, command lines and JSON files checked in one process, and some of them launched."""
    progress: dict[str, Any] = {"checked": 0, "launched": 0, "faults": []} | read_json_if_whole(PROGRESS)
    PROGRESS.parent.mkdir(parents=True, exist_ok=True)
    init_distributed(60)  # readers of checkpoints ask all ranks: here one
    with tempfile.TemporaryDirectory() as folder:
        mutations = Mutations(Path(folder))
        while progress["checked"] < 10_000 or progress["launched"] < launches:
            if progress["checked"] < 10_000:
                found, kind = mutations.fault(progress["checked"]), "checked"
            else:
                found, kind = launch(mutations, progress["launched"] * 7 + 1, Path(folder)), "launched"
            progress[kind] += 1
            progress["faults"] += [found] if found else []
            if progress[kind] % 100 == 0 or kind == "launched" or found:
                replace(PROGRESS, json.dumps(progress))
                print(f"\r{progress['checked']} checked, {progress['launched']} launched", end="", file=sys.stderr)
    PROGRESS.unlink()  # the next campaign begins anew
    counted = f"{progress['checked']:,} checked, {progress['launched']} launched: {len(progress['faults'])} faults"
    return [
        f"{counted} (a traceback, a hang, a message of several lines, an exit code of none of ours)",
        *progress["faults"],
    ]


def launch(mutations: Mutations, number: int, folder: Path) -> str | None:
    """What is wrong with a run of mutation `number`: None if nothing is."""
    command = [str(ROOT / "run_train.sh"), *mutations.argv(number), *SMALL, "--job.dump_folder", str(folder / "out")]
    environment = {**os.environ, "NGPU": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    try:
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, timeout=LAUNCH_SECONDS)
    except subprocess.TimeoutExpired:
        return f"launch {number}: more than {LAUNCH_SECONDS} s: {command[1 : -len(SMALL)]}"
    said = (done.stdout + done.stderr).decode(errors="replace")
    if done.returncode in (0, 2, 3) and "Traceback" not in said:
        return None
    return f"launch {number}: exit code {done.returncode}: {said.strip().splitlines()[-1:]}"
