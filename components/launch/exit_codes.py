"""Exit codes: the same for every recipe, from train.py and from run_train.sh."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Documented in docs/runs.md; a stop by signal N exits with 128 + N, if the run was saved or saves nothing."""

    DONE = 0
    ERROR = 1
    """An unexpected error, with a traceback."""
    CONFIG = 2
    """A mistake in the job file, the command line or the data: fix it and start again."""
    NONFINITE = 3
    """training.max_nonfinite_steps steps in a row were skipped: loss or gradient not finite, or a spike."""
    OUT_OF_MEMORY = 4
    LOST_RANK = 5
    """A rank or its loader worker was killed, or a collective timed out."""
    UNSAVED = 6
    """Stopped by a signal before the run was saved: a second signal, or too little time."""
    CORRUPT = 7
    """Ranks that should hold the same bits of weights or moments do not."""
