"""Processor time of a training step here and at another revision, in turns, one thread, one process.

python -m tests.benchmarks.step REVISION [--turns 5] [-- --table.key value ...]

A step's time is what a run of many steps takes longer than a run of few, over the steps between: nothing of either
revision is called, so they may differ in anything but the command line.
"""

import argparse
import io
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from components.config import ROOT

FEW, MANY = 5, 35
WORDS = ("--job.config_file", "recipes/llama_debug.toml", "--validation.no_enable", "--checkpoint.no_enable")


def processor_seconds(tree: Path, words: list[str], steps: int) -> float:
    """Of one run, start included."""
    with tempfile.TemporaryDirectory() as folder:
        length = ("--training.steps", str(steps), "--lr_scheduler.warmup_steps", "1", "--job.dump_folder", folder)
        before = os.times()
        subprocess.run(
            [sys.executable, "train.py", *WORDS, *length, *words],
            cwd=tree,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("words", nargs="*", help="settings of both, behind --")
    options = parser.parse_args()
    archive = subprocess.run(["git", "archive", options.revision], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as other:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(other, filter="data")
        ratios = []
        for turn in range(options.turns):
            here, there = (
                (processor_seconds(tree, options.words, MANY) - processor_seconds(tree, options.words, FEW))
                / (MANY - FEW)
                for tree in (ROOT, Path(other))
            )
            ratios.append(here / there)
            print(f"{turn + 1}/{options.turns}  here {here:.4f} s  {options.revision} {there:.4f} s  {ratios[-1]:.3f}")
    print(f"a step here takes {statistics.median(ratios):.3f} of its processor time at {options.revision}")


if __name__ == "__main__":
    main()
