"""Measures this machine's products, memory and collectives, and writes them as a device of plans."""

import argparse
import os
import socket
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from models.attention import KERNELS
from models.visible import Visible
from parallelize.groups import init_distributed
from parallelize.plan.devices import find_device
from parallelize.precision import set_product_precision

SIZES = ((1024, 256, 256), (512, 512, 512), (1024, 256, 1024), (1024, 1024, 1024), (8192, 4096, 4096))
"""Products (m, k) x (k, n), smallest first; a size that would take long is left out."""
MESSAGES = (2**14, 2**21)
CHAIN = 16
"""Products of one measurement of a kernel's fixed cost."""


def main(argv: list[str]) -> int:
    """Measure, and write a file for --device; returns an exit code."""
    parser = argparse.ArgumentParser(prog="python -m parallelize.plan calibrate", description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2, help="processes that take part")
    parser.add_argument("--out", type=Path, default=Path("device.toml"), help="the file (device.toml)")
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="for each measurement, whose fastest call counts (0.3)"
    )
    options = parser.parse_args(argv)
    most = torch.cuda.device_count() or 64
    if not 1 <= options.ranks <= most:
        parser.error(
            f"--ranks {options.ranks}: use 1 to {most}, of which each is one process" + " and GPU" * (most < 64)
        )
    if options.out.suffix != ".toml" or not options.out.resolve().parent.is_dir():
        parser.error(f"--out {options.out}: name a .toml file in a folder that exists")
    if not 0 < options.seconds <= 10:
        parser.error(f"--seconds {options.seconds}: use more than 0, and at most 10")
    try:
        _part(options.out).touch()
    except OSError as error:
        parser.error(f"--out {options.out}: {error.strerror}")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        given = options.ranks, found.getsockname()[1], options.out, options.seconds
    torch.multiprocessing.start_processes(_rank, given, options.ranks, start_method="forkserver")
    print(f"written: {options.out}; use --device {options.out}")
    return 0


def _part(out: Path) -> Path:
    """The file that is written first: a run that is killed leaves the old one."""
    return out.with_name(f"{out.name}.part")


def _rank(rank: int, ranks: int, port: int, out: Path, seconds: float) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": str(ranks)}
    warnings.simplefilter("ignore", FutureWarning)  # torch renames collectives
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    device = init_distributed(60)
    set_product_precision("high", device)
    found = measured(device, ranks, seconds)
    if rank == 0:
        _part(out).write_text(found, "utf-8")
        _part(out).replace(out)
    dist.destroy_process_group()


class _Clock:
    """Times work on all ranks."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        # Other processes lengthen only wall time.
        self.computing = time.process_time if alone else time.perf_counter

    def best(self, name: str, work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
        """Seconds of the fastest call, on the slowest rank. All ranks call it as often."""
        times = [self._once(work, clock) for _ in range(2)]
        again = torch.tensor([min(40, int(self.seconds / times[1]))], device=self.device)
        dist.all_reduce(again, op=dist.ReduceOp.MIN)
        times += [self._once(work, clock) for _ in range(int(again))]
        slowest = torch.tensor([min(times[1:])], dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"{name}: {1e3 * slowest.item():.3f} ms", flush=True)
        return slowest.item()

    def compute(self, name: str, work: Callable[[], Any]) -> float:
        """As `best`, of work without messages."""
        return self.best(name, work, self.computing)

    def _once(self, work: Callable[[], Any], clock: Callable[[], float]) -> float:
        start = clock()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - start


def measured(device: torch.device, ranks: int, seconds: float = 0.3) -> str:
    """The table of a device, by ranks that all call this. seconds: of each measurement."""
    clock, cuda, rates, kernel = _Clock(device, seconds), device.type == "cuda", {}, 0.0
    for dtype in (torch.float32, torch.bfloat16):
        name, rate, make = str(dtype).removeprefix("torch."), 0.0, partial(torch.randn, device=device, dtype=dtype)
        chain = partial(_chain, make(8, 8, requires_grad=not cuda))
        kernel = max(kernel, clock.compute(f"{name} {CHAIN} times 8 x 8 x 8", chain) / CHAIN / (1 if cuda else 3))
        for m, k, n in SIZES:
            if rate == 0 or 2 * m * k * n / rate < seconds:
                product = partial(torch.mm, make(m, k), make(n, k).T, out=torch.empty(m, n, device=device, dtype=dtype))
                rate = max(rate, 2 * m * k * n / clock.compute(f"{name} {m} x {k} x {n}", product))
        rates[name] = rate / 1e12
    used = "bfloat16" if cuda else "float32"
    count, length, size = (32, 4096, 128) if cuda else (8, 512, 64)
    heads = torch.randn(1, count, length, size, device=device, dtype=getattr(torch, used), requires_grad=True)
    seen = Visible(length, length, device)
    attending = clock.compute("attention and its backward", partial(_attend, heads, seen))
    attention = 3.5 * 2 * count * length * length * size / attending / 1e12 / rates[used]
    large = torch.randn(2**28 if cuda else 2**24, device=device)
    bandwidth = 8 * large.numel() / clock.compute("copy", partial(torch.empty_like(large).copy_, large)) / 1e9
    alone = find_device("h100-80g" if cuda else "cpu").node
    speed, latency = _link(clock, ranks) if ranks > 1 else (alone.gb_s, alone.latency_us)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    memory = torch.cuda.get_device_properties(device).total_memory if cuda else host
    return f"""[calibrated]
