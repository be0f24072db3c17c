"""Locks between processes of all hosts that share a folder.

A lock uses flock, which the kernel releases however the holder ends. On a file system without flock (Lustre, some FUSE)
the lock is soft: it is held while its file exists. A killed holder leaves the file behind. A process of the same host
then takes the lock over. Another host cannot know whether the holder lives, so messages name the holder and the file
to remove.
"""

import atexit
import contextlib
import errno
import fcntl
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

RUN_LOCK = ".lock"
"""File in job.dump_folder that rank 0 locks."""
_NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)
_TAKE_OVER_SECONDS = 0.2
"""Time to take over the soft lock of a dead process."""
_SILENT_SECONDS, _REPEAT_SECONDS = 2, 60
_kept: list[BaseFileLock] = []
"""Locks of this process. A FileLock without a reference is released."""


@contextlib.contextmanager
def locked(path: Path, task: str | None) -> Iterator[bool]:
    """Holds a lock as keep_lock does; yields False if another process holds the lock and there is no task.

    Raises OSError if the file cannot be made.
    """
    lock = keep_lock(path, task)
    try:
        yield lock is not None
    finally:
        if lock:
            _kept.remove(lock)
            lock.release()


def keep_lock(path: Path, task: str | None = None) -> BaseFileLock | None:
    """Locks a file until this process ends by itself or by end_process; returns None if another process holds the lock.

    With a task ("tokenize a.txt") it waits for the holder, and says on stderr who the holder is. Raises OSError if the
    file cannot be made.
    """
    soft = not _has_flock(path.parent)
    lock = (SoftFileLock if soft else FileLock)(path, thread_local=False)
    started, seconds = time.monotonic(), _SILENT_SECONDS if task else _TAKE_OVER_SECONDS
    while True:
        try:
            lock.acquire(timeout=seconds)
            break
        except Timeout:
            if not task:
                return None
            waited, seconds = time.monotonic() - started, _REPEAT_SECONDS
            print(f"waiting for {waited:.0f} s to {task}: {holder(path)}", file=sys.stderr, flush=True)
    _kept.append(lock)
    if not soft:  # a soft lock has this text already
        with contextlib.suppress(OSError):  # disk full
            path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
    return lock


def _has_flock(folder: Path) -> bool:
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_FLOCK:
                return False
            raise
    return True


def is_held(path: Path) -> bool:
    """Whether a living process may hold the lock; does not block others."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return not _is_dead(*_owner(path))
    return False


def holder(path: Path) -> str:
    """One line about the process that holds a lock: process, host, start; and the file to remove if it has ended."""
    process, host = _owner(path)
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        soft = not _has_flock(path.parent)
    except OSError:
        return "another process, which has just ended"
    who = f"process {process} on {host}" if process else "an unknown process"
    return f"{who} has it since {since}" + (f"; if that process has ended, remove {path}" if soft else "")


def _owner(path: Path) -> tuple[int, str]:
    """(process id, host) of a lock's holder; (0, "") if the file does not say it."""
    with contextlib.suppress(OSError, ValueError):
        process, host, *_ = path.read_text().splitlines()
        return int(process), host
    return 0, ""


def _is_dead(process: int, host: str) -> bool:
    """Whether this is a process of this host that has ended."""
    if not process or host != socket.gethostname():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def free_lock_of_dead(path: Path) -> None:
    """Removes the soft lock that a killed process of this host has left, so that another host can go on."""
    with contextlib.suppress(OSError):
        if _is_dead(*_owner(path)) and not _has_flock(path.parent):
            SoftFileLock(path, timeout=_TAKE_OVER_SECONDS).acquire().lock.release()


@atexit.register
def _release_soft_locks() -> None:
    for lock in _kept:
        path = Path(lock.lock_file)
        # This call does not use lock.release, which could wait for the thread that this call interrupts.
        # A fork inherits its parent's list, but owns no lock.
        if isinstance(lock, SoftFileLock) and _owner(path) == (os.getpid(), socket.gethostname()):
            with contextlib.suppress(OSError):
                path.unlink()


def end_process(code: int) -> NoReturn:
    """Releases this process's soft locks, then ends it without the interpreter's tear-down."""
    _release_soft_locks()
    os._exit(code)
