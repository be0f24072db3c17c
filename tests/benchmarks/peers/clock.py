"""Times the steps of a training loop from inside, on every side alike. Needs nothing but torch."""

import json
import os
import sys
import time
from typing import Any

import torch

Job = dict[str, Any]
"""Sizes of the model (dim, layers, heads, kv_heads, ffn, vocab); seq; batch: sequences of a batch rank; dtype; compile;
layout: axis -> degree; checkpointing: none, full, op or a memory budget; float8: whether the layers' products are;
device: cpu or cuda; warm and steps: steps before and between the two looks at the clock."""


def job() -> Job:
    """What this process is to train: the first word of its command line."""
    return json.loads(sys.argv[1])


class Clock:
    """Ends the process at the second look, so that nothing after training is waited for."""

    def __init__(self, job: Job) -> None:
        self.warm, self.steps, self.step = job["warm"], job["steps"], 0
        self.begun = (0.0, 0.0)

    def tick(self) -> None:
        """Called before every step."""
        if self.step == self.warm:
            self.begun = self._look()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
        if self.step == self.warm + self.steps:
            processor, wall = ((end - start) / self.steps for start, end in zip(self.begun, self._look()))
            peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
            seen = {"rank": int(os.environ["RANK"]), "processor": processor, "wall": wall, "peak_bytes": peak}
            print("\n" + json.dumps(seen), flush=True)
            os._exit(0)
        self.step += 1

    def _look(self) -> tuple[float, float]:
        """Seconds of this process and of the wall clock, once the GPU has done what it was given."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.process_time(), time.perf_counter()
