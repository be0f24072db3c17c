"""One rank's process and its output: to the console as it comes, to a log file in whole lines."""

import contextlib
import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from components.launch.orphan import variables

_LINE_END = re.compile(rb"(?<=\n)|(?<=\r)(?!\n)")
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class RankProcess:
    """A process in its own session, so that a terminal's Ctrl-C reaches it only through the launcher."""

    def __init__(
        self,
        number: int,
        command: list[str],
        environment: dict[str, str],
        log: Path,
        prefix: bytes | None,
        pipe: int,
        grace_seconds: float,
    ) -> None:
        """pipe: what the rank reads the launcher's end from, and has grace_seconds then."""
        self.number = number
        self.log = log
        self.shown = prefix is not None
        self.code: int | None = None
        """None while it runs; -N if signal N killed it."""
        self.end_time = math.inf
        self.killed = False
        """Whether the launcher killed it."""
        self.process = subprocess.Popen(
            command,
            env=environment | variables(pipe, str(log), grace_seconds),
            pass_fds=[pipe],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        file = log.open("ab", buffering=0)
        self._outputs = [
            threading.Thread(target=_copy, args=(stream, file, console, prefix), daemon=True)
            for stream, console in ((self.process.stdout, 1), (self.process.stderr, 2))
        ]
        for thread in (*self._outputs, threading.Thread(target=self._wait, daemon=True)):
            thread.start()

    def _wait(self) -> None:
        """Runs in a thread for each rank, so that the first rank to end is known."""
        code = self.process.wait()
        self.end_time = time.monotonic()
        self.code = code

    def kill(self) -> None:
        """Kill the process with its children, even if it has already ended."""
        self.killed = self.killed or self.code is None
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def finish_output(self) -> None:
        """Wait for the last output, but not for children that keep the pipe open."""
        for thread in self._outputs:
            thread.join(timeout=1)


def _copy(stream: IO[bytes], file: IO[bytes], console: int, prefix: bytes | None) -> None:
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
