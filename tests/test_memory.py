"""Peak memory of a training step on a rank, counted, is what docs/data_parallel.md says."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
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
        # Another thread may free one in between.
        storages = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.live.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as what it does to local tensors
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


def count_activations(run: train.Run) -> int:
    """Bytes that a forward leaves behind for its backward."""
    batch = next(train.micro_batches(run))
    with Memory([run.parameters, batch]) as memory:
        before = memory.bytes()
        loss = run.stages[0](**train.own_part(run, batch))
        return memory.bytes() - before + 0 * loss.numel()  # alive until here


LONG = (
    *("--model.flavor", "deep", "--training.seq_len", "512", "--training.global_batch_size", "1"),
    *("--training.local_batch_size", "1", "--parallelism.data_parallel_shard_degree", "1"),
    *("--parallelism.fsdp_reshard_after_forward", "always"),
)


@pytest.mark.parametrize("layout", ["one", "tp 4", "cp 4 ring", "cp 4 ulysses", "cp 4 allgather_kv"])
def test_activations_are_those_of_the_formula(layout: str) -> None:
    """All is split by tp, with sequence parallel, or by cp; but for what ranks gather and keep for backward."""
    axis, _, method = layout.partition(" 4 ")
    settings = {
        "one": (),
        "tp 4": ("--parallelism.tensor_parallel_degree", "4"),
        "cp": ("--parallelism.context_parallel_degree", "4", "--parallelism.context_parallel_method", method),
    }[axis]
    found = observe(*LONG, *settings, ranks=4 if settings else 1, steps=1, at_end=count_activations).extra
    sizes, tokens = FLAVORS["deep"], 512
    kv_dim = sizes.n_kv_heads * sizes.head_dim
    # A layer: two norms, queries, keys and values before and after rotation, attention, gate, product. Then the loss.
    layer = 8 * sizes.dim + 3 * kv_dim + 4 * sizes.ffn_dim
    whole = 4 * tokens * (sizes.n_layers * layer + 2 * sizes.dim + sizes.vocab_size)
    gathered = {
        "tp 4": 4 * tokens * (2 * sizes.n_layers + 1) * sizes.dim,  # what matrices take
        "cp 4 allgather_kv": 4 * tokens * sizes.n_layers * 2 * kv_dim,
    }.get(layout, 0)
    expected = whole if layout == "one" else whole / 4 + 3 / 4 * gathered
    assert found == pytest.approx(expected, rel=0.15)
