"""What the average of the weights costs, as a part of the processor time of a step of the debug recipe.

python -m tests.benchmarks.averages

The debug model, 8 sequences of 256 tokens a step, one thread. A step and the update of the average are measured in
turns; processor time, so that other work does not count.
"""

import statistics
import time

import torch

import train
from tests.harness import observe

MODEL = (
    *("--model.flavor", "debug", "--training.seq_len", "256", "--training.global_batch_size", "8"),
    *("--training.local_batch_size", "4", "--averages.ema_decay", "0.999", "--checkpoint.enable", "true"),
)
ROUNDS = 9


def measure(run: train.Run) -> list[tuple[float, float]]:
    """(seconds of a step without the average, seconds of the average's update), in turns."""
    batches, found, decay = train.local_batches(run), [], run.averages.decay
    accepted = torch.tensor(True)
    for _ in range(ROUNDS):
        run.averages.decay = 0.0
        started = time.process_time()
        train.train_step(run, batches, train.divisor(run))
        middle = time.process_time()
        run.averages.decay = decay
        run.averages.update(run.step, accepted)
        found.append((middle - started, time.process_time() - middle))
    return found


def main() -> None:
    steps, updates = zip(*observe(*MODEL, steps=2, at_end=measure).extra, strict=True)
    shares = statistics.quantiles([update / step for step, update in zip(steps, updates, strict=True)], n=4)
    low, middle, high = (f"{share:.2%}" for share in shares)
    step, update = (statistics.median(each) * 1e3 for each in (steps, updates))
    print(f"a step takes {step:.0f} ms, the update of the average {update:.2f} ms: {middle} ({low} to {high})")


if __name__ == "__main__":
    main()
