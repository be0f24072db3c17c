"""Process groups, device, agreement among ranks, and a clean end."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from components.config import ConfigError
from components.exit_codes import ExitCode
from parallelize.mesh import Mesh

T = TypeVar("T")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def init_distributed(timeout_seconds: int) -> torch.device:
    """Join the ranks that torchrun started, or make a group of one; returns this rank's device.

    CPU tensors always go through gloo, so that hosts can agree on something without waiting for their GPUs.
    """
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    )
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    return device


def set_timeout(timeout_seconds: int, mesh: Mesh) -> None:
    """Change how long training's collectives may wait: short once the first step is done."""
    for group in {dist.group.WORLD, *mesh.groups().values()}:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_seconds), group)


def gather(value: object) -> list:
    """Every rank's value, on every rank, in rank order. Waits for all of them."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def own_slice(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """What this rank holds of a parameter, and where that begins in the full tensor."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.ndim
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), offset


def from_rank_0(make: Callable[[], T]) -> T:
    """What rank 0 makes, on every rank; and the ConfigError, if it raises one."""
    made: list = [None]
    if dist.get_rank() == 0:
        try:
            made = [make()]
        except ConfigError as error:
            made = [error]
    dist.broadcast_object_list(made)
    if isinstance(made[0], ConfigError):
        raise made[0]
    return made[0]


class StopSignal:
    """A stop that a signal asks of one rank, agreed on by all at the same step, without waiting for the device.

    Each step starts a host-side reduction of the flags and reads the one that the step before started: by then it
    is done. A second signal ends the process at once.
    """

    def __init__(self) -> None:
        self._received = torch.zeros(1, dtype=torch.int32)
        self._pending: tuple[torch.Tensor, dist.Work | None] | None = None
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._received.item():
            os._exit(128 + number)
        self._received.fill_(number)

    def agreed(self) -> int:
        """The number of the signal that some rank had received a step ago, else 0. Called by every rank each step."""
        before, flags = self._pending, self._received.clone()
        self._pending = flags, dist.all_reduce(flags, dist.ReduceOp.MAX, async_op=True)
        if before is None:
            return 0
        if before[1] is not None:
            before[1].wait()
        return int(before[0].item())


def leave(code: int) -> NoReturn:
    """End the process with this exit code, without the interpreter's own tear-down.

    A process group that outlives it aborts about one clean gloo run in eight (pytorch#190489, #179291).
    """
    # After an error the other ranks may not take part, and destroying would wait for them.
    if dist.is_initialized() and (code == ExitCode.DONE or code > 128):
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_to_exit(main: Callable[[list[str]], int], argv: list[str]) -> NoReturn:
    """Run main and leave with its exit code, or with the one of what went wrong, which is told in a few words."""
    try:
        code = main(argv)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else ExitCode.ERROR
    except ConfigError as error:
        print(error, file=sys.stderr)
        code = ExitCode.CONFIG
    except Exception as error:
        traceback.print_exc()
        code = ExitCode.ERROR
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            print(_OUT_OF_MEMORY, file=sys.stderr)
            code = ExitCode.OUT_OF_MEMORY
        elif isinstance(error, dist.DistError) or "gloo" in str(error):
            print("another rank is gone, or did not answer in time (see [comm])", file=sys.stderr)
            code = ExitCode.LOST_RANK
    leave(code)


_OUT_OF_MEMORY = """Out of memory. Three keys to try:
  training.local_batch_size                fewer sequences at a time; with training.global_batch_size set, the same run
  parallelism.data_parallel_shard_degree   more ranks to share weights, gradients and optimizer
  training.enable_cpu_offload              weights, gradients and optimizer on the host"""
