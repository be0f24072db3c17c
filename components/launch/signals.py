"""The signals that ask a run to stop, and how ranks agree at which step they do."""

import os
import signal
from types import FrameType

import torch
import torch.distributed as dist

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


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
