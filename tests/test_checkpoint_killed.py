"""A rank is killed at each write, fsync and rename of a save, or power is lost: the last good step is resumed from."""

import io
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from components.state import checkpoint
from tests.checkpoints import checkpointer, content, fork_ranks, names, nursery, save, small, value_of


class Killer:
    """Ends the process at the n-th thing that it does to the disk; a write is ended half-way through."""

    def __init__(self, at: int) -> None:
        self.at, self.count, self.armed = at, 0, False
        self.seen: list[str] = []
        sync, self.open = os.fsync, io.open
        os.fsync = lambda descriptor: (self.tick("fsync"), sync(descriptor))[1]  # type: ignore[assignment]
        io.open = self._open  # type: ignore[assignment]
        sys.addaudithook(self._hook)

    def tick(self, what: str) -> bool:
        """True if the process has to end now, for a caller that wants to do that itself."""
        if not self.armed:
            return False
        self.count += 1
        self.seen.append(what)
        if self.count == self.at and what != "write":
            os._exit(9)
        return self.count == self.at

    def _hook(self, event: str, args: tuple) -> None:
        if event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove"):
            self.tick(f"{event} {args[0]}")

    def _open(self, path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "w" not in mode:
            return self.open(path, mode, *args, **options)
        raw = io.BufferedWriter(_Writes(path, self))
        return raw if "b" in mode else io.TextIOWrapper(raw)


class _Writes(io.FileIO):
    def __init__(self, path: Any, killer: Killer) -> None:
        super().__init__(path, "w")
        self.killer = killer

    def write(self, data: Any) -> int:
        if self.killer.tick("write"):
            super().write(bytes(data)[: len(data) // 2])
            os._exit(9)
        return super().write(data)


def _save_and_die(folder: Path, step: int, rank: int, at: int, mode: str) -> list[str]:
    """Save a step, on a disk that kills this rank at the `at`-th operation; what was done to the disk, if it lives."""
    killer = Killer(at if dist.get_rank() == rank else -1)
    saver = checkpointer(folder, step, async_mode=mode, keep_latest_k=2)
    killer.armed = True
    # A step that is saved again holds something else: so that a mix of both would be seen.
    saver.save(step, {"sequences": step * 7})
    saver.wait()
    return killer.seen


def _sweep(folder: Path, world: int, step: int, before: tuple[int, ...], mode: str) -> tuple[list[int], list[str]]:
    """Kill each rank at each operation of saving `step`. Returns how many kills of each, and every wrong resume."""
    template = folder / "template"
    fork_ranks(1, save, template, *before)
    if step in before:  # other bits than those that the step is saved with now
        old = template / f"step-{step}"
        other = folder / "other"
        fork_ranks(1, _save_other, other, step)
        shutil.rmtree(old)
        (other / f"step-{step}").rename(old)
    kills, wrong = [0] * world, []
    for rank in range(world):
        for at in range(1, 1000):
            target = folder / f"rank {rank} at {at}"
            shutil.copytree(template, target)
            outcomes = fork_ranks(world, _save_and_die, target, step, rank, at, mode)
            alive = outcomes[rank].code == 0
            if not alive and outcomes[rank].code != 9:
                wrong.append(f"{target.name}: {outcomes[rank].error}")
            kills[rank] += not alive
            found = fork_ranks(1, _load_either, target, max(before), step)[0]
            if found.code or (alive and found.value != "new"):
                wrong.append(f"{target.name}: {found.error or found.value} {found.printed}")
            if "passed over" in found.printed:
                wrong.append(f"{target.name}: published before it was whole: {found.printed}")
            if not all(re.fullmatch(r"step-\d+", name) for name in names(target)):
                wrong.append(f"{target.name}: not cleaned by the next save: {names(target)}")
            if torn := [path.name for path in target.glob("step-*") if checkpoint.fault(path, hashes=False)]:
                wrong.append(f"{target.name}: torn: {torn}")
            shutil.rmtree(target)
            if alive:
                break
    return kills, wrong


def _save_other(folder: Path, step: int) -> None:
    saver = checkpointer(folder, step + 1000)
    saver.save(step, {"sequences": step * 7})


def _load_either(folder: Path, newest_before: int, step: int) -> str:
    """'old' or 'new': what was resumed from is whole, and not older than what was there before the save. Saves then."""
    loader = checkpointer(folder, 99)
    state = loader.load()
    assert state is not None, "nothing left to resume from"
    got = content(loader.stages[0], loader.optimizer)
    loader.save(40, {})
    if got == content(*small(step)):
        assert state["step"] == step
        return "new"
    seeds = {newest_before, newest_before + 1000}
    assert any(got == content(*small(seed)) for seed in seeds), f"BAD LOAD of step {state['step']}"
    assert state["step"] == newest_before
    return "old"


@pytest.mark.parametrize(
    ("world", "step", "before", "mode"),
    [
        pytest.param(1, 30, (10, 20), "disabled", id="a new step"),
        pytest.param(1, 20, (10, 20), "async", id="a step again"),
        pytest.param(2, 30, (20,), "disabled", id="two ranks"),
        pytest.param(2, 20, (20,), "async", id="the only step again, two ranks"),
    ],
)
def test_killed_at_any_write_fsync_or_rename_the_last_good_checkpoint_is_resumed(
    tmp_path: Path, world: int, step: int, before: tuple[int, ...], mode: str
) -> None:
    kills, wrong = nursery(_sweep, tmp_path, world, step, before, mode)
    print(f"\nkills of each rank: {kills}")
    assert wrong == []
    assert kills[0] > 20
    assert all(count > 4 for count in kills)


def _durable(folder: Path) -> list[str]:
    """What a power loss could take from a save, by the order in which things were synced and renamed."""
    synced: list[list[int]] = [[]]
    sync, rename = os.fsync, os.rename

    def fsync_seen(descriptor: int) -> None:
        sync(descriptor)
        synced[-1].append(os.fstat(descriptor).st_ino)

    def rename_seen(*args: Any, **options: Any) -> None:
        rename(*args, **options)
        synced.append([])

    os.fsync, os.rename = fsync_seen, rename_seen  # type: ignore[assignment]
    save(folder, 10)
    # Two renames: torch's of .metadata, after which it must be synced, and the one that publishes.
    before, after = synced[-2], synced[-1]
    published = folder / "step-10"
    lost = [path.name for path in (*published.iterdir(), published) if path.stat().st_ino not in before]
    return lost + ([] if folder.stat().st_ino in after else ["the name step-10"])


def test_a_save_is_on_the_disk_before_and_after_it_gets_its_name(tmp_path: Path) -> None:
    assert value_of(_durable, tmp_path) == []
