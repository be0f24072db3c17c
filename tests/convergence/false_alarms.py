"""Unchanged code must never be called changed: runs at other threads, loads of the machine and places of the ranks.

python -m tests.convergence.false_alarms [RUNS]      20 runs take about ten minutes on two cores
"""

import contextlib
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Iterator

from components.config import ROOT
from tests.convergence.__main__ import RECIPES, compare
from tests.convergence.report import as_markdown, as_text, write
from tests.convergence.sides import Curve, parse, run

STEPS, SETTINGS = 20, ("--training.seq_len", "64")
LAYOUTS = (
    *("one rank", "fsdp 2", "tp 2", "cp 2", "pp 2", "hsdp 2x2", "cp 2 tp 2", "ddp 2 resume 10"),
    *("pp 2 tp 2", "pp 2 tp 2 --parallelism.pipeline_first true", "pp 2 fsdp 2 --parallelism.pipeline_first true"),
)


@contextlib.contextmanager
def condition(threads: int, load: int, cores: set[int]) -> Iterator[None]:
    """Runs inside have so many threads a rank, these cores only, and so many busy processes beside them."""
    before, variable = os.sched_getaffinity(0), os.environ.get("OMP_NUM_THREADS")
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        os.environ.pop("OMP_NUM_THREADS")
        if variable is not None:
            os.environ["OMP_NUM_THREADS"] = variable
        for process in busy:
            process.kill()
            process.wait()


def main(runs: int) -> int:
    """Print each run with its conditions and how far it was; 1 if any is outside the band."""
    folder = ROOT / "outputs" / "convergence" / "false_alarms"
    comparison = compare(parse("one rank", RECIPES[0]), [], STEPS, SETTINGS, folder, fresh=True)
    draw, all_cores = random.Random(0), sorted(os.sched_getaffinity(0))
    for number in range(runs):
        text, threads, load = LAYOUTS[number % len(LAYOUTS)], draw.choice((1, 2, 3)), draw.choice((0, 1, 3))
        cores = {draw.choice(all_cores)} if draw.random() < 0.3 else set(all_cores)
        side = parse(text, RECIPES[0])
        with condition(threads, load, cores):
            curve: Curve = run(side, STEPS, SETTINGS, folder / "runs" / f"side_{number}")
        place = f"core {min(cores)}" if len(cores) == 1 else "all cores"
        curve.text = f"{number + 1}: {text}, {threads} threads, {load} busy, {place}"
        comparison.curves.append(curve)
        print(as_text([comparison.table()[1 + len(comparison.curves)]]), flush=True)
    write(comparison, folder, shlex.join(["python", "-m", "tests.convergence.false_alarms", str(runs)]))
    print(as_markdown(comparison.table()))
    print(*comparison.sentences(), f"{len(comparison.outside)} false alarms in {runs} runs", sep="\n")
    return 0 if comparison.same else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
