"""A step on fake CUDA tensors mixes no devices, and the host waits for nothing in a step that does not log."""

import os
import shutil
from functools import cache

import pytest
import torch

from tests.fake_cuda import Case, findings
from tests.planted import ONLY_PLANTS

pytestmark = [
    pytest.mark.skipif(
        torch.version.cuda is not None or shutil.which("g++") is None, reason="a CPU build of torch and g++ are needed"
    ),
    pytest.mark.slow,  # the first test compiles, and runs the cases of all
]

BFLOAT16 = ("--training.mixed_precision_param", "bfloat16")
DOCUMENTS = ("--training.document_mask", "true")
ACCUMULATION = ("--training.local_batch_size", "3")
SPIKES = ("--training.skip_spikes_sigma", "6")
PER_OPERATION = ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op")
REPLICATE, SHARD, TP, CP, PP, METHOD = (
    f"--parallelism.{axis}"
    for axis in (
        *("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree"),
        *("context_parallel_degree", "pipeline_parallel_degree", "context_parallel_method"),
    )
)
ONE = (*BFLOAT16, *DOCUMENTS, *ACCUMULATION, *SPIKES)
ROTATE = "--parallelism.context_parallel_rotate_method"
ULYSSES = (CP, "2", METHOD, "ulysses")
OFFLOADED = ("--activation_checkpoint.mode", "full", "--activation_checkpoint.offload", "true")
STATES = ("--optimizer.state_offload", "true")
DYNAMICS = ("--metrics.dynamics_freq", "1")
MUON = ("--optimizer.name", "Muon")
ROUNDED = ("--training.dtype", "bfloat16", "--optimizer.state_dtype", "int8")
LAYOUTS = {
    "one": Case(ONE),
    "hsdp tp": Case((REPLICATE, "2", SHARD, "2", TP, "2", *ACCUMULATION, *BFLOAT16, *PER_OPERATION), 8),
    "ulysses": Case(ULYSSES, 2),
    "allgather": Case((CP, "2", METHOD, "allgather_kv", *DOCUMENTS), 2),
    "ring": Case((CP, "2", *BFLOAT16, *ACCUMULATION), 2),
    "ring, neighbours": Case((CP, "2", *BFLOAT16, ROTATE, "alltoall", *PER_OPERATION), 2),
    "pp": Case((PP, "2"), 2),
    "longrope": Case(("--model.name", "phi3", *BFLOAT16)),
    "offloaded, rounded": Case((*BFLOAT16, *OFFLOADED, *ROUNDED)),
    "offloaded, tp": Case((TP, "2", *OFFLOADED), 2),
    "weights on the host": Case((*BFLOAT16, *SPIKES, "--training.enable_cpu_offload", "true", *DYNAMICS)),
    "states on the host": Case((*BFLOAT16, *STATES)),
    "states on the host, rounded, fsdp": Case((SHARD, "2", *STATES, *ROUNDED), 2),
    "states on the host, tp": Case((TP, "2", *STATES), 2),
    "Muon's states on the host": Case((*STATES, *MUON)),
}
FAULTS = {
    "an index made on the host": (
        Case(
            ULYSSES,
            2,
            (
                "parallelize.context",
                "sequence_order",
                "torch.cat([*pieces[::2], *reversed(pieces[1::2])], dim)",
                "tensor.index_select(dim, torch.arange(tensor.shape[dim]).to(tensor.device))",
            ),
        ),
        "copy from cpu to cuda:0, in sequence_order",
    ),
    "an input of a layer that the host waits for": (
        Case(OFFLOADED, 1, ("parallelize.activation", "_to_host", "tensor, non_blocking=True", "tensor")),
        "copy from cuda:0 to cpu, in _to_host",
    ),
    "states that the host waits for": (
        Case(STATES, 1, ("components.optim.visits", "Visits._bring", "home, non_blocking=True", "home")),
        "copy from cpu to cuda:0, in _bring",
    ),
    "states that the host waits to have back": (
        Case(STATES, 1, ("components.optim.visits", "Visits._return", "here, non_blocking=True", "here")),
        "copy from cuda:0 to cpu, in _return",
    ),
    "a number read on the host": (
        Case(ONE, 1, ("parallelize.runner", "Whole.forward_backward", "loss.detach()", "loss.item()")),
        "DataDependentOutputException: aten._local_scalar_dense.default, in forward_backward",
    ),
    "a list copied from the host": (
        Case(
            ("--model.name", "phi3"),
            1,
            (
                "models.rotary",
                "rotary_frequencies",
                "torch.cat([torch.full((1,), factor, device=device) for factor in factors])",
                "torch.tensor(factors).to(device)",
            ),
        ),
        "copy from cpu to cuda:0, in rotary_frequencies",
    ),
    "a tensor on the host": (
        Case(ONE, 1, ("models.rotary", "rotary_frequencies", "32, device=device) /", '32, device="cpu") /')),
        "at least two devices, cuda:0 and cpu!, in rotary_cos_sin",
    ),
}


@cache
def all_findings() -> dict[str, list[str]]:
    cases = {name: case for name, (case, _) in FAULTS.items()}
    cases |= {} if ONLY_PLANTS in os.environ else LAYOUTS
    return dict(zip(cases, findings(*cases.values()), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_host_waits_once_in_a_save_alone_and_devices_are_not_mixed(layout: str) -> None:
    """Weights on the host are not copied for a save, but updated by the host."""
    waits = "copy from cuda:0 to cpu, in update" if layout == "weights on the host" else "synchronize, in of"
    assert all_findings()[layout] == [waits]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    found = all_findings()[fault]
    assert any(line.endswith(FAULTS[fault][1]) for line in found), found
