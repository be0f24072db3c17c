"""What sampling training dynamics costs: a sampled step against one that is not, in turns.

python -m tests.benchmarks.dynamics         one process, and two ranks with replicas

The debug model, 8 sequences of 256 tokens a step. Processor time of rank 0, so that other work does not count.
"""

import statistics
import time

import train
from tests.harness import observe

MODEL = (
    *("--model.flavor", "debug", "--training.seq_len", "256", "--training.global_batch_size", "8"),
    *("--training.local_batch_size", "4", "--metrics.dynamics_freq", "2"),
)
LAYOUTS = {"one process": (1, ()), "ddp 2": (2, ("--parallelism.data_parallel_replicate_degree", "2"))}
PAIRS = 12


def measure(run: train.Run) -> list[float]:
    """For each pair of steps, the time of the sampled one over that of the other."""
    batches, ratios = train.local_batches(run), []
    for _ in range(PAIRS):
        seconds = []
        for _ in range(2):
            started = time.process_time()
            train.train_step(run, batches, train.divisor(run))
            if run.dynamics.sampled:
                run.dynamics.tables()
            seconds.append(time.process_time() - started)
        ratios.append(seconds[1] / seconds[0])
    return ratios


def main() -> None:
    for layout, (ranks, overrides) in LAYOUTS.items():
        ratios = observe(*MODEL, *overrides, ranks=ranks, steps=2, at_end=measure).extra
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{layout:12} a sampled step takes {middle:.2f} x as long (quartiles {low:.2f} to {high:.2f}); ", end="")
        print(f"every tenth: {1 + (middle - 1) / 10:.3f}", flush=True)


if __name__ == "__main__":
    main()
