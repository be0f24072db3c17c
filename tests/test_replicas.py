"""Ranks that should hold the same bits: compared, and the one that differs is named before anything is saved."""

import contextlib
import functools
import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import train
from components.launch.exit_codes import ExitCode
from components.observe.replicas import Replicas, column_sums, mix, suspects
from parallelize.sharding import local_part
from tests.harness import observe, rewrite
from tests.test_guards import train_to_the_end
from tests.test_parallelize_data import LAYOUTS as DATA
from tests.test_parallelize_data import MORE_LAYOUTS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
@pytest.mark.parametrize("shape", [(), (5,), (1024,), (41, 77)])
def test_any_flipped_bit_changes_the_hash(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = [torch.randn(shape).mul(50).to(dtype) for _ in range(3)]

    def hashed() -> int:
        return int(mix(torch.stack([column_sums(tensor) for tensor in tensors])))

    before, size = hashed(), tensors[0].element_size()
    found = set()
    for tensor in tensors:
        pattern = tensor.reshape(-1).view(torch.uint8)
        for place in {0, len(pattern) // 2, len(pattern) - size} | {len(pattern) - 1}:
            for bit in range(8):
                pattern[place] ^= 1 << bit
                found.add(hashed())
                pattern[place] ^= 1 << bit
    assert hashed() == before
    assert before not in found
    assert mix(torch.zeros(0, 1024, dtype=torch.int64)) == mix(column_sums(torch.zeros(0))[None]) == 0


def test_the_rank_that_differs_is_found() -> None:
    assert suspects([{0: 5, 2: 5, 4: 6, 6: 5}]) == [4]
    assert suspects([{0: 5, 1: 6}]) == [0, 1], "of two either may be wrong"
    assert suspects([{0: 5, 2: 6}, {2: 6, 3: 7}]) == [2], "in two dimensions"
    assert suspects([{0: 5, 1: 5, 2: 6}, {3: 5, 4: 5, 5: 6}]) == [2, 5]


FLIPS = {
    "ddp 2": ([0, 1], "wq.weight"),
    "ddp 3": ([1], "wq.weight"),
    "tp 2": ([0, 1], "norm.weight"),
    "hsdp 2x2": ([1, 3], "wq.weight (exp_avg_sq)"),
    "fsdp 2 default": ([0, 1], "wq.weight (step)"),
    "ddp 2 tp 2": ([1], "norm.weight"),
}
"""Layout -> who is named after rank 1 has flipped a bit, and in what: a weight, a moment, the count of steps."""


def flip_and_compare(label: str, run: train.Run) -> tuple[str, list]:
    """What is said, after nothing was said of the run as it is."""
    replicas = Replicas(2, run.stages, run.optimizer, run.mesh, run.device, run.averages.kept)
    replicas.check(2, saving=False)
    if dist.get_rank() == 1:
        tensor = next(tensor for name, _, tensor in replicas._held() if name.endswith(label))
        local_part(tensor)[1].view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    replicas.check(3, saving=False)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as stopped:
        replicas.check(4, saving=False)
    return said.getvalue(), [stopped.value.code, run.mesh.peers("tp"), run.mesh.peers("pp")]


@pytest.mark.parametrize("layout", FLIPS)
def test_a_flipped_bit_is_found_and_the_rank_named(layout: str) -> None:
    if layout == "ddp 2 tp 2":
        ranks, overrides = 4, (*DATA["ddp 2"][1], "--parallelism.tensor_parallel_degree", "2")
    else:
        ranks, overrides = MORE_LAYOUTS[layout]
    named, label = FLIPS[layout]
    observed = observe(
        *overrides,
        *("--training.local_batch_size", "3"),
        ranks=ranks,
        steps=2,
        at_end=functools.partial(flip_and_compare, label),
    )
    said, (code, tensor, stages) = observed.extra
    assert code == ExitCode.CORRUPT
    assert [rank for rank in range(ranks) if f"rank {rank} on " in said] == named, said
    assert label in said
    assert stages == [[rank] for rank in range(ranks)]
    assert tensor == ([[0, 1], [2, 3]] if layout == "ddp 2 tp 2" else [[0, 1]] if layout == "tp 2" else stages)


def test_a_router_is_compared_on_all_ranks() -> None:
    """Every rank has the whole of it, also where weights are shards."""
    layout = ("--model.name", "qwen3_moe", "--parallelism.data_parallel_shard_degree", "2")
    observed = observe(
        *(*layout, "--training.local_batch_size", "18"),
        ranks=2,
        steps=2,
        at_end=functools.partial(flip_and_compare, "router.weight"),
    )
    said, (code, *_) = observed.extra
    assert code == ExitCode.CORRUPT
    assert "router.weight" in said


def test_a_run_stops_before_it_saves(tmp_path: Path) -> None:
    """A bit flips in step 3; the next comparison would be at step 10, but step 4 is to be saved."""
    flip = "[parameter.data.to_local().view(-1)[:1].view(torch.int32).bitwise_xor_(1) for parameter in run.parameters]"
    fault = functools.partial(
        rewrite,
        *("train", "train_step", "update(run.optimizer, lr, accepted)"),
        f"update(run.optimizer, lr, accepted); run.step == 3 and dist.get_rank() == 1 and {flip}",
    )
    observed = observe(
        *("--job.dump_folder", str(tmp_path), "--checkpoint.enable", "true", "--checkpoint.interval", "2"),
        *("--debug.check_replicas_freq", "10", "--training.local_batch_size", "18", *DATA["ddp 2"][1]),
        ranks=2,
        steps=0,
        mutate=fault,
        at_end=train_to_the_end,
    )
    assert observed.extra[0] == (ExitCode.CORRUPT, 4, [2], 0)
