"""Exit codes of train.py and run_train.sh."""

from enum import IntEnum


class ExitCode(IntEnum):
    """The README documents these codes. A stop by signal N exits with 128 + N if the run was saved or never saves."""

    DONE = 0
    ERROR = 1
    """An unexpected error, with a traceback."""
    CONFIG = 2
    """A mistake in the job file, the command line or the data: fix it and start again."""
    NONFINITE = 3
    """training.max_nonfinite_steps consecutive steps were skipped: loss or gradient was not finite, or a spike."""
    OUT_OF_MEMORY = 4
    LOST_RANK = 5
    """A rank was killed, or a collective timed out. Every rank that waited for a lost one ends with this code."""
    UNSAVED = 6
    """A signal stopped the run before it was saved: a second signal came, or the time was too short."""
    CORRUPT = 7
    """Weights or moments that should be bitwise equal differ between ranks."""
    LOST_WORKER = 8
    """A loader worker of this rank was killed."""
