"""Ranks whose launcher has ended: detection of the launcher's end, and redirection of output.

The launcher holds one end of a pipe, and its ranks hold the other. When the launcher has ended in any way, ranks read
end-of-file from the pipe. PR_SET_PDEATHSIG is not used, because it depends on the thread that started a rank.
"""

import io
import os
import sys
from typing import Any, TextIO

LAUNCHER_PIPE = "MESHWRIGHT_LAUNCHER_PIPE"
_LOG, _GRACE = "MESHWRIGHT_RANK_LOG", "MESHWRIGHT_GRACE_SECONDS"


def variables(log: str, grace_seconds: float) -> dict[str, str]:
    """Environment variables of a rank, besides LAUNCHER_PIPE: its log, if it has one, and its time for saving."""
    return {_LOG: os.path.abspath(log) if log else "", _GRACE: str(grace_seconds)}


def launcher_pipe() -> int | None:
    """The descriptor that becomes readable when the launcher ends; None in a process without a launcher."""
    return int(os.environ[LAUNCHER_PIPE]) if LAUNCHER_PIPE in os.environ else None


def grace_seconds() -> float:
    return float(os.environ[_GRACE])


def rank_log() -> str | None:
    """The file to which the launcher copies this rank's output; None if there is no such file."""
    return os.environ.get(_LOG) or None


def has_joined() -> bool:
    """Whether another launcher has started this rank (joining.py). Nothing ends such a rank if it takes too long."""
    return LAUNCHER_PIPE in os.environ and not rank_log()


def outlive_readers() -> None:
    """Redirects Python's output to the rank's log once the launcher stops reading, because a write would then fail."""
    if LAUNCHER_PIPE in os.environ:
        sys.stdout, sys.stderr = _text(1, sys.stdout), _text(2, sys.stderr)


def _text(descriptor: int, before: TextIO) -> io.TextIOWrapper:
    output: Any = _Output(descriptor, "w", closefd=False)  # unbuffered, as with the launcher's PYTHONUNBUFFERED
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
