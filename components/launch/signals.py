"""The signals that ask a run to stop, and what ranks agree on without waiting for each other or the device."""

import os
import signal
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Agreement:
    """A number that all ranks know one step late: each step starts a host-side reduction and reads the last one's."""

    def __init__(self, operation: dist.ReduceOp.RedOpType) -> None:
        self._operation = operation
        self._pending: tuple[Tensor, dist.Work | None] | None = None

    def __call__(self, value: int) -> int:
        """The reduction of the values of the step before; 0 at the first. Called by every rank each step."""
        before, number = self._pending, torch.tensor([value], dtype=torch.int32)
        self._pending = number, dist.all_reduce(number, self._operation, async_op=True)
        if before is None:
            return 0
        if before[1] is not None:
            before[1].wait()
        return int(before[0].item())


class StopSignal:
    """A stop that a signal asks of one rank, and on which all agree at the same step. A second signal ends at once."""

    def __init__(self) -> None:
        self._received = 0
        self._agreement = Agreement(dist.ReduceOp.MAX)
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            os._exit(128 + number)
        self._received = number

    def agreed(self) -> int:
        """The number of the signal that some rank had received a step ago, else 0. Called by every rank each step."""
        return self._agreement(self._received)
