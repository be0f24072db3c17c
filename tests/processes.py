"""Python processes in sessions of their own, for tests that signal, stop or kill them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
    listing = subprocess.run(["ps", "-eo", "pid=,sess=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listing.splitlines()]
    return [int(pid) for pid, owner, state, *_ in rows if int(owner) == session and not state.startswith("Z")]


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


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
