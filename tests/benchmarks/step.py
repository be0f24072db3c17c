"""Processor time of a training step here and at another revision, in turns, one thread, one process.

python -m tests.benchmarks.step REVISION [--turns 5] [-- --table.key value ...]
python -m tests.benchmarks.step REVISION --calls           calls of functions in a small step, in two minutes

A step's time is what a run of many steps takes longer than a run of few, over the steps between: nothing of either
revision is called, so they may differ in anything but the command line. Processor time varies with the machine's load;
the number of calls does not, and a step of more tokens makes as many.
"""

import argparse
import io
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from components.config import ROOT

FEW, MANY = 5, 35
SMALL = ("--training.seq_len", "64", "--training.local_batch_size", "1", "--training.global_batch_size", "1")
_COUNT = """
import os, sys
count, leave = 0, os._exit
def add(frame, event, argument):
    global count
    count += event in ("call", "c_call")
def write_and_leave(code):
    sys.setprofile(None)
    with open(os.path.join(os.path.dirname(__file__), "calls"), "w") as file:
        file.write(str(count))
    leave(code)
os._exit = write_and_leave  # so a run ends
sys.setprofile(add)
"""
WORDS = ("--job.config_file", "recipes/llama_debug.toml", "--validation.no_enable", "--checkpoint.no_enable")


def run(tree: Path, words: Sequence[str], steps: int, modules: str = "") -> None:
    """Train a revision. modules: a folder that Python searches first."""
    with tempfile.TemporaryDirectory() as folder:
        length = ("--training.steps", str(steps), "--lr_scheduler.warmup_steps", "1", "--job.dump_folder", folder)
        subprocess.run(
            [sys.executable, "train.py", *WORDS, *length, *words],
            cwd=tree,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([modules, str(tree)])},
            stdout=subprocess.DEVNULL,
            check=True,
        )


def processor_seconds(tree: Path, words: Sequence[str], steps: int) -> float:
    """Processor time of one run, start included."""
    before = os.times()
    run(tree, words, steps)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def calls(tree: Path, words: Sequence[str], steps: int) -> float:
    """Calls of functions, of Python's and of torch's, in one run of small steps, start included."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(_COUNT)  # Python imports this module at its start
        run(tree, [*SMALL, *words], steps, folder)
        return float((Path(folder) / "calls").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--calls", action="store_true", help="count calls, in one turn")
    parser.add_argument("words", nargs="*", help="settings of both, behind --")
    options = parser.parse_args()
    measure, turns, unit = (calls, 1, "calls") if options.calls else (processor_seconds, options.turns, "s")
    archive = subprocess.run(["git", "archive", options.revision], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as other:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(other, filter="data")
        trees, ratios = (ROOT, Path(other)), []
        for tree in trees:  # the first run of a tree tokenizes
            run(tree, [*SMALL, *options.words], 1)
        for turn in range(turns):
            here, there = (
                (measure(tree, options.words, MANY) - measure(tree, options.words, FEW)) / (MANY - FEW)
                for tree in trees
            )
            ratios.append(here / there)
            print(f"{turn + 1}/{turns}  here {here:.6g} {unit}  {options.revision} {there:.6g}  {ratios[-1]:.4f}")
    print(f"a step here takes {statistics.median(ratios):.4f} of what it takes at {options.revision}")


if __name__ == "__main__":
    main()
