"""Layouts of two ranks of one thread on this machine: their steps' wall time in turns, and what they are planned on."""

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import train
from components.config import load_config
from components.launch.memory import keep_freed_memory
from parallelize.mesh import resolve_degrees
from parallelize.plan.calibrate import measured
from parallelize.rules import check_layout
from parallelize.rules.chosen import resolved
from tests.small import RECIPE

_DDP, _FSDP = "parallelism.data_parallel_replicate_degree=2 ", "parallelism.data_parallel_shard_degree=2 "
_TP, _PP = "parallelism.tensor_parallel_degree=2 ", "parallelism.pipeline_parallel_degree=2 "
_CP, _LOCAL = "parallelism.context_parallel_degree=2 ", "training.local_batch_size="
_MICRO, _AC = " parallelism.pipeline_parallel_microbatch_size=", " activation_checkpoint.mode="
_BY = " parallelism.pipeline_parallel_schedule="
_RESHARD, _OP = " parallelism.fsdp_reshard_after_forward=", "selective activation_checkpoint.selective_ac_option=op"
LAYOUTS = {
    "ddp 2": _DDP + _LOCAL + "4",
    "ddp 2, 4 accumulation steps": _DDP + _LOCAL + "1",
    "ddp 2, checkpointing op": _DDP + _LOCAL + "4" + _AC + _OP,
    "ddp 2, checkpointing full": _DDP + _LOCAL + "4" + _AC + "full",
    "ddp 2, bfloat16": _DDP + _LOCAL + "4 training.mixed_precision_param=bfloat16",
    "fsdp 2": _FSDP + _LOCAL + "4",
    "fsdp 2, 4 accumulation steps": _FSDP + _LOCAL + "1",
    "fsdp 2, never resharded, 4 accumulation steps": _FSDP + _LOCAL + "1" + _RESHARD + "never",
    "fsdp 2, checkpointing full": _FSDP + _LOCAL + "4" + _AC + "full",
    "tp 2": _TP + _LOCAL + "8",
    "tp 2, checkpointing full": _TP + _LOCAL + "8" + _AC + "full",
    "tp 2, 4 accumulation steps": _TP + _LOCAL + "2",
    "pp 2, 1F1B, 8 micro-batches": _PP + _LOCAL + "8" + _MICRO + "1",
    "pp 2, 1F1B, 2 micro-batches": _PP + _LOCAL + "8" + _MICRO + "4",
    "pp 2, ZBVZeroBubble, 8 micro-batches": _PP + _LOCAL + "8" + _MICRO + "1" + _BY + "ZBVZeroBubble",
    "pp 2, Interleaved1F1B, 4 micro-batches": _PP + _LOCAL + "8" + _MICRO + "2" + _BY + "Interleaved1F1B",
    "cp 2, ring": _CP + _LOCAL + "8 parallelism.context_parallel_method=ring",
    "cp 2, allgather_kv": _CP + _LOCAL + "8 parallelism.context_parallel_method=allgather_kv",
    "cp 2, ulysses": _CP + _LOCAL + "8 parallelism.context_parallel_method=ulysses",
}
"""Name -> settings. All are one run: the same model, and 8 sequences of 512 tokens a step."""
_COMMON = (
    "training.seq_len=512 training.global_batch_size=8 training.steps=1000 parallelism.data_parallel_shard_degree=1"
)
_runs: dict[str, Any] = {}


def job_of(name: str) -> Any:
    """The job of a layout."""
    pairs = [each.split("=") for each in [*_COMMON.split(), "parallelism.data_parallel_replicate_degree=1"]]
    settings = dict(pairs) | dict(each.split("=") for each in LAYOUTS[name].split())
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    return resolved(load_config(["--job.config_file", str(RECIPE), *words]))


def time_steps(name: str, device: torch.device) -> Any:
    """Wall and processor seconds of a layout's step, each the best of two, of the longest rank; or the device's table.

    For ranks of tests/ranks.py.
    """
    if not name:
        keep_freed_memory()
        return measured(device, dist.get_world_size())
    if name not in _runs:
        config = job_of(name)
        check_layout(config, resolve_degrees(config, dist.get_world_size()))
        run = train.build(config, device)
        _runs[name] = run, train.local_batches(run), train.divisor(run)
        train.train_step(*_runs[name])
    found = []
    for _ in range(2):
        dist.barrier()
        start = _clocks()
        train.train_step(*_runs[name])
        longest = torch.tensor(_clocks() - start)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        found.append(longest)
    return torch.stack(found).amin(0).tolist()


def _clocks() -> Any:
    return np.array((time.perf_counter(), time.process_time()))
