"""Wall time of the steps of one process with two threads, alone and beside two busy processes: the slowest of 40.

python -m tests.benchmarks.busy       with OpenMP's waits as the launcher sets them, and as they are by default

Two threads wait for each other at the end of each operation. One that spins meanwhile takes the core that the other
one needs, if there are more busy threads than cores.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from components.config import ROOT
from components.launch.process import OPENMP

STEPS, WARM = 40, 5
WORDS = (
    *("--job.config_file", "recipes/llama_debug.toml", "--validation.no_enable", "--checkpoint.no_enable"),
    *("--training.steps", str(STEPS + WARM), "--metrics.log_freq", "1", "--lr_scheduler.warmup_steps", "1"),
    *("--parallelism.data_parallel_replicate_degree", "1"),
)


def seconds(settings: dict[str, str], busy: int) -> list[float]:
    """Of each step, sorted; beside so many processes that compute without end."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            environment = {name: value for name, value in os.environ.items() if name not in OPENMP}
            subprocess.run(
                [sys.executable, "train.py", *WORDS, "--job.dump_folder", folder],
                cwd=ROOT,
                env=environment | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)} | settings,
                stdout=subprocess.DEVNULL,
                check=True,
            )
            rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
            tokens = rows[0]["tokens"]
            return sorted(tokens / row["tokens_per_second"] for row in rows[WARM:])
    finally:
        for other in others:
            other.kill()


def main() -> None:
    for name, settings in (("as launched", OPENMP), ("by default", {})):
        alone, beside = (seconds(settings, busy) for busy in (0, 2))
        middle = alone[STEPS // 2]
        print(
            f"{name:12} alone {middle * 1e3:.0f} ms (slowest {alone[-1] * 1e3:.0f}); beside two busy processes "
            f"{beside[STEPS // 2] * 1e3:.0f} ms, {beside[STEPS // 2] / middle:.1f} times as long; "
            f"slowest {beside[-1] * 1e3:.0f} ms, {beside[-1] / middle:.1f} times",
            flush=True,
        )


if __name__ == "__main__":
    main()
