"""A run whose rounding is disturbed: what floating point alone can do to a recipe, and so what proves nothing.

DISTURB="order 1" python disturbed.py --table.key value ...   as ./run_train.sh, but for the disturbance:

  order SEED   the sequences of each step are summed in another order: the same numbers but for the last bits
  ulp SEED     every trained weight of step 0 is moved to one of its two neighbours, after weights were loaded
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import train
from components.commands import start
from components.config import from_json
from components.launch.ending import run_to_exit


def move_by_one_ulp(stage: nn.Module, seed: int) -> None:
    """Move each weight up or down. Its own bits say which way, so that its copies on other ranks move alike."""
    for parameter in (each for each in stage.parameters() if each.requires_grad):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        bits = local.detach().view(torch.int32 if local.element_size() == 4 else torch.int16).long()
        up = (bits * 0x9E3779B1 + seed * 0x85EBCA6B) >> 17 & 1
        towards = torch.where(up.bool(), torch.inf, -torch.inf).to(local.dtype)
        local.data.copy_(torch.nextafter(local.data, towards))


def in_another_order(run: train.Run, batches: Iterator[train.Batch], seed: int) -> Iterator[train.Batch]:
    """This rank's sequences of each step, shuffled among its local batches; ranks that share them agree."""
    while True:
        step = [next(batches) for _ in range(run.accumulation_steps)]
        joined = {name: torch.cat([batch[name] for batch in step]) for name in step[0]}
        size = len(joined["tokens"]) // run.accumulation_steps
        order = torch.from_numpy(np.random.default_rng((seed, run.step)).permutation(size * run.accumulation_steps))
        for rows in order.split(size):
            yield {name: tensor[rows] for name, tensor in joined.items()}


def disturb(kind: str, seed: int) -> None:
    """Let train.py in this process start or read as `kind` says. Raises ValueError for another kind."""
    if kind == "ulp":
        resume: Any = train.resume

        def resume_beside(run: train.Run, checkpointer: Any) -> None:
            resume(run, checkpointer)
            for stage in run.stages * (run.step == 0):
                move_by_one_ulp(stage, seed)

        vars(train)["resume"] = resume_beside
    elif kind == "order":
        local_batches: Any = train.local_batches
        vars(train)["local_batches"] = lambda run: in_another_order(run, local_batches(run), seed)
    else:
        raise ValueError(f"{kind}: expected order or ulp")


def run_rank(argv: list[str]) -> None:
    """One rank of the disturbed run."""
    kind, seed = os.environ["DISTURB"].split()
    disturb(kind, int(seed))
    run_to_exit(train.main, from_json(argv[0]))


if __name__ == "__main__":
    vars(start)["RANK"] = "tests.convergence.disturbed:run_rank"
    sys.exit(start.main(sys.argv[1:]))
