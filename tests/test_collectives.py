"""What data parallel sends, counted in bytes, is what docs/data_parallel.md says; and what a rank keeps."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train
from tests.harness import observe
from tests.test_parallelize_data import GLOBAL_BATCH, LAYOUTS, local_batch

KINDS = {
    "_allgather_base_": "gather",
    "_all_gather_base": "gather",
    "_reduce_scatter_base_": "reduce",
    "allreduce_": "all-reduce",
}


class Traffic(TorchDispatchMode):
    """Bytes of each kind of collective, of the whole buffer that it fills or sums."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = function._schema.name.partition("::")
        if space == "c10d":
            buffer = args[1] if KINDS.get(name) == "reduce" else args[0]
            tensor = buffer[0] if isinstance(buffer, list | tuple) else buffer
            kind = KINDS.get(name, name)
            self.bytes[kind] = self.bytes.get(kind, 0) + tensor.numel() * tensor.element_size()
        return function(*args, **(kwargs or {}))


def count_traffic(run: train.Run) -> dict[str, int]:
    batches = train.micro_batches(run)
    with Traffic() as traffic:
        train.train_step(run, batches, train.valid_tokens(run))
    return traffic.bytes


def parameter_bytes(names: tuple[str, ...] = ("",)) -> int:
    """Of the harness's model, in float32."""
    from models.llama import FLAVORS, Llama

    with torch.device("meta"):
        model = Llama(FLAVORS["tiny"])
    return 4 * sum(p.numel() for name, p in model.named_parameters() if name.startswith(names))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    "layout", ["ddp 2", "fsdp 2 always", "fsdp 2 never", "fsdp 2 default", "fsdp 4 default", "hsdp 2x2"]
)
def test_bytes_of_collectives_are_those_of_the_formulas(layout: str, accumulation: int) -> None:
    """Every size of the harness's model divides by these ranks, so buffers are without padding."""
    ranks, overrides = LAYOUTS[layout]
    observed = observe(*overrides, *local_batch(ranks, accumulation), ranks=ranks, steps=1, at_end=count_traffic).extra
    whole, kept = parameter_bytes(), parameter_bytes(("output", "norm"))
    assert GLOBAL_BATCH % (ranks * accumulation) == 0
    scalars = observed.get("all-reduce", 0) % 64
    if layout == "ddp 2":
        # One gradient sum a step; weights are gathered over a single rank, which moves nothing.
        assert observed["all-reduce"] - scalars == whole
        return
    gathers = {"always": 2 * whole, "never": whole}.get(layout.split()[-1], 2 * whole - kept)
    assert observed["gather"] == pytest.approx(gathers * accumulation)
    assert observed["reduce"] == whole, "once a step, whatever the number of micro-batches"
    replicas = whole // 2 if layout == "hsdp 2x2" else 0
    assert observed.get("all-reduce", 0) - scalars == replicas


@pytest.mark.parametrize(
    ("layout", "share"), [("one", 1), ("ddp 2", 1), ("fsdp 2 default", 2), ("fsdp 4 default", 4), ("hsdp 2x2", 2)]
)
def test_bytes_that_a_rank_keeps(layout: str, share: int) -> None:
    """Weights and two moments, in float32."""
    ranks, overrides = LAYOUTS.get(layout, (1, ()))
    kept = observe(*overrides, *local_batch(ranks, 1), ranks=ranks, steps=1, at_end=count_kept).extra
    assert kept == 3 * parameter_bytes() // share


def count_kept(run: train.Run) -> int:
    moments = [state[name] for state in run.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    tensors = [value.to_local() if hasattr(value, "to_local") else value for value in (*run.parameters, *moments)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
