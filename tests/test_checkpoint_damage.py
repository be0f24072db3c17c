"""Checkpoints that were damaged or tampered with: each is named and passed over or refused, and nothing in it runs."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem

from components.config import Checkpoint, ConfigError
from components.state import checkpoint
from components.state.checkpoint import Checkpointer
from tests.checkpoints import checkpointer, flip_a_bit, load, names, resign, run, saved, small, value_of

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
    "missing shard": (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp"),
    "missing manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json"),
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
    listed = checkpoint.steps_in

    def late(folder: Path) -> list[tuple[int, Path]]:
        return listed(folder) if dist.get_rank() == 0 else []

    checkpoint.steps_in = late
    return load(folder)


def test_the_first_rank_decides_what_is_there(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    flip_a_bit(tmp_path / "step-20")
    assert [outcome.value for outcome in run(_load_late, tmp_path, world=2)] == [10, 10]


def test_a_step_that_is_asked_for_must_be_there_and_verify(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    assert value_of(load, tmp_path, 20) == 20
    flip_a_bit(tmp_path / "step-20")
    for step, reason in ((20, "__0_0.distcp is corrupt"), (25, "manifest.json")):
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


# --------------------------------------------------------------------------------------------- hostile


class _Payload:
    """Loading its pickle makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple]:
        return (os.mkdir, (str(self.mark),))


def _hostile_metadata(folder: Path, mark: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(_Payload(mark)))


def _hostile_inside_metadata(folder: Path, mark: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = {"model.0.weight": _Payload(mark)}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _hostile_bytes_entry(folder: Path, mark: Path) -> None:
    model, _ = small(10)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    dcp.save({**tensors, "model.0.weight": _Payload(mark)}, storage_writer=checkpoint._Writer(folder))


def _hostile_tensor_file(folder: Path, mark: Path) -> None:
    write = torch.save

    def write_payload(tensor: Tensor, file: Any) -> None:
        write(_Payload(mark), file)

    filesystem.torch.save = write_payload  # type: ignore[assignment]
    model, optimizer = small(10)
    dcp.save(Checkpointer(folder, Checkpoint(), [model], optimizer)._tensors(True), checkpoint_id=folder)
    filesystem.torch.save = write
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.storage_meta = None
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _load_hostile(folder: Path, mark: Path, make: Callable[[Path, Path], None]) -> str:
    """What loading it raised; the pickle would have worked."""
    make(folder, mark)
    resign(folder)
    assert checkpoint.fault(folder) is None
    error = ""
    try:
        checkpointer(folder.parent, 99, exclude_from_loading=["optimizer"]).load()
    except ConfigError as failure:
        error = str(failure)
    assert not mark.exists(), "it ran"
    pickle.loads(pickle.dumps(_Payload(mark)))
    assert mark.exists()
    return error


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_hostile_metadata, f"its .metadata asks for {os.mkdir.__module__}.mkdir"),
        (_hostile_inside_metadata, f"its .metadata asks for {os.mkdir.__module__}.mkdir"),
        (_hostile_bytes_entry, "its .metadata asks for torch.distributed.checkpoint.metadata.BytesStorageMetadata"),
        (_hostile_tensor_file, "Weights only load failed"),
    ],
)
def test_a_hostile_checkpoint_is_refused_and_nothing_runs(
    tmp_path: Path, make: Callable[[Path, Path], None], reason: str
) -> None:
    saved(tmp_path, 10)
    error = value_of(_load_hostile, tmp_path / "step-10", tmp_path / "mark", make)
    assert error.startswith(f"{tmp_path}/step-10 is refused: ")
    assert reason in error
