"""Process groups as torch makes them for a rank: each with one worker thread, on the interface that was asked for."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import train
from tests.harness import observe

SHARDED = ("--parallelism.tensor_parallel_degree", "2", "--parallelism.data_parallel_shard_degree", "1")


def gloo_options(run: train.Run) -> list[tuple[int, timedelta]]:
    """Worker threads and time-out of every group of this rank, the checkpointer's too; training's come first."""
    training = {dist.group.WORLD, *run.mesh.groups().values()}
    groups = sorted(dist.distributed_c10d._world.pg_map, key=lambda group: group not in training)
    options: list[Any] = [group._get_backend(torch.device("cpu")).options for group in groups]
    return [(option._threads, option._timeout) for option in options]


def test_no_group_has_two_worker_threads_and_training_s_have_its_timeout() -> None:
    """Two note what they finished in one string, and free its memory twice: python -m tests.heap."""
    options = observe(*SHARDED, "--comm.init_timeout_seconds", "77", ranks=2, steps=1, at_end=gloo_options).extra
    assert len(options) > 2
    assert {threads for threads, _ in options} == {1}
    assert options[0][1] == timedelta(seconds=77)
    assert options[-1][1] == timedelta(hours=1)


def timeouts(run: train.Run) -> dict[str, timedelta]:
    """Of the groups of this rank, by dimension."""
    groups = run.mesh.groups().items()
    return {name: group._get_backend(torch.device("cpu")).options._timeout for name, group in groups}


def test_groups_of_experts_have_the_timeout_of_the_first_step() -> None:
    experts = ("--model.name", "qwen3_moe", "--parallelism.expert_parallel_degree", "2")
    given = (*experts, "--training.local_batch_size", "18", "--comm.init_timeout_seconds", "77")
    found = observe(*given, ranks=2, steps=1, at_end=timeouts).extra
    assert found.keys() >= {"ep", "efsdp", "holders"}
    assert {*found.values()} == {timedelta(seconds=77)}


def gloo_schedulers(run: train.Run) -> list[int]:
    """Of the threads that read what other ranks send."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() == "gloo_tcp_loop\n"]
    return [os.sched_getscheduler(int(task.name)) for task in tasks]


def test_a_message_does_not_preempt_who_holds_the_connection() -> None:
    assert observe(*SHARDED, ranks=2, steps=1, at_end=gloo_schedulers).extra == [os.SCHED_BATCH]


def test_the_interface_that_is_asked_for_is_taken() -> None:
    observe(*SHARDED, ranks=2, steps=1, environment={"GLOO_SOCKET_IFNAME": "lo"})
    with pytest.raises(RuntimeError, match="Unable to find address for: nowhere"):
        observe(*SHARDED, ranks=2, steps=1, environment={"GLOO_SOCKET_IFNAME": "lo,nowhere"})