memory_gib = {memory / 2**30:.1f}
reserved_gib = {3.0 if cuda else 0.5}
tflops = {{ {", ".join(f"{name} = {rate:.4g}" for name, rate in rates.items())} }}
achieved = {{ bfloat16 = 1.0, float32 = 1.0 }}
attention = {min(1, attention):.3g}
memory_gb_s = {bandwidth:.4g}
memory_share = 1.0
kernel_us = {kernel * 1e6:.3g}
dtensor_us = {0 if cuda else 1e6 * _pair(clock, ranks):.4g}
host_gb_s = {50 if cuda else bandwidth:.4g}
overlap = {0.88 if cuda else 0}
ranks_per_node = {ranks}
node = {{ gb_s = {speed:.4g}, latency_us = {latency:.4g} }}{"" if ranks > 1 else "  # not measured: one rank"}
network = {{ gb_s = {speed:.4g}, latency_us = {latency:.4g} }}  # not measured: those of the node
kernels = "{device.type}"
"""


def _chain(tiny: Tensor) -> None:
    """On a CPU forward and backward, three kernels for one. The host of a GPU is ahead, so that kernels alone count."""
    product = tiny
    for _ in range(CHAIN):
        product = product @ tiny
    if tiny.requires_grad:
        product.sum().backward()


def _attend(heads: Tensor, seen: Visible) -> None:
    """As a run computes it."""
    KERNELS["auto"].attend(heads, heads, heads, seen).backward(heads.detach())


def _pair(clock: _Clock, ranks: int) -> float:
    """Processor seconds of a norm and two tiny matrices of tensor parallel, forward and backward, on the host."""
    width = 8 * ranks
    parts = {"norm": nn.RMSNorm(width), "up": nn.Linear(width, width), "down": nn.Linear(width, width)}
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    mesh = init_device_mesh(clock.device.type, (ranks,))
    pair = parallelize_module(nn.Sequential(OrderedDict(parts)).to(clock.device), mesh, plan)
    hidden = torch.zeros(1, 1, width, device=clock.device, requires_grad=True)

    def both() -> None:
        pair(hidden).sum().backward()

    return clock.best("two tiny matrices of tensor parallel", both, time.process_time)


def _link(clock: _Clock, ranks: int) -> tuple[float, float]:
    """GB/s and microseconds of a hop, as Device.gather has them: the mean of an all-gather and a reduce-scatter."""
    seconds = []
    for size in MESSAGES:
        own = torch.zeros(size // ranks, device=clock.device)
        whole = torch.zeros(len(own) * ranks, device=clock.device)
        gather = clock.best(f"all-gather of {4 * size:,} bytes", partial(dist.all_gather_into_tensor, whole, own))
        scatter = partial(dist.reduce_scatter_tensor, own, whole)
        seconds.append((gather + clock.best(f"reduce-scatter of {4 * size:,} bytes", scatter)) / 2)
    small, large = (4 * size * (ranks - 1) / ranks for size in MESSAGES)
    speed = (large - small) / max(1e-9, seconds[1] - seconds[0])
    return speed / 1e9, max(0.1, 1e6 * (seconds[0] - small / speed) / (ranks - 1))
