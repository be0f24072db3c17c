"""Process groups and the device of a rank, and what all ranks agree on."""

import contextlib
import functools
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from components.config.environment import set_default
from parallelize.mesh import Mesh

SHARED_GPU = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_BUFFSIZE": "1048576",
}
"""NCCL's environment for ranks that share a GPU. Each rank also gets its own NCCL_HOSTID.

NCCL refuses two ranks on one GPU of one host. With its own id each rank counts as a host, and ranks exchange all data
by sockets. This is slow, but kernels, streams and the order of messages are the same. Buffers are small, because those
of all ranks are in one GPU's memory.
"""


def init_distributed(timeout_seconds: int, share_gpus: bool = False) -> torch.device:
    """Join the ranks that torchrun started, or make a group of one; returns this rank's device.

    CPU tensors always go through gloo, so that hosts can agree on something without waiting for their GPUs. With
    share_gpus the ranks of a node take its GPUs in turn, if there are fewer GPUs than ranks.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        local_rank, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if share_gpus and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > gpus:
            os.environ |= SHARED_GPU | {"NCCL_HOSTID": f"rank-{os.environ['RANK']}"}
            local_rank %= gpus
        elif gpus == 1:
            local_rank = 0  # srun and others may show each rank its own GPU alone
        device = torch.device("cuda", local_rank)
    backend = cpu_backend()
    if not os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE"):  # the variable's older name
        set_default("TORCH_FR_BUFFER_SIZE", "500")  # of the flight recorder; torch's default for gloo is 0
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = f"cpu:{backend},cuda:nccl"
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds), **alone)
    return device


def cpu_backend() -> str:
    """Registers a gloo backend with one worker thread per group, and returns its name; torch's own "gloo" has two.

    In torch 2.13 both threads write the name of the collective that they have finished into one string, without a lock
    (ProcessGroupGloo::runLoop). If both write at once, and the name is too long to be stored in place (FSDP's
    reduce-scatter, DTensor's all-gather), the string's memory is freed twice (`python -m tests.heap --workers 2`).
    """
    dist.Backend.register_backend("gloo_one_worker", _make_gloo, extended_api=True, devices=["cpu"])
    return "gloo_one_worker"


def _make_gloo(asked: Any, _: object) -> dist.ProcessGroupGloo:
    """Make gloo as torch does, with one thread; torch takes no option for the number of threads."""
    gloo: Any = dist.ProcessGroupGloo  # torch's stub lacks what is used of its options
    options = gloo._Options()
    options._threads, options._timeout = 1, asked.timeout
    options._devices = _gloo_devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    options.global_ranks_in_group, options.group_name = asked.global_ranks_in_group, asked.group_id
    return gloo(asked.store, asked.group_rank, asked.group_size, options)


@functools.cache
def _gloo_devices(interfaces: str) -> list[Any]:
    """gloo's devices. All groups share them, because each device has a thread that wakes up a hundred times a second.

    If another thread holds a connection's lock, the device's thread polls until the lock is released. As SCHED_BATCH it
    does not preempt the lock's holder when a message comes.
    """
    gloo: Any = dist.ProcessGroupGloo
    before = _threads()
    devices = [gloo.create_device(interface=name) for name in interfaces.split(",") if name] or [
        gloo.create_default_device()
    ]
    with contextlib.suppress(OSError):  # not permitted
        for thread in _threads() - before:
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    return devices


def _threads() -> set[int]:
    """Ids of this process's threads; none without /proc."""
    return {int(task.name) for task in Path("/proc/self/task").glob("*")}


def patient_group() -> dist.ProcessGroup:
    """A group whose collectives may wait an hour while ranks read, write or hash files. All ranks call this."""
    return dist.new_group(backend=cpu_backend(), timeout=timedelta(hours=1))


def set_timeout(timeout_seconds: int, mesh: Mesh) -> None:
    """Change how long training's collectives may wait: short once the first step is done."""
    for group in {dist.group.WORLD, *mesh.groups().values()}:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_seconds), group)


def gather(value: object) -> list:
    """Every rank's value, on every rank, in rank order. Waits for all of them."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def print_on_rank_0(line: str) -> None:
    """Print a line at once, on rank 0 alone."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def arrived(tensor: Tensor) -> Tensor:
    """A functional collective's result, after a wait, because not all kernels take an AsyncCollectiveTensor."""
    from torch.distributed import _functional_collectives as collectives

    return tensor.wait() if isinstance(tensor, collectives.AsyncCollectiveTensor) else tensor
