"""Layouts on NCCL, whose ranks may share a GPU: each is compared with one process on the same GPU, and on the CPU."""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from components.commands.figures import BARS, Observation, figures
from parallelize.schedules import SCHEDULES
from tests import ranks
from tests.benchmarks.gpu.rows import DOCUMENTS, OFFLOAD, SIZES, STATES
from tests.benchmarks.peers.ours import DEGREES
from tests.harness import observe
from tests.layouts import LABELS, STEPS, layout
from tests.limits import TimeLimit

Row = dict[str, Any]
MOST_SECONDS = 60
"""For a layout: of processor time, which a rank that waits for a GPU takes too."""
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
ON_GPU = {name: 10 * bar for name, bar in BARS.items()}
"""Bars in float32: ten times those of the CPU, since a GPU adds in another order each time."""
IN_BFLOAT16 = {name: 5e-2 if bar else 0.0 for name, bar in BARS.items()} | {"loss": 2e-3}


@dataclass(frozen=True)
class Layout:
    """A layout on NCCL, and the run of one process that it has to be."""

    name: str
    ranks: int
    run: tuple[str, ...]
    words: tuple[str, ...]
    bars: dict[str, float]
    labels: tuple[int, ...] = LABELS

    @property
    def options(self) -> dict[str, Any]:
        return {"steps": STEPS, "valid_labels": self.labels}


def _narrow(*words: str, **settings: str) -> Layout:
    """A layout of the matrix, with more settings of that layout alone: (key, value, key, ...)."""
    found = layout(**settings)
    more = [f"{key.rpartition('.')[2]} {value}" for key, value in zip(words[::2], words[1::2])]
    name = " · ".join([str(found), *more])
    return Layout(f"NCCL: {name}", found.ranks, found.run(), (*found.overrides(), *words), ON_GPU)


def _wide(name: str, *run: str, precision: str = "bfloat16", method: str = "", **degrees: int) -> Layout:
    """A layout of a model with heads of 64, which the kernels of attention are made for."""
    degrees = {"ddp": 1, "fsdp": 1} | degrees
    batch = 4 // (degrees["fsdp"] * degrees["ddp"])
    run = (*SIZES, "--training.mixed_precision_param", precision, *run)
    words = [*run, "--training.local_batch_size", str(batch)]
    for axis, degree in degrees.items():
        words += [f"--parallelism.{DEGREES[axis]}", str(degree)]
    words += ["--parallelism.context_parallel_method", method] * bool(method)
    words += ["--parallelism.pipeline_parallel_microbatch_size", "1"] * ("pp" in degrees)
    count = functools.reduce(lambda product, degree: product * degree, degrees.values())
    bars = IN_BFLOAT16 if precision == "bfloat16" else ON_GPU
    return Layout(f"NCCL: {name}", count, run, tuple(words), bars, labels=())


_METHODS = ("ring allgather", "ring alltoall", "allgather_kv", "ulysses")
_EXPERTS = {"model": "qwen3_moe"}


