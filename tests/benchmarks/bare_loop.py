"""One process of train.py against a bare PyTorch loop over the same model, kernels and batches, interleaved.

python -m tests.benchmarks.bare_loop [--training.seq_len 256 ...]
"""

import statistics
import sys
import tempfile
import time

import torch

import train
from components.config import load_config
from components.launch.ending import leave
from models import MODELS
from parallelize.groups import init_distributed
from tests.small import RECIPE

STEPS, PAIRS = 5, 12


def main(argv: list[str]) -> None:
    torch.set_num_threads(2)
    one_rank = ["--parallelism.data_parallel_replicate_degree", "1", "--training.local_batch_size", "8"]
    config = load_config(["--job.config_file", str(RECIPE), "--job.dump_folder", tempfile.mkdtemp(), *one_rank, *argv])
    run = train.build(config, init_distributed(60))
    batches = train.local_batches(run)

    model_class, flavors = MODELS[config.model.name]
    model = model_class(flavors[config.model.flavor])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    bare_batches = [next(batches) for _ in range(STEPS)]

    def ours() -> None:
        for _ in range(STEPS):
            train.train_step(run, batches, train.divisor(run))

    def bare() -> None:
        for batch in bare_batches:
            optimizer.zero_grad()
            loss = model(batch["tokens"], batch["labels"]) / batch["labels"].numel()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    def seconds(function: object) -> float:
        started = time.perf_counter()
        function()  # type: ignore[operator]
        return (time.perf_counter() - started) / STEPS

    seconds(ours), seconds(bare)
    pairs = [(seconds(ours), seconds(bare)) for _ in range(PAIRS)]
    ratios = sorted(mine / other for mine, other in pairs)
    print(f"train.py {statistics.median(p[0] for p in pairs) * 1e3:.1f} ms a step, bare loop "
          f"{statistics.median(p[1] for p in pairs) * 1e3:.1f} ms; paired ratio {statistics.median(ratios):.3f} "
          f"(quartiles {ratios[PAIRS // 4]:.3f} to {ratios[3 * PAIRS // 4]:.3f})")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
    leave(0)
