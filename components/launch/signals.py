"""Meanings of signals for the launcher and its ranks, and agreement of ranks on a stop without waiting.

SIGTERM, SIGINT, SIGUSR1       save and stop; the launcher passes SIGHUP on as SIGTERM
another within 5 seconds       ignored, because one request may arrive twice. A cluster may signal the ranks and the
                               launcher, which signals the ranks too. A terminal and a wrapper may both send a Ctrl-C.
another after 5 seconds        stop at once, without saving; also SIGQUIT to the launcher
end of the launcher            like SIGTERM, for its ranks
"""

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from components.launch.exit_codes import ExitCode
from components.launch.locks import end_process
from components.launch.orphan import grace_seconds, has_joined, launcher_pipe
from components.launch.process import say

T = TypeVar("T")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_STOP_SECONDS = 5.0
"""Stop signals within this time count as one request."""


class StopRequest:
    """The stop that signals have requested of one process."""

    def __init__(self) -> None:
        self.number = 0
        """Number of the first signal; 0 before that signal."""
        self.time = math.inf
        self.at_once = False

    def receive(self, number: int) -> bool:
        """Records a signal; returns whether it is the first."""
        if first := not self.number:
            self.number, self.time = number, time.monotonic()
        self.at_once |= number == signal.SIGQUIT or time.monotonic() - self.time > SAME_STOP_SECONDS
        return first


def end_at_signals(when: str) -> None:
    """Makes stop signals end the process, for a launcher without ranks, which has nothing to save."""

    def end(number: int, _: object) -> None:
        say(f"{signal.Signals(number).name} {when}: nothing to save")
        end_process(128 + number)

    for number in STOP_SIGNALS:
        signal.signal(number, end)


class Agreement:
    """Reduces one number per step on the host. Each call starts a reduction and returns the previous one's result."""

    def __init__(self, operation: dist.ReduceOp.RedOpType) -> None:
        self._operation = operation
        self._pending: tuple[Tensor, dist.Work | None] | None = None

    def __call__(self, value: int) -> int:
        """The reduction of the previous step's values; 0 at the first step. Every rank must call this each step."""
        before, number = self._pending, torch.tensor([value], dtype=torch.int32)
        self._pending = number, dist.all_reduce(number, self._operation, async_op=True)
        if before is None:
            return 0
        if before[1] is not None:
            before[1].wait()
        return int(before[0].item())


class StopSignal:
    """A stop that a signal, or the end of the launcher, requests of a rank. All ranks agree on it at the same step.

    The main thread of a rank must create this object first. A second thread receives the signals, because the main
    thread may wait inside a collective, where it would notice a signal too late or never.
    """

    def __init__(self) -> None:
        self.request = StopRequest()
        self.code = 0
        """128 + the signal on which all ranks have agreed; 0 before agreement."""
        self._saves = self._steps_made = False
        self._agreement = Agreement(dist.ReduceOp.MAX)
        self._signals, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def agreed(self) -> int:
        """The exit code if any rank had a signal at its previous call, else 0. All ranks call this each step."""
        self._steps_made = True
        number = self._agreement(self.request.number)
        self.code = self.code or (128 + number if number else 0)
        return self.code

    def until_agreed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yields the batches until ranks agree on a stop. Every rank must have the same number of batches."""
        for batch in batches:
            if self.agreed():
                return
            yield batch

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """The context of training. Inside, a signal requests a save and a stop; outside, it ends the rank at once.

        All ranks enter together, so that no rank makes a step while a signal still ends another rank.
        """
        self._saves = True
        try:
            dist.all_reduce(torch.zeros(1))
            yield
        except Exception:
            if self.request.number and not self._steps_made:  # the signal ended a peer or a loader worker
                self._end(128 + self.request.number)
            raise
        self._saves = False

    def _watch(self) -> None:
        """Handles signals and the end of the launcher until the process ends."""
        launcher, deadline = launcher_pipe(), math.inf
        watched = [self._signals, *([] if launcher is None else [launcher])]
        while True:
            left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            ready = select.select(watched, [], [], left)[0]
            if not ready:
                end_process(ExitCode.UNSAVED)  # without a launcher nobody else ends a rank that hangs
            if launcher in ready:  # end-of-file, because nothing is ever written to this pipe
                watched.remove(launcher)
                deadline = time.monotonic() + grace_seconds()
                self._receive(signal.SIGTERM)
            if self._signals in ready:
                for number in os.read(self._signals, 64):
                    self._receive(number)
                if has_joined() and self.request.number:
                    deadline = min(deadline, self.request.time + grace_seconds())

    def _receive(self, number: int) -> None:
        if number not in STOP_SIGNALS:
            return
        first = self.request.receive(number)
        if self._saves:
            if self.request.at_once:
                end_process(ExitCode.UNSAVED)
        elif first or self.request.at_once:
            self._end(128 + self.request.number)

    def _end(self, code: int) -> None:
        if os.environ.get("RANK", "0") == "0" and not self.code:
            say(f"stopped by signal {code - 128}: nothing to save")
        end_process(code)
