"""Settings of the C library's allocator for the memory that a rank frees."""

import contextlib
import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next tensor; does nothing with other C libraries.

    By default freed memory returns to the kernel. Every tensor of some MiB then costs a thousand page faults, which
    take a few per cent of a step on a CPU.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 2**25)  # glibc's maximum
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
