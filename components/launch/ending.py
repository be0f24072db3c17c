"""Ends a rank with a documented exit code, and without the interpreter's tear-down."""

import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from components.config import ConfigError
from components.launch.exit_codes import ExitCode
from components.launch.locks import end_process
from components.launch.orphan import outlive_readers, rank_log

T = TypeVar("T")


def leave(code: int) -> NoReturn:
    """Ends the process with this exit code, without the interpreter's tear-down.

    A process group that still exists during tear-down aborts about one clean gloo run in eight (pytorch#190489,
    #179291).
    """
    # destroy_process_group waits for the other ranks, which may be gone after an error.
    if dist.is_initialized() and (code == ExitCode.DONE or code > 128):
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    end_process(code)


def run_to_exit(main: Callable[[T], int], given: T) -> NoReturn:
    """Runs main(given) and ends the process with the exit code that main returns.

    After an error, prints a message and ends with the code of that error. A process that crashes (segmentation fault,
    abort of glibc) prints the stacks of its threads.
    """
    faulthandler.enable()
    outlive_readers()
    try:
        code = main(given)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else ExitCode.ERROR
    except ConfigError as error:
        print(error, file=sys.stderr)
        code = ExitCode.CONFIG
    except Exception as error:
        try:  # a worker's death, which may be the error itself, makes torch raise from SIGCHLD's handler at any time
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        except Exception:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        code = _report(error)
    leave(code)


def _report(error: Exception) -> ExitCode:
    """Prints the error and returns its exit code. If a process was lost, the traceback goes only to the rank's log."""
    code, lost = ExitCode.ERROR, ""
    if "DataLoader worker" in str(error):  # raised by torch anywhere in the main thread, or by data/loader.py
        code = ExitCode.LOST_WORKER
        lost = f"rank {os.environ.get('RANK', '0')}: a DataLoader worker is gone: killed, or out of memory"
    elif isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _SIGNS_OF_FULL_MEMORY):
        code = ExitCode.OUT_OF_MEMORY
    elif isinstance(error, dist.DistError) or "gloo" in str(error):
        code, lost = ExitCode.LOST_RANK, "another rank is gone, or did not answer in time (see [comm])"
    log = rank_log() if lost else None
    with open(log, "a") if log else contextlib.nullcontext(sys.stderr) as output:
        traceback.print_exc(file=output)
    if last := _OUT_OF_MEMORY if code == ExitCode.OUT_OF_MEMORY else lost:
        print(last, file=sys.stderr)
    return code


_SIGNS_OF_FULL_MEMORY = (
    *("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"),
    *("CUDA calloc", "failure 2 'out of memory'"),
)
"""Texts of out-of-memory errors other than torch.OutOfMemoryError, from the host's allocator, CUDA, cuBLAS, NCCL."""
_OUT_OF_MEMORY = """Out of memory. Four keys to try:
  training.local_batch_size                fewer sequences at a time; with training.global_batch_size set, the same run
  parallelism.data_parallel_shard_degree   more ranks to share weights, gradients and optimizer
  optimizer.state_offload                  moments on the host
  training.enable_cpu_offload              weights, gradients and optimizer on the host"""
