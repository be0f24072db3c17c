"""Whole runs of train.py on small models through the launcher, for tests that kill, stop and restart them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from components.config import ROOT
from tests.limits import finish, wait_until
from tests.small import SMALL

RUN = [
    *SMALL,
    *("--training.global_batch_size", "8", "--training.local_batch_size", "4", "--metrics.log_freq", "1"),
    *("--checkpoint.enable", "true", "--checkpoint.interval", "4", "--training.steps", "16"),
]
"""Sixteen steps of milliseconds, with a checkpoint every fourth."""
SCRIPT = Path(__file__)


class Whole:
    """A launcher with its ranks, in its own session; `words` are added to RUN.

    Ranks run FAULT first (rank.py).
    """

    def __init__(self, folder: Path, *words: str, fault: str = "", **variables: str) -> None:
        self.folder = folder
        settings = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "NGPU": "2", "OMP_NUM_THREADS": "1"}
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *RUN, "--job.dump_folder", str(folder), *words],
            cwd=ROOT,
            env={**kept, **settings, "FAULT": fault, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def ranks(self) -> list[int]:
        """Process ids of the ranks, in order."""
        return [rank for server in children(self.process.pid) for rank in children(server)]

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: last_step(self.folder) >= step)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, self.process)

    def end(self) -> tuple[int, str]:
        """Exit code, and all that was printed."""
        out, _ = finish(self.process)
        return self.process.returncode, out

    def kill(self) -> None:
        """Everything that is left, at once."""
        for pid in [*(self.ranks() if self.process.poll() is None else []), self.process.pid]:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def descendants(pid: int) -> list[int]:
    """Ranks, their loader workers, and the process that ranks are forked from."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def children(pid: int) -> list[int]:
    listing = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return sorted(int(line) for line in listing.split())


def rows(folder: Path) -> list[dict]:
    """Whole lines of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last_step(folder: Path) -> int:
    return max((row["step"] for row in rows(folder)), default=0)


def losses(folder: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows(folder) if "loss" in row]


def steps_saved(folder: Path) -> list[int]:
    """Steps of the checkpoints, in order."""
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoint").glob("step-*"))


def content(folder: Path, step: int) -> dict:
    """Size and hash of every file of a checkpoint: equal for equal bits of weights, moments and state."""
    return json.loads((folder / f"checkpoint/step-{step}/manifest.json").read_text())


if __name__ == "__main__":
    from components.commands import start

    vars(start)["RANK"] = "tests.rank:run"
    sys.exit(start.main(sys.argv[1:]))