def _layouts() -> Iterator[Layout]:
    """In the order of what they tell."""
    yield from (_narrow(dp=dp) for dp in ("ddp 2", "fsdp 2", "hsdp 2x2"))
    yield from (_narrow(tp="2", **more) for more in ({}, {"sequence_parallel": "false"}, {"loss_parallel": "false"}))
    yield from (_narrow(cp="2", method=method) for method in _METHODS)
    yield from (_narrow(pp="2", schedule=schedule) for schedule in SCHEDULES)
    yield from (_narrow(**axis, ep="2", **_EXPERTS) for axis in ({"dp": "fsdp 2"}, {"tp": "2"}, {"cp": "2"}))
    yield _wide("flash attention, fsdp 2 · tp 2", fsdp=2, tp=2)
    yield _wide("flash attention, pp 2", pp=2)
    for method in ("ring", "allgather_kv", "ulysses"):
        yield _wide(f"flash attention, {method} 2", cp=2, method=method)
        yield _wide(f"documents, {method} 2", *DOCUMENTS, precision="float32", cp=2, method=method)
    yield _narrow(cp="2", balancer="none")
    yield _narrow(tp="4", vocabulary="1027", length="33")
    yield _narrow(tp="4", key_heads="1")
    for more in ({"reshard": "always"}, {"reshard": "never"}, {"accumulation": "3"}, {"optimizer": "Muon"}):
        yield _narrow(dp="fsdp 2", **more)
    yield _narrow(dp="fsdp 2", accumulation="3", reduce="each")
    yield from (_narrow(*words, dp="fsdp 2") for words in (OFFLOAD, STATES))
    yield from (_narrow(dp="fsdp 2", checkpointing=mode) for mode in ("full", "2", "op/budget"))
    yield from (_narrow(**axis, compile="true") for axis in ({"dp": "fsdp 2"}, {"tp": "2"}))
    yield _narrow(dp="fsdp 2", dynamics="true")
    yield from (_narrow(dp="fsdp 2", lora=adapters) for adapters in ("all-linear", "bfloat16", "nf4"))
    yield _narrow(tp="2", lora="all-linear", dropout="0.25")
    yield _narrow(dp="fsdp 4", ep="2", router="sigmoid", balance="bias", **_EXPERTS)
    yield _narrow(dp="fsdp 2", balance="losses", **_EXPERTS)
    yield _narrow(dp="fsdp 2", model="qwen3", tied="true")
    # Products of two axes, then of three.
    axes = ({"dp": "fsdp 2"}, {"tp": "2"}, {"cp": "2", "method": "ulysses"}, {"pp": "2"})
    yield from (_narrow(**one, **other) for one, other in itertools.combinations(axes, 2))
    yield from (_narrow(dp="ddp 2", **axis) for axis in ({"tp": "2"}, {"pp": "2"}))
    yield _narrow(cp="2", method="ring alltoall", tp="2")
    yield from (_narrow(dp="fsdp 2", cp="2", method=method) for method in ("ring allgather", "allgather_kv"))
    yield _narrow(pp="2", schedule="ZBVZeroBubble", dp="fsdp 2")
    yield _narrow(pp="2", schedule="Interleaved1F1B", tp="2")
    yield _narrow(pp="2", splits="2", dp="fsdp 2")
    yield _narrow(pp="2", dp="fsdp 2", ep="2", **_EXPERTS)
    yield _narrow(dp="fsdp 2", tp="2", ep="4", **_EXPERTS)
    yield from (_narrow(tp="2", dp="fsdp 2", checkpointing=mode) for mode in ("full", "op/budget"))
    yield _narrow(tp="2", dp="fsdp 2", optimizer="Muon")
    yield _narrow(tp="2", dp="fsdp 2", compile="true", checkpointing="full")
    yield _narrow(tp="2", dp="fsdp 2", lora="nf4")
    yield _narrow(tp="2", pp="2", lora="all-linear")
    yield from (_narrow(dp="fsdp 2", tp="2", model=family) for family in ("gemma3", "gpt_oss", "deepseek_v3"))
    yield _narrow(dp="fsdp 4")
    yield from (_narrow(cp="4", method=method) for method in ("ring allgather", "ulysses"))
    yield from (_narrow(pp="4", schedule=schedule) for schedule in ("1F1B", "ZBVZeroBubble"))
    yield _narrow(dp="fsdp 2", tp="2", pp="2")
    yield _narrow(dp="fsdp 2", tp="2", cp="2", method="ring allgather")
    yield _narrow(dp="fsdp 2", cp="2", pp="2", method="ulysses")
    yield _narrow(dp="hsdp 2x2", tp="2")
    yield _narrow(tp="2", cp="2", pp="2", method="allgather_kv")


LAYOUTS = {each.name: each for each in _layouts()}


@functools.cache
def _one_process(run: tuple[str, ...], labels: tuple[int, ...], on_cpu: bool) -> Observation:
    return observe(*run, steps=STEPS, valid_labels=labels, environment=ON_CPU if on_cpu else {})


def check(each: Layout) -> Row:
    """Errors of loss and gradient against one process on the same device, and of the gradient against the CPU.

    Or why there are none. In bfloat16 the CPU says nothing about a GPU's kernels. With experts the routing of one
    process is replayed, if a token went elsewhere.
    """
    ranks.COMPUTING = MOST_SECONDS
    row: Row = {"ranks": each.ranks}
    try:
        reference = _one_process(each.run, each.labels, on_cpu=False)
        observed = observe(*each.words, ranks=each.ranks, **each.options)
        found = figures(observed, reference)
        if reference.routing.known and any(not found[name] <= bar for name, bar in each.bars.items()):
            observed = observe(*each.words, ranks=each.ranks, **each.options, routing=reference.routing)
            found = figures(observed, reference)
            row["flips"] = observed.routing.flips
        if each.bars is ON_GPU:
            row["from the CPU"] = figures(observed, _one_process(each.run, each.labels, on_cpu=True))["gradient"]
    except (RuntimeError, TimeLimit) as error:
        return row | {"verdict": "error", "why": _why(str(error))}
    broken = [f"{name} {found[name]:.1e}" for name, bar in each.bars.items() if not found[name] <= bar]
    row |= {"verdict": "broken" if broken else "holds", "loss": found["loss"], "gradient": found["gradient"]}
    return row | {"seconds": round(observed.seconds, 1)} | ({"why": ", ".join(broken)} if broken else {})


def _why(error: str) -> str:
    """What the first rank said."""
    said = [line for line in error.splitlines() if line.startswith("rank ") and not line.endswith(": ")]
    return (said or error.splitlines())[0][:300]


