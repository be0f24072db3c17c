"""Detects ranks that are slow in several logged steps in a row, by comparing each rank's time except its waiting.

In a logged step a thread samples, a few hundred times a second, where the main thread is. Time inside a call of
torch.distributed is waiting. With CUDA the main thread hardly computes, so only a slow loader or host is found.
"""

import statistics
import sys
import threading
import time
from types import TracebackType
from typing import Self

import torch.distributed as dist

from parallelize.groups import gather
from parallelize.mesh import Mesh

_INTERVAL_SECONDS = 0.005
_SLOW, _LOGGED_STEPS, _LEAST_SECONDS = 1.3, 3, 0.03
"""A rank is slow if it exceeds 1.3 times the median, and the median by 0.03 s, in 3 logged steps in a row."""
_WAITING = ("/torch/distributed/", "/components/launch/signals.py")
_CALLS = ("/torch/_ops.py", "/torch/_library/autograd.py")
"""Files of torch through which operations are called."""
_COMPUTING = "/torch/distributed/tensor/"
"""The folder of torch.distributed whose calls compute; collectives are called through another folder."""


class Stragglers:
    """On all ranks, enter `watched` for a logged step, then call `compare`. Stages of one rank are left out."""

    def __init__(self, mesh: Mesh) -> None:
        stages = list(zip(*mesh.peers("pp"), strict=True))
        self.peers = [sorted(ranks) for ranks in stages if len(ranks) > 1]
        """Groups of ranks with equal work: the ranks of one stage."""
        self.slow: dict[int, int] = {}
        """Rank -> logged steps in a row in which it was slow."""

    def watched(self, logged: bool) -> "OwnTime":
        return OwnTime(enabled=logged and bool(self.peers))

    def compare(self, own: "OwnTime") -> list[str]:
        """Print which ranks have been slow for some time, and return the lines. Waits for all ranks if enabled."""
        if not own.enabled:
            return []
        seconds, lines, slow = gather(own.seconds), [], {}
        for ranks in self.peers:
            usual = statistics.median_low([seconds[rank] for rank in ranks])
            for rank in ranks:
                if seconds[rank] > max(_SLOW * usual, usual + _LEAST_SECONDS):
                    slow[rank] = self.slow.get(rank, 0) + 1
                    if slow[rank] % _LOGGED_STEPS == 0:
                        lines.append(
                            f"rank {rank} is slow: {seconds[rank]:.2f} s of its own in a step, others {usual:.2f} s "
                            f"(median), in the last {slow[rank]} logged steps"
                        )
        self.slow = slow
        if lines and dist.get_rank() == 0:
            print(*lines, sep="\n", flush=True)
        return lines


class OwnTime:
    """Time of the main thread inside the `with` block, without the time in calls of torch.distributed."""

    def __init__(self, enabled: bool) -> None:
        self.enabled, self.seconds = enabled, 0.0
        self.ended = threading.Event()
        self.main = threading.get_ident()

    def __enter__(self) -> Self:
        if self.enabled:
            self.thread = threading.Thread(target=self._look, name="own time", daemon=True)
            self.thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, stack: TracebackType | None) -> None:
        self.ended.set()
        if self.enabled:
            self.thread.join()

    def _look(self) -> None:
        last, ended = time.perf_counter(), False
        while not ended:
            ended = self.ended.wait(_INTERVAL_SECONDS)
            frame, now = sys._current_frames().get(self.main), time.perf_counter()
            while frame and frame.f_code.co_filename.endswith(_CALLS):
                frame = frame.f_back
            file = frame.f_code.co_filename if frame else ""
            if _COMPUTING in file or not any(name in file for name in _WAITING):
                self.seconds += now - last
            last = now
