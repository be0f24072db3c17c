"""Seconds from ./run_train.sh to the line of the first step, and where they go; and of torchtitan's first step.

python -m tests.benchmarks.launch      two ranks, in turns, after a cold start of each

torchtitan 0.2.2 is started by torchrun, with random tokens and without a checkpoint. It takes part if
`python -m tests.benchmarks.peers.sides` has installed it.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from components.config import ROOT
from tests.benchmarks.peers.__main__ import SMALL
from tests.benchmarks.peers.sides import FOLDER, NO_LAYOUT, SIDES

MARKS = {"a rank keeps": "ranks start, import torch, meet; data, model, weights", "step   1/": "the first step"}
JOB = NO_LAYOUT | SMALL | {"dtype": "bfloat16", "layout": {"fsdp": 2}, "warm": 0, "steps": 1}


def seconds(command: list[str], marks: dict[str, str], environment: dict[str, str]) -> Iterator[tuple[float, str]]:
    """Between one mark of a command's output and the next, with what the mark says."""
    last = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "", "NGPU": "2"} | environment,
    )
    assert process.stdout
    waiting = dict(marks)
    for line in process.stdout:
        for mark in [mark for mark in waiting if mark in line]:
            now = time.perf_counter()
            yield now - last, waiting.pop(mark)
            last = now
        if not waiting:
            break
    process.terminate()
    process.communicate()


def main() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    titan = [*torchrun, *SIDES["torchtitan"], json.dumps(JOB)]
    titans_path = os.pathsep.join([str(FOLDER / "torchtitan"), str(ROOT)])
    for attempt in ("cold", "warm", "warm", "warm"):
        with tempfile.TemporaryDirectory() as folder:
            parts = list(seconds([str(ROOT / "run_train.sh"), "--job.dump_folder", folder], MARKS, {}))
        ours = sum(part for part, _ in parts)
        print(f"{attempt}: {ours:.2f} s here (" + ", ".join(f"{part:.2f} s: {what}" for part, what in parts) + ")")
        if (FOLDER / "torchtitan").exists():
            ((theirs, _),) = seconds(titan, {'"rank"': ""}, {"PYTHONPATH": titans_path, "OMP_NUM_THREADS": "1"})
            print(f"      {theirs:.2f} s torchtitan, ratio {ours / theirs:.2f}", flush=True)


if __name__ == "__main__":
    main()
