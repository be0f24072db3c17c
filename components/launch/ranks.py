"""Starts the ranks of this node, shows and logs their output, passes signals on, and reports their end.

agent.py restarts ranks; process.py runs a single rank.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from components.launch.agent import run_agent
from components.launch.exit_codes import ExitCode
from components.launch.process import RankProcess, last_lines, say
from components.launch.signals import SAME_STOP_SECONDS, STOP_SIGNALS, StopRequest

if TYPE_CHECKING:
    from components.launch.settings import Settings

_FAILURE_GRACE_SECONDS = 3.0
"""Time for the other ranks to report and end after a rank has failed; without a limit they may wait for it forever."""


def run_ranks(main: str, argv: list[str], settings: Settings, logs: Path) -> int:
    """Runs main ("module:function") with argv on every rank of this node until all have ended; returns the exit code.

    preload must be called first. Output goes to logs/rank_N.log. The main thread waits for signals and another thread
    runs the agent, so signals are handled immediately even while nodes wait for each other inside a library call.
    """
    if not os.environ.get("LOGLEVEL"):
        logging.disable(logging.ERROR)  # the agent logs each step; failures are reported below
    ranks = Ranks(main, argv, settings, logs)
    for number in (*STOP_SIGNALS, signal.SIGQUIT):
        signal.signal(number, ranks.on_signal)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, ranks.on_signal)
    thread = threading.Thread(target=run_agent, args=(ranks, settings), daemon=True)
    thread.start()
    # Only this thread runs signal handlers, but the kernel may deliver a signal to another thread. This thread must
    # therefore wake up regularly.
    while thread.is_alive():
        thread.join(0.1)
    return ranks.report()


class Ranks:
    """The ranks of this node. The main thread calls on_signal and report; the agent's thread calls other methods."""

    def __init__(self, main: str, argv: list[str], settings: Settings, logs: Path) -> None:
        self.main, self.argv = main, argv
        self.error: Exception | None = None
        """An error of the agent itself."""
        self._settings = settings
        self._logs = logs
        self._ranks: list[RankProcess] = []
        self.meeting = True
        """Whether the agent waits for other nodes, at the start or after a failure, and no rank exists."""
        self._request = StopRequest()
        self._pipe, self._own_end = multiprocessing.Pipe(duplex=False)  # closed when this process ends in any way

    def start(self, variables: dict[int, dict[str, Any]]) -> dict[int, int]:
        """Starts a rank for each entry {rank number: environment variables}; returns {rank number: process id}."""
        environment = {
            **os.environ,
            **({"FORCE_COLOR": "1"} if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else {}),
        }
        self._ranks, self.meeting = [], False
        for number, more in variables.items():
            rank_environment = environment | {name: str(value) for name, value in more.items()}
            log = self._logs / f"rank_{number}.log"
            grace = self._settings.shutdown_seconds
            rank = RankProcess(
                number, self.main, self.argv, rank_environment, log, self._prefix(number), self._pipe, grace
            )
            self._ranks.append(rank)
        if self._request.number:  # a signal arrived while ranks were started
            self._pass_on()
        return {rank.number: rank.pid for rank in self._ranks}

    def running(self) -> bool:
        """Whether any rank is alive. Kills ranks that are past their deadline."""
        alive = [rank for rank in self._ranks if rank.code is None]
        deadlines = [self._request.time + self._settings.shutdown_seconds]
        for rank in self._ranks:
            if rank.code:
                grace = self._settings.shutdown_seconds if self._orderly(rank) else _FAILURE_GRACE_SECONDS
                deadlines.append(rank.end_time + grace)
        if time.monotonic() >= min(deadlines):
            for rank in alive:
                rank.kill()
        return bool(alive)

    def failed(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.code and not self._orderly(rank)]

    def worth_restarting(self) -> bool:
        """False after a requested stop, or if a restart would fail in the same way."""
        return not self._request.number and self._code() not in (ExitCode.CONFIG, ExitCode.NONFINITE)

    def kill(self) -> None:
        """Kills ranks that are still running; after a failure also loader workers and writers of ended ranks."""
        if any(rank.code is None for rank in self._ranks) or self.failed():
            for rank in self._ranks:
                rank.kill()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Asks the ranks to save and stop, or kills them at once in the cases of signals.py."""
        name = signal.Signals(number).name
        if self.meeting:
            say(f"{name} while there are no ranks: nothing to save")
            os._exit(128 + number)  # the agent may be inside an uninterruptible call
        first = self._request.receive(signal.SIGTERM if number == signal.SIGHUP else number)
        if self._request.at_once:
            for rank in self._ranks:
                rank.kill()
        elif first:
            self._pass_on()
            hint = f"; Ctrl-C after {SAME_STOP_SECONDS:.0f} seconds stops at once" if number == signal.SIGINT else ""
            say(f"{name}: the ranks save and stop{hint}")

    def report(self) -> int:
        """Prints errors, if any, and returns the exit code."""
        for rank in self._ranks:
            rank.finish_output()
        if self._request.at_once and self._code() == ExitCode.UNSAVED:
            say("stopped at once, without saving")
        elif self._own_failures():
            self.report_failure()
        if self.error:
            reason = self.error.__cause__ or self.error
            place = f" at RDZV_ENDPOINT={self._settings.endpoint}" if self._settings.endpoint else ""
            say(f"the ranks of {self._settings.nodes} nodes could not meet{place}: {reason}")
        return self._code()

    def _own_failures(self) -> list[RankProcess]:
        """Failed ranks, except those that were killed because of an error of the agent."""
        return [rank for rank in self.failed() if not (self.error and rank.killed)]

    def report_failure(self, then: str = "") -> None:
        """Names the rank that failed first and its log; quotes the log if the console did not show that rank."""
        cause = self._cause()
        assert cause.code is not None
        if any(rank.code == ExitCode.CONFIG and rank.shown for rank in self.failed()):
            return  # the console already shows the mistake
        if cause.killed:
            how = f"did not stop within {self._settings.shutdown_seconds} seconds and was killed"
        elif cause.code < 0:
            how = f"was killed by {signal.Signals(-cause.code).name}"
        else:
            how = f"ended with exit code {cause.code}"
        self.kill()  # also ends the children of ranks, which may still print
        cause.finish_output()
        if not cause.shown:
            for line in last_lines(cause.log, 1 if cause.code in (ExitCode.LOST_RANK, ExitCode.LOST_WORKER) else 12):
                say(f"  {line}")
        say(f"rank {cause.number} {how}; its log: {cause.log}" + (f"; {then}" if then else ""))
        if others := [rank.number for rank in self._ranks if rank.killed and rank is not cause]:
            plural = "s" if len(others) > 1 else ""
            say(f"rank{plural} {', '.join(map(str, others))} did not end after that: killed")

    def _code(self) -> int:
        if self._own_failures():
            cause = self._cause()
            if cause.killed and self._request.number:
                return ExitCode.UNSAVED
            return cause.code if cause.code is not None and cause.code > 0 else ExitCode.LOST_RANK
        if self.error:
            return ExitCode.ERROR
        stopped = [rank.code for rank in self._ranks if rank.code]
        return 0 if not stopped else max(code if code > 0 else 128 - code for code in stopped)

    def _cause(self) -> RankProcess:
        """The rank that failed by itself; the first to end, if several did.

        A rank's loss ends its neighbours within milliseconds, and a busy machine may see these ends first. Exits that
        are mostly consequences therefore come last, and errors, which may be, before them.
        """
        echoes = [ExitCode.ERROR, ExitCode.LOST_RANK, -signal.SIGABRT, -signal.SIGTERM, -signal.SIGPIPE]

        def likely(rank: RankProcess) -> tuple[bool, int, float]:
            return rank.killed, min(echoes.index(rank.code) + 1, 2) if rank.code in echoes else 0, rank.end_time

        return min(self.failed(), key=likely)

    def _orderly(self, rank: RankProcess) -> bool:
        """Whether a stop signal ended the rank: after saving, or immediately if there was nothing to save."""
        by_signal = [128 + number for number in STOP_SIGNALS]
        return rank.code in by_signal or (self._request.number != 0 and rank.code == -self._request.number)

    def _pass_on(self) -> None:
        """Signals only the ranks, because loader workers must live until their ranks have saved."""
        for rank in self._ranks:
            rank.ask_to_stop(self._request.number)

    def _prefix(self, number: int) -> bytes | None:
        """The prefix of a rank's lines on the console; None keeps the rank off the console."""
        shown = self._settings.shown
        if shown is not None and number not in shown:
            return None
        return b"" if shown is not None and len(shown) == 1 else f"[rank {number}] ".encode()
