"""What saving costs: how long training stands still, and how long until a checkpoint is published.

python -m tests.benchmarks.checkpoint [GIGABYTES]     weights and both moments, on one rank; bar for async: 0.5 s/GB
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from components.config import Checkpoint
from components.state.checkpoint import Checkpointer


def measure(mode: Literal["disabled", "async"], gigabytes: float, saves: int = 3) -> None:
    """Print seconds a gigabyte of each save: that training waits, and until it is published."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width = 2048
    layers = max(1, round(gigabytes * 1e9 / (3 * 4 * width * width)))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    size = 3 * 4 * layers * width * width / 1e9
    with tempfile.TemporaryDirectory(dir=".") as folder:
        config = Checkpoint(enable=True, async_mode=mode, keep_latest_k=1)
        checkpointer = Checkpointer(Path(folder), config, [model], optimizer)
        for step in range(1, saves + 1):
            started = time.perf_counter()
            checkpointer.save(step, {})
            stall = time.perf_counter() - started
            checkpointer.wait()
            total = time.perf_counter() - started
            print(f"{mode:8} {size:.2f} GB: stall {stall / size:.2f} s/GB, published after {total / size:.2f} s/GB")


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for each in ("disabled", "async"):
        measure(each, float(sys.argv[1]) if len(sys.argv) > 1 else 0.5)
    dist.destroy_process_group()
