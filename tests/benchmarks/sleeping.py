"""Real pipelines on gloo ranks whose stages sleep instead of computing, beside the simulation of their schedules."""

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from components.config import Parallelism
from parallelize.pipeline import _by_table
from parallelize.plan.time import share_of_action
from parallelize.schedules import SCHEDULES, number_of_stages, stages_of_rank
from parallelize.stage import Stage
from parallelize.tables import Order, order_of_parts, read_table, simulate
from parallelize.timeline import actions


@dataclass(frozen=True)
class Sleepers:
    """A schedule to run. parts: of each sequence, for 1F1B with sequences in parts."""

    name: str
    pp: int
    micro_batches: int
    stages_a_rank: int = 1
    parts: int = 1
    uneven: bool = False
    """Later stages take longer."""
    unit: float = 0.1
    """Seconds that a forward sleeps; each half of a backward takes as long."""
    table: str = ""
    """A file with the steps of each rank, instead of the schedule's own."""

    @property
    def order(self) -> Order:
        """Steps of each rank."""
        if self.table:
            return read_table(self.table)
        if self.parts > 1:
            return order_of_parts(self.pp, self.micro_batches, self.parts)
        return actions(self.name, self.pp, self.micro_batches, self.stages_a_rank)

    def seconds(self, stage: int) -> float:
        """Seconds of a stage's forward."""
        return self.unit * (1 + 0.2 * stage * self.uneven)

    def simulated(self) -> tuple[float, float]:
        """Seconds of the whole, and of the work of the rank that works longest."""

        def seconds(kind: str, stage: int) -> float:
            forward, backward = share_of_action(kind, stage)
            return self.seconds(stage) * (forward + 2 * backward)

        boxes = simulate(self.order, seconds)
        work = [sum(box.end - box.start for box in boxes if box.rank == rank) for rank in range(self.pp)]
        return max(box.end for box in boxes), max(work)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient.contiguous(), None


class _Sleeper(nn.Module):
    """A stage; it sleeps for the gradient of its input, and for that of its weight."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self._seconds = nn.Parameter(torch.zeros(8)), seconds

    def forward(self, hidden: Tensor) -> Tensor:
        time.sleep(self._seconds)
        again = self._seconds * (1 if hidden.requires_grad else 2)  # the first stage has no gradient of inputs
        return _Sleep.apply(hidden, self._seconds) + _Sleep.apply(self.weight, again)


def sleep(case: Sleepers, device: torch.device) -> float:
    """Seconds of a step, the best of two, on the rank that takes longest. For ranks of tests/ranks.py."""
    settings = Parallelism(
        pipeline_parallel_schedule=case.name,
        pipeline_parallel_degree=case.pp,
        pipeline_parallel_layers_per_stage=1 if case.stages_a_rank > 1 else None,
        pipeline_parallel_first_stage_less_layers=0,
        pipeline_parallel_last_stage_less_layers=0,
    )
    count = number_of_stages(settings, case.pp * case.stages_a_rank)
    hidden = torch.zeros(1, 8, device="meta", requires_grad=True)
    stages = [
        Stage(_Sleeper(case.seconds(number)), number, count, device, input_args=hidden, output_args=hidden)
        for number in stages_of_rank(settings, dist.get_rank(), count)
    ]
    options: dict[str, Any] = {
        "n_microbatches": case.micro_batches * case.parts,
        "loss_fn": lambda out, _: out.sum(),
        "scale_grads": False,
    }
    row = SCHEDULES[case.name]
    if case.parts > 1 or case.table:
        schedule = _by_table(case.order, stages, options)
    else:
        schedule = row.load()(stages[0] if row.one_stage else stages, **options)
    batch = torch.zeros(case.micro_batches * case.parts, 8)
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    found = []
    for _ in range(2):
        dist.barrier()
        start = time.perf_counter()
        schedule.step(*([batch] if first else []), target=batch if last else None, losses=[], return_outputs=False)
        longest = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        found.append(longest.item())
    return min(found)
