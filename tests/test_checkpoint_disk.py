"""Saves that cannot be written: every rank raises, says which rank failed and why, and nothing older is lost."""

import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from components.state import checkpoint
from tests.checkpoints import checkpointer, load, names, run, saved, value_of
from tests.limits import MOST_IDLE
from tests.processes import small_disk


def _fill_disk(rank: int) -> None:
    """From here on this rank can write no file of more than 3,000 bytes."""
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))


def _save_on_full_disk(folder: Path, rank: int, mode: str, sizes: tuple[int, ...]) -> tuple[str, float, int]:
    """The error, the seconds until it came, and the calls of poll that it took after the save had failed."""
    saver = checkpointer(folder, 20, sizes, async_mode=mode, keep_latest_k=1)
    if rank >= 0:
        _fill_disk(rank)
    started, polls = time.perf_counter(), 0
    try:
        saver.save(20, {})
        saver.poll()
        assert saver._pending is not None
        saver._pending.exception()
        dist.barrier()
        for polls in range(1, 4):  # noqa: B007
            saver.poll()
    except OSError as error:
        return str(error), time.perf_counter() - started, polls
    return "", 0, polls


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_cannot_write_is_reported_by_all_and_nothing_is_lost(
    tmp_path: Path, rank: int, mode: str
) -> None:
    saved(tmp_path, 10, world=2, keep_latest_k=1)
    outcomes = run(_save_on_full_disk, tmp_path, rank, mode, (60, 50, 30), world=2)
    for outcome in outcomes:
        assert outcome.error == ""
        error, seconds, polls = outcome.value
        assert error.startswith(f"{tmp_path}/step-20 could not be saved: rank {rank}: ")
        assert "File too large" in error
        assert f"rank {1 - rank}" not in error
        assert seconds < MOST_IDLE  # and not when the group gives up
        assert polls == (2 if mode == "async" else 0)
    assert names(tmp_path) == {"step-10"}
    assert value_of(load, tmp_path) == 10


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_disk_that_is_full(tmp_path: Path, mode: str) -> None:
    with small_disk(tmp_path / "disk", "100k") as disk:
        saved(disk, 10, world=2)
        for outcome in run(_save_on_full_disk, disk, -1, mode, (160, 150, 30), world=2):
            assert "No space left on device" in outcome.value[0], outcome
        assert names(disk) == {"step-10"}
        assert value_of(load, disk) == 10


def _fail_to_publish(folder: Path, name: str) -> str:
    original = getattr(checkpoint, name)
    calls = []

    def fails(*args: Any) -> Any:
        calls.append(args)
        if args[0].name == "manifest.json" or name == "publish":
            raise OSError(28, "No space left on device")
        return original(*args)

    setattr(checkpoint, name, fails)
    try:
        checkpointer(folder, 20).save(20, {})
    except OSError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["write_json", "publish"])
def test_all_ranks_raise_when_the_first_cannot_publish(tmp_path: Path, name: str) -> None:
    saved(tmp_path, 10, world=2)
    for outcome in run(_fail_to_publish, tmp_path, name, world=2):
        assert outcome.value.endswith("rank 0: [Errno 28] No space left on device"), outcome
    assert names(tmp_path) == {"step-10"}


def _save_apart(folder: Path) -> str:
    """Each rank sees a disk of its own, as on two nodes."""
    saver = checkpointer(folder, 10)
    write = saver._write
    if dist.get_rank() == 1:
        saver._write = lambda staging, tensors: write(folder / "elsewhere", tensors)  # type: ignore[method-assign]
    try:
        saver.save(10, {})
    except OSError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_share_the_folder_are_told_so(tmp_path: Path) -> None:
    for outcome in run(_save_apart, tmp_path, world=2):
        assert "__1_0.distcp" in outcome.value, outcome
        assert "do all ranks see the same folder?" in outcome.value
    assert names(tmp_path) == {"elsewhere"}
