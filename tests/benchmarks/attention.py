"""CPU attention, forward and backward: two products and a softmax against the fused kernel, by length and precision.

python -m tests.benchmarks.attention       what models/layers.py chooses by
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers import _plain_attention


def milliseconds(attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> float:
    best = float("inf")
    for _ in range(6):
        started = time.perf_counter()
        attention(q, k, v).sum().backward()
        best = min(best, time.perf_counter() - started)
    return best * 1e3


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _plain_attention(q, k, v, None)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def main() -> None:
    torch.set_num_threads(2)
    for dtype in (torch.float32, torch.bfloat16):
        for length in (128, 256, 512, 1024):
            q, k, v = (torch.randn(4, heads, length, 32, dtype=dtype, requires_grad=True) for heads in (8, 4, 4))
            times = milliseconds(plain, q, k, v), milliseconds(fused, q, k, v)
            print(f"{dtype!s:15} {length:5} tokens: plain {times[0]:7.2f} ms, fused {times[1]:7.2f} ms")


if __name__ == "__main__":
    main()
