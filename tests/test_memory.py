"""Peak memory of a training step on a rank, counted, is what docs/data_parallel.md says."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from models.llama import FLAVORS, Llama
from tests.harness import observe
from tests.test_parallelize_data import LAYOUTS


class Memory(TorchDispatchMode):
    """Bytes of all live tensors, after each operation. Sizes are asked anew each time: FSDP resizes its buffers."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self.live: dict[int, StorageWeakRef] = {}
        self.peak = 0
        self.keep(tensors)

    def keep(self, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                storage = getattr(value, "_local_tensor", value).untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage)

    def bytes(self) -> int:
        self.live = {key: ref for key, ref in self.live.items() if not ref.expired()}
        return sum(torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes() for ref in self.live.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.keep(result)
        self.peak = max(self.peak, self.bytes())
        return result


def count_peak(run: train.Run) -> int:
    """Bytes at the highest point of a step, after the first step has made the optimizer's state."""
    batches, moments = train.micro_batches(run), [list(state.values()) for state in run.optimizer.state.values()]
    with Memory([run.parameters, moments]) as memory:
        train.train_step(run, batches, train.valid_tokens(run))
    return memory.peak


def group_bytes() -> dict[str, int]:
    """Weights that are gathered together, of the model that these tests use, in float32."""
    with torch.device("meta"):
        model = Llama(FLAVORS["deep"])
    sizes: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        group = parts[0] if parts[0] != "layers" else f"layers.{parts[1]}"
        sizes[group] = sizes.get(group, 0) + 4 * parameter.numel()
    return sizes


@pytest.mark.parametrize("layout", ["one", "ddp 4", "fsdp 4 always", "fsdp 4 never"])
def test_peak_memory_is_that_of_the_formula(layout: str) -> None:
    """Weights, gradients and two moments, in shards; what is gathered; and the gradient and reduce buffer of a group.

    One sequence of eight tokens: activations are a few per cent.
    """
    ranks, overrides = LAYOUTS.get(layout, (1, ()))
    few_tokens = ("--model.flavor", "deep", "--training.seq_len", "8", "--training.global_batch_size", "4")
    peak = observe(
        *(*few_tokens, "--training.local_batch_size", "1", *overrides), ranks=ranks, steps=1, at_end=count_peak
    ).extra
    groups = group_bytes()
    whole, largest = sum(groups.values()), max(groups.values())
    expected = {
        "one": 4 * whole,
        "ddp 4": 4 * whole + 2 * largest,
        "fsdp 4 always": 4 * whole / 4 + largest + 2 * largest,
        "fsdp 4 never": 4 * whole / 4 + whole + 2 * largest,
    }[layout]
    assert peak == pytest.approx(expected, rel=0.1)
