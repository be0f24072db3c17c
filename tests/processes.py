"""Python processes in sessions of their own, for tests that signal, stop or kill them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from components.config import ROOT


def start(*arguments: str) -> subprocess.Popen[str]:
    """Python in a session of its own."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens, nothing of its session is left at the end."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def processes_of(session: int) -> list[int]:
    """Living processes of a session."""
    pids = sorted(int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if (fields := _fields(pid)) and fields[0] not in "ZX" and int(fields[3]) == session]


def alive(pid: int) -> bool:
    return (fields := _fields(pid)) != [] and fields[0] not in "ZX"


def _fields(pid: int) -> list[str]:
    """State, parent, group, session and more of a process; nothing if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of this size in a folder; skips the test where it cannot be mounted."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
