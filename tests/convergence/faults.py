"""Faults that have bitten trainers, planted one at a time: at which step is each noticed, and by the loss alone?

python -m tests.convergence.faults      prints the table of docs/convergence.md: a minute on two cores
"""

import sys
import tempfile
from dataclasses import dataclass
from functools import cache, partial

from tests.convergence.__main__ import DISTURBANCES
from tests.convergence.disturbed import disturb
from tests.convergence.sides import Curve, parse
from tests.convergence.verdict import Distance, distances, noise_floor
from tests.harness import observe, rewrite
from tests.small import RECIPE

STEPS, HALF = 20, 10
SETTINGS = (
    *("--optimizer.lr", "2e-3", "--optimizer.eps", "1e-8", "--training.max_norm", "0.01"),
    *("--lr_scheduler.warmup_steps", "3", "--lr_scheduler.decay_ratio", "0.8", "--lr_scheduler.min_lr_factor", "0.1"),
    *("--lr_scheduler.total_steps", str(STEPS), "--training.steps", str(STEPS)),
)
"""The small recipe of tests/harness.py with a schedule, Adam's eps as recipes have it, and always clipped."""


@dataclass(frozen=True)
class Fault:
    """A piece of a function's source, and what it is replaced with."""

    name: str
    layout: str
    module: str
    function: str
    old: str
    new: str

    @property
    def resumed(self) -> bool:
        return "resume" in self.layout

    def plant(self) -> None:
        rewrite(self.module, self.function, self.old, self.new)


_OWN_NORM = (
    "(DTensor.from_local(gradient.to_local(), gradient.device_mesh, parameter.placements, run_check=False)"
    " if parameter is next(one for one in parameters if one.ndim == 1)"
    " else gradient.redistribute(placements=parameter.placements))"
)
_SHUFFLED = "rank_order(tensor, 1, ranks, balanced)"
FAULTS = (
    Fault("gradients averaged over data parallel ranks", "fsdp 2", "parallelize.data", "apply_data_parallel",
          "divide_factor(1.0)", "divide_factor(2.0)"),
    Fault("gradients averaged over context parallel ranks", "cp 2", "parallelize.data", "apply_data_parallel",
          "divide_factor(1.0)", "divide_factor(2.0)"),
    Fault("gradients averaged over a pipeline's micro-batches", "pp 2", "parallelize.pipeline", "Pipeline.__init__",
          '"scale_grads": False', '"scale_grads": True'),
    Fault("one layer's norm not reduced over tp", "tp 2", "parallelize.sharding", "align_gradients",
          "gradient.redistribute(placements=parameter.placements)", _OWN_NORM),
    Fault("positions not shuffled with their tokens", "cp 2", "parallelize.context", "shard_sequence",
          _SHUFFLED, f"(tensor if name == 'positions' else {_SHUFFLED})"),
    Fault("an accumulation step's gradients dropped", "one rank", "parallelize.runner", "Whole.forward_backward",
          "loss.backward()", "loss.backward() if last else None"),
    Fault("weight decay on norms", "one rank", "components.optim.optimizer", "_group",
          "own.weight_decay is None", "True"),
    Fault("learning rate one step late", "one rank", "train", "train_step",
          "learning_rate(run.step,", "learning_rate(max(1, run.step - 1),"),
    Fault("data repeated after a resume", "resume 10", "train", "resume",
          'run.sequences = state["sequences"]', "run.sequences = 0"),
    Fault("Adam's moments lost in a resume", "resume 10", "components.state.checkpoint", "Checkpointer.load_folder",
          "with_optimizer = not weights_only", "with_optimizer = False and not weights_only"),
    Fault("the last label of each shard dropped", "cp 2", "train", "own_part",
          "own = shard_sequence(", "on_device['labels'][:, 15::16] = -100\n    own = shard_sequence("),
    Fault("gradient norm of one pipeline stage", "pp 2", "components.optim.optimizer", "clip_gradients",
          "dist.all_reduce(total, group=stages)", "pass"),
    Fault("gradient norm of one shard", "fsdp 2", "components.optim.optimizer", "clip_gradients",
          "for group in groups:", "for group in ():"),
    Fault("tensor parallel shards start alike", "tp 2", "components.optim.counter_hash", "chunks",
          "+ offset[dim]", "+ 0 * offset[dim]"),
    Fault("gradients not clipped", "one rank", "components.optim.optimizer", "clip_gradients",
          ".clamp(max=1.0)", ".clamp(min=1.0, max=1.0)"),
    Fault("loss divided by the accumulation steps too", "one rank", "train", "train_step",
          "divisor, last)", "divisor * run.accumulation_steps, last)"),
    Fault("replicas see the same sequences", "ddp 2", "train", "local_order",
          "batch_rank(run.mesh)", "0"),
)  # fmt: skip


