"""Seconds from ./run_train.sh to the line of the first step, and where they go: python -m tests.benchmarks.launch"""

import os
import subprocess
import tempfile
import time

from components.config import ROOT

MARKS = {"a rank keeps": "ranks start, import torch, meet; data, model, weights", "step   1/": "the first step"}


def main() -> None:
    for attempt in ("cold", "warm", "warm"):
        with tempfile.TemporaryDirectory() as folder:
            started = last = time.perf_counter()
            command = [str(ROOT / "run_train.sh"), "--job.dump_folder", folder]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
            )
            assert process.stdout
            print(attempt)
            waiting = dict(MARKS)
            for line in process.stdout:
                now = time.perf_counter()
                for mark in [mark for mark in waiting if mark in line]:
                    print(f"  {now - last:5.2f} s  {waiting.pop(mark)}")
                    last = now
                if not waiting:
                    break
            print(f"  {last - started:5.2f} s  in all")
            process.terminate()
            process.communicate()


if __name__ == "__main__":
    main()
