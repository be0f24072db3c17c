"""CPU attention, forward and backward: products and a softmax by blocks against the fused kernel, one thread.

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
        started = time.process_time()
        kernel.attend(q, k, v, visible).sum().backward()
        best = min(best, time.process_time() - started)
    return best * 1e3


def main() -> None:
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        for length in (128, 256, 512, 1024, 2048):
            q, k, v = (torch.randn(4, heads, length, 32, dtype=dtype, requires_grad=True) for heads in (8, 4, 4))
            times = milliseconds("plain", q, k, v), milliseconds("sdpa", q, k, v)
            print(f"{dtype!s:15} {length:5} tokens: by blocks {times[0]:7.2f} ms, fused {times[1]:7.2f} ms")


if __name__ == "__main__":
    main()
