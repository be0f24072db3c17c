"""One rank's process and its output: to the console as it comes, to a log file in whole lines."""

import contextlib
import gc
import math
import multiprocessing
import os
import pkgutil
import re
import signal
import threading
import time
from collections.abc import Iterable
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from components.launch.orphan import LAUNCHER_PIPE, variables

_LINE_END = re.compile(rb"(?<=\n)|(?<=\r)(?!\n)")
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


NOT_FOR_THE_SERVER = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
"""Signals that fork_server.py blocks, and ranks do not."""
_FORKS = multiprocessing.get_context("forkserver")
_EXIT_CODES = threading.Lock()
"""Held while a thread reads exit codes. Process.start and join read them from a pipe that has each code once.

Without the lock one thread would miss a code that another has read, and take its process for one of a dead server.
"""
_SERVER_DIED = 255
"""multiprocessing's exit code of a process whose server has died: nobody knows its own, and it may still run."""


OPENMP = {"GOMP_SPINCOUNT": "10000"}
"""A thread that waits for others spins for some microseconds, then sleeps. By default it spins for milliseconds, and
keeps the others from the cores of a busy machine (tests/benchmarks/busy.py)."""


def preload(modules: list[str], threads: int) -> None:
    """Start to import modules in the process that ranks will be forks of; does not wait for it.

    threads: of each rank. OpenMP reads their number when torch is imported.
    """
    for name, value in {"OMP_NUM_THREADS": str(threads), **OPENMP}.items():
        os.environ.setdefault(name, value)
    os.environ["PYTHONUNBUFFERED"] = "1"
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # a GPU's memory in fewer pieces
    _FORKS.set_forkserver_preload(["components.launch.fork_server", *modules])
    forkserver.ensure_running()


class RankProcess:
    """A process in its own session, so that a terminal's Ctrl-C reaches it only through the launcher."""

    def __init__(
        self,
        number: int,
        main: str,
        argv: list[str],
        environment: dict[str, str],
        log: Path,
        prefix: bytes | None,
        pipe: Connection,
        grace_seconds: float,
    ) -> None:
        """main: a function of argv, as "module:function". pipe: tells that the launcher has ended; then the rank
        has grace_seconds. Comes after preload.
        """
        self.number = number
        self.log = log
        self.shown = prefix is not None
        self.code: int | None = None
        """None while it runs; -N if signal N killed it."""
        self.end_time = math.inf
        self.killed = False
        """Whether the launcher killed it."""
        self._asked = threading.Lock()
        """Taken by the first thread that asks it to stop."""
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
        more = variables(str(log), grace_seconds)
        self.process = _FORKS.Process(
            target=_be_rank, args=(main, argv, environment | more, pipe, *(output for _, output in pipes))
        )
        with _EXIT_CODES:
            self.process.start()
        file = log.open("ab", buffering=0)
        self._outputs = [
            threading.Thread(target=_copy, args=(stream, file, console, prefix), daemon=True)
            for (stream, _), console in zip(pipes, (1, 2), strict=True)
        ]
        for thread in (*self._outputs, threading.Thread(target=self._wait, daemon=True)):
            thread.start()
        for _, output in pipes:
            output.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def _wait(self) -> None:
        """Runs in a thread for each rank, so that the first rank to end is known."""
        connection.wait([self.process.sentinel])
        self.end_time = time.monotonic()
        with _EXIT_CODES:
            self.process.join()
        if self.process.exitcode == _SERVER_DIED:
            self.kill()
            self.killed, self.code = False, -signal.SIGKILL
        else:
            self.code = self.process.exitcode

    def ask_to_stop(self, number: int) -> None:
        """Send it the signal, once however many threads pass the signal on."""
        if self._asked.acquire(blocking=False):
            self.signal(number)

    def signal(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process with its children, even if it has already ended."""
        self.killed = self.killed or self.code is None
        self.signal(signal.SIGKILL)  # it may not have its own group yet
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)

    def finish_output(self) -> None:
        """Wait for the last output, but not for children that keep the pipe open."""
        for thread in self._outputs:
            thread.join(timeout=1)


def _be_rank(
    main: str, argv: list[str], environment: dict[str, str], pipe: Connection, out: Connection, err: Connection
) -> None:
    """Runs in a fork of the fork server."""
    gc.freeze()  # what is imported stays
    gc.enable()  # disabled by fork_server.py
    os.setsid()
    for descriptor, output in ((1, out), (2, err)):
        os.dup2(output.fileno(), descriptor)
        output.close()
    os.environ.clear()
    os.environ |= environment | {LAUNCHER_PIPE: str(pipe.fileno())}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_THE_SERVER)
    pkgutil.resolve_name(main)(argv)


def _copy(stream: Connection, file: IO[bytes], console: int, prefix: bytes | None) -> None:
    """Copy to the console as it comes (unless prefix is None), and to the file in whole lines, as two streams share it.

    Reads on even if neither can be written: a rank waits for its reader.
    """
    rest = b""
    while chunk := os.read(stream.fileno(), 1 << 16):
        *lines, rest = _LINE_END.split(rest + chunk)
        _keep(file, b"".join(lines))
        if prefix:
            chunk = b"".join(prefix + line for line in lines)
        if prefix is not None and not _show(console, chunk):
            prefix = None
    if rest:
        _keep(file, rest + b"\n")
    if rest and prefix:
        _show(console, prefix + rest + b"\n")


def _keep(file: IO[bytes], lines: bytes) -> None:
    with contextlib.suppress(OSError):  # disk full
        file.write(_ESCAPES.sub(b"", lines))


def _show(console: int, chunk: bytes) -> bool:
    """False if nobody reads the console any more: `run_train.sh | head` must not stop a run."""
    while chunk:
        try:
            chunk = chunk[os.write(console, chunk) :]
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:
            return False
    return True


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def say(line: str) -> None:
    _show(2, f"{line}\n".encode())


def last_lines(path: Path, count: int) -> Iterable[str]:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
    return []
