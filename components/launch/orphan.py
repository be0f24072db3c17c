"""Ranks whose launcher is gone: how they learn of it, and where they print then.

The launcher holds one end of a pipe, and its ranks the other: when the launcher has ended, however it did, they read
the end of the pipe. PR_SET_PDEATHSIG would depend on the thread that started them.
"""

import io
import os
import sys
from typing import Any, TextIO

LAUNCHER_PIPE = "MESHWRIGHT_LAUNCHER_PIPE"
_LOG, _GRACE = "MESHWRIGHT_RANK_LOG", "MESHWRIGHT_GRACE_SECONDS"


def variables(log: str, grace_seconds: float) -> dict[str, str]:
    """The environment of a rank, beside LAUNCHER_PIPE: its log, and the time that it has for saving."""
    return {_LOG: os.path.abspath(log), _GRACE: str(grace_seconds)}


def launcher_pipe() -> int | None:
    """The descriptor that can be read when the launcher is gone; None in a process that no launcher started."""
    return int(os.environ[LAUNCHER_PIPE]) if LAUNCHER_PIPE in os.environ else None


def grace_seconds() -> float:
    return float(os.environ[_GRACE])


def rank_log() -> str | None:
    """The file to which the launcher copies what this rank prints."""
    return os.environ.get(_LOG)


def outlive_readers() -> None:
    """Python's output goes to the rank's log as soon as the launcher does not read it any more: an error otherwise."""
    if rank_log():
        sys.stdout, sys.stderr = _text(1, sys.stdout), _text(2, sys.stderr)


def _text(descriptor: int, before: TextIO) -> io.TextIOWrapper:
    output: Any = _Output(descriptor, "w", closefd=False)  # unbuffered, as the launcher asks of Python
    return io.TextIOWrapper(output, encoding=before.encoding, errors="backslashreplace", write_through=True)


class _Output(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            log = os.open(rank_log() or os.devnull, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            for descriptor in (1, 2):
                os.dup2(log, descriptor)
            os.close(log)
            return super().write(data)