def collectives(_: Any, device: torch.device) -> dict[str, float]:
    """Work of a rank: milliseconds of each collective; raises RuntimeError for one that gives what it should not.

    Parts are uneven and empty, of 8 and of 2^20 numbers; there are groups of two ranks beside that of all.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, count - 1, 2)]
    everything, spent = range(count), {}

    def filled(size: int, value: float) -> torch.Tensor:
        return torch.full((size,), value, dtype=dtype, device=device)

    def all_reduce() -> bool:
        found = filled(size, rank)
        dist.all_reduce(found)
        return bool((found == sum(everything)).all())

    def all_gather() -> bool:
        found = [filled(size, -1) for _ in everything]
        dist.all_gather(found, filled(size, rank))
        return all(bool((part == peer).all()) for peer, part in enumerate(found))

    def reduce_scatter() -> bool:
        found = filled(size, -1)
        dist.reduce_scatter(found, [filled(size, rank) for _ in everything])
        return bool((found == sum(everything)).all())

    def all_to_all() -> bool:
        """Rank r has r parts for the first rank, and so rank 0 none for itself."""
        sends = [size * rank, *[size] * (count - 1)]
        takes = [size * peer if rank == 0 else size for peer in everything]
        found = filled(sum(takes), -1)
        dist.all_to_all_single(found, filled(sum(sends), rank), takes, sends)
        peers = torch.arange(count).repeat_interleave(torch.tensor(takes))
        return found.cpu().equal(peers.to(dtype))

    def broadcast() -> bool:
        found = filled(size, rank)
        dist.broadcast(found, 0)
        return bool((found == 0).all())

    def around() -> bool:
        found, own = filled(size, -1), filled(size, rank)
        both = [dist.P2POp(dist.isend, own, (rank + 1) % count), dist.P2POp(dist.irecv, found, (rank - 1) % count)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        return bool((found == (rank - 1) % count).all())

    def send_and_receive() -> bool:
        found = filled(size, rank)
        if rank < 2:
            (dist.recv if rank else dist.send)(found, 1 - rank)
        return rank != 1 or bool((found == 0).all())

    def of_two() -> bool:
        found = filled(size, 1)
        if rank // 2 < len(pairs):
            dist.all_reduce(found, group=pairs[rank // 2])
        return bool((found == (2 if rank // 2 < len(pairs) else 1)).all())

    for each in (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, around, send_and_receive, of_two):
        for size, dtype in itertools.product((8, 2**20), (torch.float32, torch.bfloat16)):
            started = time.perf_counter()
            if not each():
                raise RuntimeError(f"{each.__name__} of {size} {dtype} is wrong on rank {rank}")
            spent[f"{each.__name__}, {size}"] = round(1e3 * (time.perf_counter() - started), 1)
    return spent


def smoke(count: int) -> dict[str, float] | Exception:
    """Milliseconds of each collective among `count` ranks; the error of a rank that failed."""
    ranks.COMPUTING = 90
    world = ranks.Ranks(count, collectives, {})
    try:
        return world.run(None)
    finally:
        world.end()


def checks() -> Iterator[tuple[str, Callable[[], Row]]]:
    yield from ((name, functools.partial(check, each)) for name, each in LAYOUTS.items())


AXES = {
    "data parallel": ("ddp", "fsdp", "hsdp"),
    "tensor parallel": ("tp",),
    "context parallel": ("cp", "ring", "allgather_kv", "ulysses"),
    "pipelines": ("pp",),
    "experts": ("moe",),
    "adapters": ("lora",),
    "compile": ("compile",),
    "checkpointing": ("checkpointing",),
    "offload": ("enable_cpu_offload", "state_offload"),
}
"""Words of a layout's name, by the axis that they stand for."""


def table(rows: dict[str, Row]) -> list[str]:
    """Markdown: how many layouts of each axis hold, and the worst gradients."""
    lines = [
        "| layouts on NCCL | hold | float32: gradient from one process on the GPU | on the CPU | bfloat16 |",
        "|---|---|---|---|---|",
    ]
    found = {name: rows[name] for name in LAYOUTS if name in rows}
    for axis, words in {"all": ("NCCL",), **AXES}.items():
        own = {name: row for name, row in found.items() if any(word in name for word in words)}
        held = {name: row for name, row in own.items() if row["verdict"] == "holds"}
        worst = [
            max(
                (row[figure] for name, row in held.items() if figure in row and (LAYOUTS[name].bars is bars)), default=0
            )
            for figure, bars in (("gradient", ON_GPU), ("from the CPU", ON_GPU), ("gradient", IN_BFLOAT16))
        ]
        shown = " | ".join(f"{value:.1e}" if value else "" for value in worst)
        lines.append(f"| {axis} | {len(held)} of {len(own)} | {shown} |")
    return lines if found else []


def version() -> str:
    """NCCL's; empty without it."""
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""
