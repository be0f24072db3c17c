"""Limits of time, against hangs only. None counts the clock alone: what a busy machine slows down still computes.

What a test waits for has reached its limit if it hardly computes for a while, or computes longer than anything does.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cpu import tree_seconds

MOST_IDLE = 60.0
"""Seconds on the clock with less than _HARDLY of a core in use, after which a test hangs."""
_HARDLY = 0.02
"""Share of one core. Waiting ranks use 0.003; a process beside a hundred others still gets 0.02 of two cores."""
MOST_COMPUTING = 3600.0
"""Seconds of processor time for which a test waits: the longest case, of 16 compiled ranks, takes 200."""

MOST_ITSELF = 300.0
"""Seconds of processor time of a test's own process, without the processes that it starts."""


class TimeLimit(Exception):
    """A limit of time was reached before the tested process ended, well or with an error."""


class Limit:
    """A limit on the processes that this one has started, counted from the first check(), which is called repeatedly.

    own: the processor time of this process counts too.
    """

    def __init__(
        self, what: str, computing: float = MOST_COMPUTING, idle: float = MOST_IDLE, own: bool = False
    ) -> None:
        self.idle = idle
        self._what, self._computing, self._own = what, computing, own
        self._begun: float | None = None
        self._moved_at = self._looked_at = self._moved = 0.0

    def check(self) -> None:
        """Raises TimeLimit. Looks once a second at the most: that takes some milliseconds."""
        now = time.monotonic()
        if now - self._looked_at < 1:
            return
        self._looked_at = now
        seconds = tree_seconds(os.getpid()) - (0 if self._own else time.process_time())
        if self._begun is None:
            self._begun = seconds
        # Less than before, where a process has ended that nobody waited for.
        if not self._moved_at or abs(seconds - self._moved) >= _HARDLY * self.idle:
            self._moved, self._moved_at = seconds, now
        if now - self._moved_at > self.idle:
            raise TimeLimit(f"limit of time: {self._what} hangs: nothing was computed for {self.idle:.0f} s")
        if seconds - self._begun > self._computing:
            raise TimeLimit(f"limit of time: {self._what} took more than {self._computing:.0f} s of processor time")


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Ask until it holds. process: what has to live until then."""
    limit = Limit("what this test waits for")
    while not condition():
        if process and process.poll() is not None and not condition():
            pytest.fail(f"exit code {process.returncode} before what this test waits for: {process.communicate()}")
        limit.check()
        time.sleep(0.01)


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """All that it prints until it ends, as communicate(). It is killed at its limit."""
    limit = Limit(_name(process.args))
    while True:
        try:
            return process.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            try:
                limit.check()
            except TimeLimit:
                process.kill()
                raise


def run(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """A command's exit code, and what it prints."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        out, err = finish(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _name(words: Any) -> str:
    return str(words)[:200] if isinstance(words, str) else " ".join(map(str, words))[:200]


@contextmanager
def limited(what: str, computing: float) -> Iterator[None]:
    """TimeLimit where what this process does inside reaches its limit."""
    limit = Limit(what, computing, own=True)
    before = signal.signal(signal.SIGALRM, lambda *_: limit.check())
    signal.setitimer(signal.ITIMER_REAL, 1.01, 1.01)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def limited_itself(what: str, computing: float = MOST_ITSELF) -> Iterator[None]:
    """TimeLimit where this process alone computes too long inside, as in a loop without end."""

    def end(*_: object) -> None:
        raise TimeLimit(f"limit of time: {what} took more than {computing:.0f} s of its own processor time")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, computing)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
