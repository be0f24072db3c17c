"""Campaign of the loop: a rank that stops, at eight layouts, through the launcher."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from components.config import ROOT
from components.config.files import read_json_if_whole, replace
from tests.processes import alive

PROGRESS = ROOT / ".cache" / "faults" / "hangs.json"
LAYOUTS = {
    "dp_replicate 2": 2,
    "dp_shard 2": 2,
    "tp 2": 2,
    "cp 2": 2,
    "pp 2": 2,
    "dp_replicate 2 dp_shard 2": 4,
    "dp_shard 2 tp 2": 4,
    "pp 2 dp_replicate 2": 4,
}
KEYS = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
}
RUN = [
    *("--training.seq_len", "32", "--training.local_batch_size", "2", "--training.global_batch_size", "8"),
    *("--training.steps", "100000", "--metrics.log_freq", "1", "--validation.no_enable", "--checkpoint.no_enable"),
]


def campaign_hangs(timeout: float = 5) -> list[str]:
    """SIGSTOP of one rank at eight layouts, with this timeout in seconds: ended by the timeout + 5 s, and named."""
    found = read_json_if_whole(PROGRESS)
    PROGRESS.parent.mkdir(parents=True, exist_ok=True)
    for number, (layout, ranks) in enumerate(LAYOUTS.items()):
        if layout not in found:
            found[layout] = stop_one(layout, ranks, number % ranks, int(timeout))
            replace(PROGRESS, json.dumps(found, indent=1))
    PROGRESS.unlink()
    good = sum(each["good"] for each in found.values())
    lines = [f"{layout}: after {each['seconds']:.1f} s: {each['said']}" for layout, each in found.items()]
    return [f"a stopped rank was named with dimension and operation in {good} of {len(found)} layouts", *lines]


def stop_one(layout: str, ranks: int, rank: int, timeout: int) -> dict:
    """Stop this rank after three steps; what was said, and seconds until all ranks had ended."""
    degrees = dict(zip(layout.split()[::2], layout.split()[1::2], strict=True))
    words = [word for name, key in KEYS.items() for word in (f"--parallelism.{key}", degrees.get(name, "1"))]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [
                *(str(ROOT / "run_train.sh"), *RUN, *words, "--job.dump_folder", folder),
                *("--comm.train_timeout_seconds", str(timeout)),
            ],
            env=os.environ | {"NGPU": str(ranks), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        rows = Path(folder) / "metrics.jsonl"
        while process.poll() is None and not (rows.exists() and rows.read_text().count("\n") > 3):
            time.sleep(0.1)
        pids = [rank_process(folder, number) for number in range(ranks)]
        os.kill(pids[rank], signal.SIGSTOP)
        started = time.monotonic()
        while any(alive(pid) for pid in pids):
            time.sleep(0.1)
        seconds = time.monotonic() - started
        out = process.communicate()[0]
        logs = "".join(path.read_text() for path in Path(folder).glob("logs/*/rank_*.log"))
    said = re.search(r"^(?:\[rank \d+\] )?(ranks? [\d, ]+ not answering.*)$", out + logs, re.M)
    sentence = said[1] if said else "nothing"
    named = re.match(rf"rank {rank} not answering; ranks? [\d, ]+ waiting in \w+.* of (\w+) \(", sentence)
    good = bool(named and (named[1] in degrees or named[1] == "fsdp") and seconds <= timeout + 5)
    return {"good": good and process.returncode == 5, "seconds": seconds, "said": sentence}


def rank_process(folder: str, rank: int) -> int:
    """The process that trains as this rank into this folder."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:
            continue
        if b"train.py" in command and folder.encode() in command and f"\0RANK={rank}\0".encode() in environment:
            return int(path.name)
    raise RuntimeError(f"no process of rank {rank}")
