"""Signals and their meaning, for launcher and ranks alike, and how ranks agree on a stop without waiting.

SIGTERM, SIGINT, SIGUSR1       save and stop; SIGHUP to the launcher is passed on as SIGTERM
one more within 5 seconds      the same request: a cluster may signal the launcher and its ranks, and the launcher
                               passes its signal on; a terminal and a wrapper may both send one Ctrl-C
one more after that            stop at once, without saving; SIGQUIT to the launcher too
the end of the launcher        for its ranks as SIGTERM
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
from components.launch.orphan import grace_seconds, launcher_pipe
from components.launch.process import say

T = TypeVar("T")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_STOP_SECONDS = 5.0
"""Stop signals within this time are one request."""


class StopRequest:
    """The request made by the signals that one process has received."""

    def __init__(self) -> None:
        self.number = 0
        """The first signal's; 0 before it."""
        self.time = math.inf
        self.at_once = False

    def receive(self, number: int) -> bool:
        """Take note of a signal; whether it is the first."""
        if first := not self.number:
            self.number, self.time = number, time.monotonic()
        self.at_once |= number == signal.SIGQUIT or time.monotonic() - self.time > SAME_STOP_SECONDS
        return first


def end_at_signals(when: str) -> None:
    """From here on, in a launcher without ranks, a stop signal ends the process: there is nothing to save."""

    def end(number: int, _: object) -> None:
        say(f"{signal.Signals(number).name} {when}: nothing to save")
        os._exit(128 + number)

    for number in STOP_SIGNALS:
        signal.signal(number, end)


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
    """A stop that a signal asks of one rank, or the end of its launcher, and on which all ranks agree at the same step.

    Made first of all in a rank, by its main thread. A thread takes the signals: the main one may be inside a collective
    that waits, where it would learn of them too late, or never.
    """

    def __init__(self) -> None:
        self.request = StopRequest()
        self.code = 0
        """128 + the signal on which all ranks have agreed; 0 before."""
        self._saves = self._steps_made = False
        self._agreement = Agreement(dist.ReduceOp.MAX)
        self._signals, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def agreed(self) -> int:
        """The code, if some rank had received a signal at the last call. Called by every rank each step."""
        self._steps_made = True
        number = self._agreement(self.request.number)
        self.code = self.code or (128 + number if number else 0)
        return self.code

    def until_agreed(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches, or the first of them if a signal comes meanwhile. Every rank has equally many."""
        for batch in batches:
            if self.agreed():
                return
            yield batch

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Training goes on inside: a signal asks to save. Before and after there is nothing to save: it ends the rank.

        Entered by all ranks together, so that none makes a step while a signal still ends another one.
        """
        self._saves = True
        try:
            dist.all_reduce(torch.zeros(1))
            yield
        except Exception:
            if self.request.number and not self._steps_made:  # another rank, or a loader worker, obeyed the signal
                self._end(128 + self.request.number)
            raise
        self._saves = False

    def _watch(self) -> None:
        """Take signals and the end of the launcher, as they come, until the process ends."""
        launcher, deadline = launcher_pipe(), math.inf
        watched = [self._signals, *([] if launcher is None else [launcher])]
        while True:
            left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            ready = select.select(watched, [], [], left)[0]
            if not ready:
                os._exit(ExitCode.UNSAVED)  # nobody else would end a rank that hangs
            if launcher in ready:  # its end is closed: nothing is ever written
                watched.remove(launcher)
                deadline = time.monotonic() + grace_seconds()
                self._receive(signal.SIGTERM)
            if self._signals in ready:
                for number in os.read(self._signals, 64):
                    self._receive(number)

    def _receive(self, number: int) -> None:
        if number not in STOP_SIGNALS:
            return
        first = self.request.receive(number)
        if self._saves:
            if self.request.at_once:
                os._exit(ExitCode.UNSAVED)
        elif first or self.request.at_once:
            self._end(128 + self.request.number)

    def _end(self, code: int) -> None:
        if os.environ.get("RANK", "0") == "0" and not self.code:
            say(f"stopped by signal {code - 128}: nothing to save")
        os._exit(code)