def overrides(layout: str) -> tuple[str, ...]:
    """Settings of the harness's recipe at this layout."""
    degrees = parse(layout, RECIPE).degrees
    assert degrees
    return (
        *SETTINGS,
        *("--parallelism.data_parallel_replicate_degree", str(degrees.dp_replicate)),
        *("--parallelism.data_parallel_shard_degree", str(degrees.dp_shard)),
        *("--parallelism.tensor_parallel_degree", str(degrees.tp)),
        *("--parallelism.context_parallel_degree", str(degrees.cp)),
        *("--parallelism.pipeline_parallel_degree", str(degrees.pp)),
        # Two accumulation steps; a pipeline has micro-batches.
        *("--training.local_batch_size", str((18 if degrees.pp == 1 else 36) // degrees.batch_ranks)),
    )


def run(layout: str, name: str, mutate: "partial[None] | None" = None) -> Curve:
    """The curve of this layout, with something done to its code."""
    ranks = parse(layout, RECIPE).ranks
    if "resume" not in layout:
        observed = observe(*overrides(layout), ranks=ranks, steps=STEPS, mutate=mutate)
        return Curve(name, observed.losses, observed.norms[0])
    curve = Curve(name, [], [])
    with tempfile.TemporaryDirectory() as folder:
        words = (*overrides(layout), "--checkpoint.enable", "true")
        for _ in range(STEPS // HALF):
            half = observe(*words, ranks=ranks, steps=HALF, mutate=mutate, folder=folder)
            curve.loss += half.losses
            curve.grad_norm += half.norms[0]
    return curve


@cache
def reference() -> tuple[Curve, dict[str, list[float]]]:
    """One process, and its noise floor."""
    curve = run("one rank", "one rank")
    noise = []
    for disturbance in DISTURBANCES:
        kind, seed = disturbance.split()
        noise.append(run("one rank", disturbance, partial(disturb, kind, int(seed))))
    return curve, noise_floor(curve, noise)


@cache
def measure(fault: Fault | None, layout: str) -> dict[str, Distance]:
    """Loss and gradient norm against one process, with the fault planted or without any."""
    found = run(layout, layout, partial(Fault.plant, fault) if fault else None)
    return distances(found, *reference())


def main() -> int:
    """Print the table; 1 if a fault is not noticed, or if something is where there is none."""
    print("| fault | layout | loss | gradient norm |\n|---|---|---|---|")
    failed = 0
    for fault in FAULTS:
        found = measure(fault, fault.layout)
        cells = [_told(distance) for distance in found.values()]
        print(f"| {fault.name} | {fault.layout} | {' | '.join(cells)} |", flush=True)
        failed += all(distance.leaves_band is None for distance in found.values())
    for layout in dict.fromkeys(fault.layout for fault in FAULTS):
        found = measure(None, layout)
        print(f"| none | {layout} | {' | '.join(_told(distance) for distance in found.values())} |", flush=True)
        failed += any(distance.leaves_band is not None for distance in found.values())
    return min(failed, 1)


def _told(distance: Distance) -> str:
    worst = f"{distance.worst:.2g} x"
    return f"never ({worst})" if distance.leaves_band is None else f"step {distance.leaves_band} ({worst})"


if __name__ == "__main__":
    sys.exit(main())
