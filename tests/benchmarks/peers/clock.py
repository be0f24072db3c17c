"""Times the steps of a training loop from inside, on every side alike. Standard library: any environment has it."""

import json
import os
import sys
import time
from typing import Any

Job = dict[str, Any]
"""Sizes of the model (dim, layers, heads, kv_heads, ffn, vocab); seq; batch: sequences of a batch rank; dtype; compile;
layout: axis -> degree; warm and steps: steps before and between the two looks at the clock."""


def job() -> Job:
    """What this process is to train: the first word of its command line."""
    return json.loads(sys.argv[1])


class Clock:
    """Ends the process at the second look, so that nothing after training is waited for."""

    def __init__(self, warm: int, steps: int) -> None:
        self.warm, self.steps, self.step = warm, steps, 0
        self.begun = (0.0, 0.0)

    def tick(self) -> None:
        """Called before every step."""
        now = time.process_time(), time.perf_counter()
        if self.step == self.warm:
            self.begun = now
        if self.step == self.warm + self.steps:
            processor, wall = ((end - start) / self.steps for start, end in zip(self.begun, now))
            print(
                "\n" + json.dumps({"rank": int(os.environ["RANK"]), "processor": processor, "wall": wall}), flush=True
            )
            os._exit(0)
        self.step += 1
