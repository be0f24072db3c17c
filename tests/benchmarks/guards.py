"""What the guards cost, as a part of the processor time of a step of the debug recipe.

python -m tests.benchmarks.guards         one process, and two ranks with replicas

The debug model, 8 sequences of 256 tokens a step. Steps and guards are measured in turns; processor time of rank 0.
"""

import statistics
import time
from collections.abc import Callable

import torch

import train
from components.config import Training
from components.observe.guards import Guards
from components.observe.hang import HangWatch
from components.observe.replicas import Replicas
from components.observe.stragglers import Stragglers
from parallelize.sharding import poison_if_not_finite
from tests.harness import observe

MODEL = (
    *("--model.flavor", "debug", "--training.seq_len", "256", "--training.global_batch_size", "8"),
    *("--training.local_batch_size", "4"),
)
LAYOUTS = {"one process": (1, ()), "ddp 2": (2, ("--parallelism.data_parallel_replicate_degree", "2"))}
ROUNDS, EVERY = 5, 100
"""EVERY: steps between two comparisons of replicas."""


def seconds(work: Callable[[], object], times: int = 1) -> float:
    started = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - started) / times


def measure(run: train.Run) -> dict[str, float]:
    """Seconds of a step, and of what each guard adds to it; medians."""
    batches, loss = train.local_batches(run), torch.ones((), requires_grad=True)
    kinds = {sigma: Training(skip_spikes_sigma=sigma) for sigma in (0.0, 6.0)}
    plain, spikes = (Guards(kind, run.guards.dump_folder, run.mesh, run.device) for kind in kinds.values())
    replicas = Replicas(1, run.stages, run.optimizer, run.mesh, run.device)
    stragglers, watch = Stragglers(run.mesh), HangWatch(run.mesh)
    norm, tensor = torch.ones(()), torch.ones(1000)

    def judge(guards: Guards) -> None:
        guards.judge(1, 0, loss.detach(), norm, [])
        guards.check(lambda position: train.local_order(run, position), run.stages, now=False)

    def poison() -> None:
        poison_if_not_finite(loss).backward()

    def step() -> None:
        train.train_step(run, batches, train.divisor(run))

    def watched_step() -> None:
        with stragglers.watched(logged=True):
            step()

    group = run.mesh["tp"].get_group()  # of this rank alone: nobody is waited for
    parts: dict[str, Callable[[], float]] = {
        "step": lambda: seconds(step),
        "step, logged": lambda: seconds(watched_step),
        "not finite": lambda: seconds(lambda: judge(plain), 50) + run.accumulation_steps * seconds(poison, 50),
        "not finite, without": lambda: (
            seconds(lambda: norm.isfinite(), 50) + run.accumulation_steps * seconds(loss.backward, 50)
        ),
        "not finite and spikes": lambda: (
            seconds(lambda: judge(spikes), 50) + run.accumulation_steps * seconds(poison, 50)
        ),
        f"replicas, every {EVERY}": lambda: seconds(lambda: replicas.check(1, saving=False)) / EVERY,
        "records, every 10 s": lambda: (
            seconds(lambda: watch._recorded(), 5) if run.mesh.degrees.world_size > 1 else 0.0
        ),
        "a collective": lambda: seconds(lambda: torch.distributed.all_reduce(tensor, group=group), 50),
    }
    taken: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(ROUNDS):
        for name, part in parts.items():
            taken[name].append(part())
    return {name: statistics.median(each) for name, each in taken.items()}


def main() -> None:
    for layout, (ranks, overrides) in LAYOUTS.items():
        given = {"ranks": ranks, "steps": 1, "at_end": measure}
        found = observe(*MODEL, *overrides, **given).extra
        without = observe(*MODEL, *overrides, environment={"TORCH_FR_BUFFER_SIZE": "0"}, **given).extra
        step = found["step"]
        print(f"{layout}: a step takes {step * 1e3:.0f} ms of processor time")
        for name in ("not finite", "not finite and spikes"):
            print(f"  {name:28} {(found[name] - found['not finite, without']) / step:.3%}")
        for name in (f"replicas, every {EVERY}", "records, every 10 s"):
            print(f"  {name:28} {found[name] / step:.3%}" + (" of one step" if "records" in name else ""))
        recorded = found["a collective"] - without["a collective"]
        print(f"  {'a record of a collective':28} {recorded / step:.4%}")
        print(f"  {'own time, a logged step':28} {found['step, logged'] / step - 1:.3%}", flush=True)


if __name__ == "__main__":
    main()
