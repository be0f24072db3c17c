"""Ranks that died of a corrupted heap, on and off: gloo with torch's two worker threads a group, and with our one.

    python -m tests.heap --minutes 5 --workers 2     torch's own "gloo": rounds die, most within a minute
    python -m tests.heap --minutes 30 --load 2       ours (parallelize/groups.py): none may

A round is one rank that gathers, alone in its group and with 1, 2 and 64 collectives under way, so that worker threads
often finish at the same time; and, with our gloo, one of the layouts that died, trained, saved, resumed and gathered.
The load is busy processes beside them. A rank that dies prints where its Python threads
were, with --gdb where all were.
"""

import argparse
import faulthandler
import itertools
import multiprocessing
import subprocess
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from parallelize.groups import cpu_backend
from tests.harness import observe
from tests.limits import TimeLimit

COLLECTIVES = 100_000
"""In one round."""
SHARD, TENSOR, CONTEXT = (
    (f"--parallelism.{name}_degree", "2") for name in ("data_parallel_shard", "tensor_parallel", "context_parallel")
)
SETTINGS = ("--checkpoint.enable", "--training.local_batch_size", "18")
LAYOUTS = ((2, SHARD), (4, TENSOR + CONTEXT), (4, SHARD + CONTEXT))
STACKS = ("gdb", "-q", "-batch", "-ex", "continue", "-ex", "thread apply all bt 12", "-p")


def gather_much(workers: int) -> None:
    """Gathers of a few bytes, by functional collectives as DTensor's: what they are called is what is freed twice."""
    faulthandler.enable()
    backend = cpu_backend() if workers == 1 else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=300))
    assert dist.group.WORLD is not None
    group, collectives, own = dist.group.WORLD.group_name, torch.ops._c10d_functional, torch.ones(8)
    for _, in_flight in zip(range(COLLECTIVES // 192), itertools.cycle((1, 2, 64)), strict=False):
        for _ in range(192 // in_flight):
            for gathered in [collectives.all_gather_into_tensor(own, 1, group) for _ in range(in_flight)]:
                assert collectives.wait_tensor(gathered)[0] == 1
    dist.destroy_process_group()


def spin() -> None:
    parent = multiprocessing.parent_process()
    while parent and parent.is_alive():
        sum(range(10**6))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.heap", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--load", type=int, default=0, help="busy processes beside the ranks")
    parser.add_argument("--workers", type=int, choices=[1, 2], default=1, help="threads of a group: ours, or torch's")
    parser.add_argument("--gdb", action="store_true", help="native stacks of a rank that dies")
    options = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness"])
    for _ in range(options.load):
        context.Process(target=spin, daemon=True).start()
    rounds, gathering_died, layouts, layouts_died, end = 0, 0, 0, 0, time.monotonic() + 60 * options.minutes
    while time.monotonic() < end:
        started = time.monotonic()
        rank = context.Process(target=gather_much, args=(options.workers,))
        rank.start()
        watcher = subprocess.Popen([*STACKS, str(rank.pid)]) if options.gdb else None
        rank.join()
        if watcher:
            watcher.wait()
        rounds, gathering_died = rounds + 1, gathering_died + (rank.exitcode != 0)
        print(f"round {rounds}: gathering ended with {rank.exitcode}", end="", flush=True)
        if options.workers == 1:
            ranks, degrees = LAYOUTS[rounds % len(LAYOUTS)]
            with tempfile.TemporaryDirectory() as folder:
                for _ in range(2):  # the second continues the first
                    layouts += 1
                    try:
                        observe(*SETTINGS, *degrees, ranks=ranks, folder=folder)
                    except (RuntimeError, TimeLimit) as error:
                        layouts_died += 1
                        print(f"; {' '.join(degrees)}: {error}", end="")
        print(f", {time.monotonic() - started:.0f} s", flush=True)
    print(f"{rounds} rounds of {COLLECTIVES:,} gathers, {gathering_died} died; {layouts} layouts, {layouts_died} died")


if __name__ == "__main__":
    main()
