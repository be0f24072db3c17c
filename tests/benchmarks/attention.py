"""CPU attention, forward and backward: two products and a softmax against the fused kernel, by length and precision.

python -m tests.benchmarks.attention       what models/attention.py chooses by
"""

import time

import torch
from torch import Tensor

from models.attention import KERNELS, Visible


def milliseconds(name: str, q: Tensor, k: Tensor, v: Tensor) -> float:
    kernel, best = KERNELS[name], float("inf")
    visible = kernel.prepare(Visible(q.shape[2], k.shape[2], q.device))
    for _ in range(6):
        started = time.perf_counter()
        kernel.attend(q, k, v, visible).sum().backward()
        best = min(best, time.perf_counter() - started)
    return best * 1e3


def main() -> None:
    torch.set_num_threads(2)
    for dtype in (torch.float32, torch.bfloat16):
        for length in (128, 256, 512, 1024):
            q, k, v = (torch.randn(4, heads, length, 32, dtype=dtype, requires_grad=True) for heads in (8, 4, 4))
            times = milliseconds("plain", q, k, v), milliseconds("sdpa", q, k, v)
            print(f"{dtype!s:15} {length:5} tokens: plain {times[0]:7.2f} ms, fused {times[1]:7.2f} ms")


if __name__ == "__main__":
    main()
