"""One rank's process. Its output goes to the console immediately, and to a log file in whole lines."""

import contextlib
import errno
import gc
import hashlib
import math
import multiprocessing
import os
import pkgutil
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterable
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from components.config import ConfigError
from components.config.environment import set_default
from components.launch.orphan import LAUNCHER_PIPE, variables

_LINE_END = re.compile(rb"(?<=\n)|(?<=\r)(?!\n)")
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


NOT_FOR_THE_SERVER = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
"""Signals that fork_server.py blocks and ranks unblock."""
_FORKS = multiprocessing.get_context("forkserver")
_EXIT_CODES = threading.Lock()
"""Lock around Process.start and Process.join. Both read exit codes from a pipe that contains each code once. Without
the lock, the second thread that reads the pipe finds no code, and takes the fork server for dead.
"""
_SERVER_DIED = 255
"""multiprocessing's exit code of a process whose fork server has died. The process may still run, and its real exit
code is unknown."""


OPENMP = {"GOMP_SPINCOUNT": "10000"}
"""A waiting thread spins for some microseconds, then sleeps. By default waiting threads spin for milliseconds, and
keep other threads from the cores of a busy machine (tests/benchmarks/busy.py)."""


def preload(modules: list[str], threads: int) -> None:
    """Starts the fork server, which imports these modules; does not wait for the imports.

    threads: OpenMP threads of each rank. Raises ConfigError as shorten_temporary_folder does.
    """
    set_variables(threads)
    _FORKS.set_forkserver_preload(["components.launch.fork_server", *modules])
    forkserver.ensure_running()


def set_variables(threads: int) -> None:
    """Sets the environment variables that libraries of a rank read when they are imported.

    threads: OpenMP threads of the rank. Raises ConfigError as shorten_temporary_folder does.
    """
    for name, value in {"OMP_NUM_THREADS": str(threads), **OPENMP}.items():
        set_default(name, value)
    os.environ["PYTHONUNBUFFERED"] = "1"
    if not os.environ.get("PYTORCH_CUDA_ALLOC_CONF"):
        set_default("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # less fragmentation of GPU memory
    if not os.environ.get("LOGLEVEL"):
        os.environ.pop("LOGLEVEL", None)  # torch.distributed.elastic cannot be imported with an empty one
    shorten_temporary_folder()


def shorten_temporary_folder() -> None:
    """Replaces a long TMPDIR by a short link to it, because the paths of multiprocessing's sockets must be short.

    Each user has one link for each long TMPDIR, and no link is removed. Raises ConfigError if the link cannot be made,
    or if no file can be.
    """
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(f"environment: TMPDIR: {error.strerror or error}: is the disk full?") from None
    if len(os.fsencode(folder)) <= _LONGEST_TMPDIR:
        return
    name = hashlib.blake2b(os.fsencode(folder), digest_size=6).hexdigest()
    link = Path(f"/tmp/meshwright-{os.getuid()}-{name}")
    try:
        with contextlib.suppress(FileExistsError):
            link.symlink_to(folder)
        if link.lstat().st_uid != os.getuid() or os.readlink(link) != folder:
            raise FileExistsError(errno.EEXIST, "another user's file", str(link))
    except OSError as error:
        reason = f"too long for the sockets in it; use a folder of at most {_LONGEST_TMPDIR} bytes ({error})"
        raise ConfigError(f'environment: TMPDIR = "{folder}": {reason}') from None
    os.environ["TMPDIR"] = tempfile.tempdir = str(link)


_LONGEST_TMPDIR = 103 - len("/pymp-12345678/listener-12345678")
"""Bytes. The path of a socket has at most 103 bytes on macOS, and 107 on Linux."""


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
        """Starts the process; preload must be called first.

        main: a function of argv, as "module:function".
        prefix: put before each line on the console; None keeps the output off the console.
        pipe: reaches end-of-file when the launcher ends; the rank then has grace_seconds to save.
        """
        self.number = number
        self.log = log
        self.shown = prefix is not None
        self.code: int | None = None
        """Exit code; None while the process runs; -N if signal N killed the process."""
        self.end_time = math.inf
        self.killed = False
        """Whether the launcher killed the process."""
        self._asked = threading.Lock()
        """Acquired by the first thread that asks the process to stop."""
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
        """Waits for the end of the process. Each rank has a thread for this, so that the first rank to end is known."""
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
        """Sends the process a stop signal. Only the first call has an effect."""
        if self._asked.acquire(blocking=False):
            self.signal(number)

    def signal(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the process and its children; kills the children even if the process has already ended."""
        self.killed = self.killed or self.code is None
        self.signal(signal.SIGKILL)  # the process may not have a process group yet
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)

    def finish_output(self) -> None:
        """Waits for the last output, but at most 1 second per stream, because children may keep a pipe open."""
        for thread in self._outputs:
            thread.join(timeout=1)


def _be_rank(
    main: str, argv: list[str], environment: dict[str, str], pipe: Connection, out: Connection, err: Connection
) -> None:
    """Runs in a fork of the fork server."""
    gc.freeze()  # imported objects are never garbage
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
    """Copies a stream to the console immediately (unless prefix is None), and to the file in whole lines.

    The file gets whole lines because two streams share the file. Reading continues even if neither can be written,
    because a rank waits for its reader.
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
    """Writes to the console. Returns False if nobody reads it: `run_train.sh | head` must not stop a run."""
    while chunk:
        try:
            chunk = chunk[os.write(console, chunk) :]
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:
            return False
    return True


def cores() -> int:
    """Number of cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def say(line: str) -> None:
    _show(2, f"{line}\n".encode())


def last_lines(path: Path, count: int) -> Iterable[str]:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
    return []
