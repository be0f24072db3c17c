"""Clean runs of four ranks through run_train.sh, and their exit codes: python -m tests.benchmarks.exits [20]"""

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter

from components.config import ROOT


def main(runs: int) -> Counter[int]:
    codes: Counter[int] = Counter()
    started = time.perf_counter()
    for number in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            command = [
                str(ROOT / "run_train.sh"),
                *("--training.steps", "3", "--training.seq_len", "32", "--training.local_batch_size", "2"),
                *("--lr_scheduler.warmup_steps", "0", "--job.dump_folder", folder, "--checkpoint.async_mode", "async"),
                *("--training.dataloader.num_workers", str(number % 2), "--validation.steps", "2"),
            ]
            codes[subprocess.run(command, env=os.environ | {"NGPU": "4"}, capture_output=True).returncode] += 1
        seconds = (time.perf_counter() - started) / (number + 1)
        print(f"\r{number + 1}/{runs}: exit codes {dict(codes)}, {seconds:.1f} s a run", end="", flush=True)
    print()
    return codes


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
