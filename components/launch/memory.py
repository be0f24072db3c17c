"""Settings of the C library for memory that a rank has freed."""

import contextlib
import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Let glibc keep it for the next tensor; other C libraries have their own ways.

    By default what is freed goes back to the kernel, and every tensor of some MiB is paid for with a thousand page
    faults: a few per cent of a step on a CPU.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 2**25)  # the most that glibc takes
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
