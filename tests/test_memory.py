"""Peak memory of a training step on a rank, counted, is what docs/data_parallel.md says."""

import platform
import subprocess
import sys

import pytest
import torch

import train
from components.commands.dry_run import Meter
from components.config import ROOT
from models.llama import FLAVORS, Llama
from tests.harness import observe
from tests.test_parallelize_data import LAYOUTS


def count_peak(run: train.Run) -> int:
    """Bytes at the highest point of a step, after the first step has made the optimizer's state."""
    batches, moments = train.local_batches(run), [list(state.values()) for state in run.optimizer.state.values()]
    with Meter(None, [run.parameters, moments]) as memory:
        train.train_step(run, batches, train.divisor(run))
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
    batch = next(train.local_batches(run))
    with Meter(None, [run.parameters, batch]) as memory:
        before = memory.bytes
        loss = run.stages[0](**train.own_part(run, batch))
        return memory.bytes - before + 0 * loss.numel()  # alive until here


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
    # A layer: two norms, queries, keys and values before and after rotation, attention, gate, product. Then the loss,
    # which has worked out its gradients of hidden states and of the head.
    layer = 8 * sizes.dim + 3 * kv_dim + 4 * sizes.ffn_dim
    whole = 4 * tokens * (sizes.n_layers * layer + 3 * sizes.dim)
    head = 4 * sizes.vocab_size * sizes.dim / (4 if layout == "tp 4" else 1)
    gathered = {
        "tp 4": 4 * tokens * (2 * sizes.n_layers + 1) * sizes.dim,  # what matrices take
        "cp 4 allgather_kv": 4 * tokens * sizes.n_layers * 2 * kv_dim,
    }.get(layout, 0)
    # Both pieces of a rank's queries have a result of their own, which are then joined.
    joined = 4 * tokens * sizes.n_layers * sizes.dim / 4 if layout == "cp 4 allgather_kv" else 0
    expected = head + joined + (whole if layout == "one" else whole / 4 + 3 / 4 * gathered)
    assert found == pytest.approx(expected, rel=0.15), found / expected


FAULTS = """
import resource, torch
from components.launch.memory import keep_freed_memory
keep_freed_memory()
torch.set_num_threads(1)
for number in range(30):
    if number == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(6 * 2**20) for _ in range(4)]  # 24 MiB each
    del tensors
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have their own ways")
def test_freed_memory_is_not_paid_for_again() -> None:
    """Four tensors of 6,144 pages each, made and freed over and over; otherwise 12,000 faults in most runs."""
    done = subprocess.run([sys.executable, "-c", FAULTS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100
