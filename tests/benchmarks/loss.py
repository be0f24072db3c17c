"""Cross-entropy by chunks of tokens against whole logits: peak memory and time of forward and backward on CPU.

python -m tests.benchmarks.loss
"""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import models.loss
from components.commands.dry_run import Meter
from components.launch.memory import keep_freed_memory
from models.loss import chunk_loss, linear_loss, softmax
from models.objective import OBJECTIVES

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
NEXT_TOKEN = partial(chunk_loss, softmax=softmax, terms=OBJECTIVES["next_token"].terms)


def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).flatten(0, 1).float(), labels.flatten(), reduction="sum")


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    (loss,) = linear_loss(hidden, weight, labels, NEXT_TOKEN)
    return loss


def peak_bytes(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor) -> int:
    """The most bytes of tensors that forward and backward (where a gradient is asked for) have at once."""
    hidden.grad = weight.grad = None
    with Meter(None) as memory:
        value = loss(hidden, weight, labels)
        if value.requires_grad:
            value.backward()
    return memory.peak


def milliseconds(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor) -> float:
    hidden.grad = weight.grad = None
    started = time.perf_counter()
    loss(hidden, weight, labels).backward()
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    torch.set_num_threads(2)
    keep_freed_memory()
    models.loss.CHUNK["cpu"] = 256, 0
    for vocabulary, dim, tokens in ((4096, 256, 2048), (32_768, 256, 2048), (131_072, 128, 1024)):
        for dtype in (torch.float32, torch.bfloat16):
            hidden = torch.randn(1, tokens, dim, dtype=dtype, requires_grad=True)
            weight = (torch.randn(vocabulary, dim) * 0.02).to(dtype).requires_grad_()
            labels = torch.randint(0, vocabulary, (1, tokens))
            memory = [peak_bytes(loss, hidden, weight, labels) for loss in (whole, chunked)]
            print(
                f"{vocabulary:7} x {dim}, {tokens} tokens, {dtype!s:14}: memory {memory[1] / memory[0]:.2f} x", end=""
            )
            for chunk in (128, 256, 512, 1024):
                models.loss.CHUNK["cpu"] = chunk, 0
                # In turns, so that both meet the same load.
                times = [
                    (milliseconds(whole, hidden, weight, labels), milliseconds(chunked, hidden, weight, labels))
                    for _ in range(5)
                ]
                plain, ours = (min(column) for column in zip(*times, strict=True))
                print(f", {chunk} tokens {ours / plain:.2f} x time", end="")
            models.loss.CHUNK["cpu"] = 256, 0
            print(flush=True)


if __name__ == "__main__":
    main()
