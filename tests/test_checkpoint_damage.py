"""Checkpoints that were damaged: each is named and passed over or refused, the same on all ranks."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from components.state import choice
from components.state.folder import Saved
from tests.checkpoints import flip_a_bit, load, names, run, saved, value_of

# ----------------------------------------------------------------------------- what is damaged later


def _zero_a_block(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[4096:8192] = bytes(4096)
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bit flip": (flip_a_bit, "__0_0.distcp is corrupt"),
    "zeroed block": (_zero_a_block, "__0_0.distcp is corrupt"),
    "truncated": (lambda folder: os.truncate(folder / "__0_0.distcp", 5000), "__0_0.distcp has 5000 bytes, not"),
    "empty metadata": (lambda folder: os.truncate(folder / ".metadata", 0), ".metadata has 0 bytes, not"),
    "missing shard": (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "empty manifest": (lambda folder: (folder / "manifest.json").write_text("{}"), "does not list"),
    "manifest of zeros": (lambda folder: (folder / "manifest.json").write_bytes(bytes(4096)), "unreadable"),
    "another manifest": (lambda folder: (folder / "manifest.json").write_text('["a"]'), "unreadable"),
    "state changed": (lambda folder: (folder / "state.json").write_text('{"step": 3}'), "state.json has"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_put_aside_and_passed_over(tmp_path: Path, damage: str) -> None:
    saved(tmp_path, 10, 20)
    harm, reason = DAMAGE[damage]
    harm(tmp_path / "step-20")
    (tmp_path / "corrupt-step-20").mkdir()  # from an earlier time
    outcome = run(load, tmp_path)[0]
    assert (outcome.error, outcome.value) == ("", 10)
    assert f"checkpoint {tmp_path}/step-20 passed over: " in outcome.printed
    assert reason in outcome.printed
    assert names(tmp_path) == {"step-10", "corrupt-step-20", "corrupt-step-20-2"}


def test_ranks_agree_on_what_is_damaged_though_each_checks_only_some_files(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, world=2)
    flip_a_bit(tmp_path / "step-20")
    assert [outcome.value for outcome in run(load, tmp_path, world=2)] == [10, 10]


def _load_late(folder: Path) -> int | None:
    """The other rank lists folders when they have been renamed already."""
    listed = choice.saved_in

    def late(folder: Path) -> list[Saved]:
        return listed(folder) if dist.get_rank() == 0 else []

    choice.saved_in = late
    return load(folder)


def test_the_first_rank_decides_what_is_there(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    flip_a_bit(tmp_path / "step-20")
    assert [outcome.value for outcome in run(_load_late, tmp_path, world=2)] == [10, 10]


def test_a_step_that_is_asked_for_must_be_there_and_verify(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    flip_a_bit(tmp_path / "step-20")
    for step, reason in ((20, "__0_0.distcp is corrupt"), (25, "not there")):
        outcomes = run(load, tmp_path, step, world=2)
        for outcome in outcomes:
            assert outcome.error.startswith(f"ConfigError: checkpoint.load_step = {step}: {tmp_path}/step-{step}: ")
            assert reason in outcome.error
            assert outcome.error.endswith("Steps there: 10, 20, 30")
    assert names(tmp_path) == {"step-10", "step-20", "step-30"}


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    assert value_of(load, tmp_path / "not there") is None
    (tmp_path / ".staging-1234").mkdir()
    (tmp_path / "step-7-old").mkdir()
    (tmp_path / "step-8").write_text("a file")
    assert value_of(load, tmp_path) is None
    assert names(tmp_path) == {"step-7-old", "step-8"}
