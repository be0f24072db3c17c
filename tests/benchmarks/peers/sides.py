"""The sides of a comparison: what each needs, and a run of one of them.

python -m tests.benchmarks.peers.sides      installs torchtitan and litgpt
"""

import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

from components.config import ROOT, python_path
from tests.benchmarks.peers.clock import Job

FOLDER = ROOT / ".cache" / "peers"
PEERS = {
    "torchtitan": ["torchtitan==0.2.2", "einops", "pillow"],
    "litgpt": ["litgpt==0.5.13", "lightning", "lightning-utilities", "torchmetrics", "jsonargparse"],
}
"""What is installed for a peer, without what this environment has."""
SIDES = {
    "here": ["-m", "tests.benchmarks.peers.ours"],
    "torchtitan": [str(Path(__file__).parent / "titan.py")],
    "litgpt": [str(Path(__file__).parent / "lit.py")],
    "Trainer": ["-m", "tests.benchmarks.peers.trainer"],
    "bare loop": ["-m", "tests.benchmarks.peers.bare"],
    "matrix products": ["-m", "tests.benchmarks.peers.products"],
    "kernels": ["-m", "tests.benchmarks.peers.kernels"],
}
NO_LAYOUT = {"layout": {}, "checkpointing": "none", "float8": False, "compile": False, "device": "cpu", "lora": 0}
"""What a job has where it says nothing else."""


def install() -> None:
    """Every peer into a folder of its own; what is there stays."""
    for peer, packages in PEERS.items():
        if not (FOLDER / peer).exists():
            print(f"installing {peer}", flush=True)
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(FOLDER / peer)]
            subprocess.run([*command, *packages], check=True)


def measure(side: str, job: Job, seconds: float = 1200) -> dict[str, float]:
    """A step, averaged over ranks: seconds of processor and wall, and the peak of a GPU's memory in bytes.

    Raises RuntimeError with the end of what a rank printed, or subprocess.TimeoutExpired after these seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    count = 1
    for degree in job["layout"].values():
        count *= degree
    paths = [*([str(FOLDER / side)] if side in PEERS else []), python_path()]
    shared = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    if job["device"] == "cpu":
        shared |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            [sys.executable, *SIDES[side], json.dumps(job)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    found = []
    try:
        for rank in ranks:
            out, _ = rank.communicate(timeout=seconds)
            lines = [line for line in out.splitlines() if line.startswith('{"rank"')]
            if not lines:
                raise RuntimeError(f"{side}:\n{out[-3000:]}")
            found.append(json.loads(lines[-1]))
    finally:
        for rank in ranks:
            rank.kill()
    return {number: statistics.mean(each[number] for each in found) for number in ("processor", "wall", "peak_bytes")}


if __name__ == "__main__":
    install()
