"""Seconds per billion parameters of the initialisation, on one thread: python -m tests.benchmarks.init"""

import time

import torch
from torch import nn

from components.state.init import initialize_weights


def main() -> None:
    torch.set_num_threads(1)
    layer = nn.Linear(4096, 14336, bias=False)
    initialize_weights(layer, lambda name: 0.02, seed=0)
    started = time.perf_counter()
    initialize_weights(layer, lambda name: 0.02, seed=1)
    seconds = time.perf_counter() - started
    print(f"{seconds / layer.weight.numel() * 1e9:.1f} seconds per billion parameters")


if __name__ == "__main__":
    main()
