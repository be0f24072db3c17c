"""A store that fails to read is no verdict on a checkpoint: nothing is renamed, pruned, or begun at step 0."""

import builtins
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from components.config import ConfigError, files
from tests.checkpoints import checkpointer, content, flip_a_bit, load, names, resign, run, save, saved, small, value_of

ERRNOS = (errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOENT)


class Store:
    """Fails the n-th thing that this process reads in a folder: once, or whenever that is read again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.at, self.number, self.lasting, self.count = str(folder), 0, 0, False, 0
        self.failing: tuple[str, str, int] | None = None
        for name in ("listdir", "stat", "lstat"):
            setattr(os, name, self._failing(name, getattr(os, name)))
        self.open = io.open
        io.open = builtins.open = self._open  # type: ignore[assignment]

    def arm(self, at: int, number: int, lasting: bool) -> None:
        self.at, self.number, self.lasting, self.count, self.failing = at, number, lasting, 0, None

    def tick(self, what: str, path: Any) -> None:
        where = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        if not self.at or not where.startswith(self.folder):
            return
        self.count += 1
        # That a folder is not there is an answer, where a file that it lists must be there.
        number = errno.EIO if self.number == errno.ENOENT and what == "listdir" else self.number
        if self.count == self.at:
            self.failing = what, where, number
        elif not self.lasting or self.failing != (what, where, number):
            return
        raise OSError(number, os.strerror(number), where)

    def _failing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def fails(path: Any = ".", *args: Any, **options: Any) -> Any:
            self.tick(name, path)
            return call(path, *args, **options)

        return fails

    def _open(self, path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "r" not in mode or not self.at or not str(path).startswith(self.folder):
            return self.open(path, mode, *args, **options)
        self.tick("open", path)
        raw = io.BufferedReader(_Reads(path, self))
        return raw if "b" in mode else io.TextIOWrapper(raw)


class _Reads(io.FileIO):
    def __init__(self, path: Any, store: Store) -> None:
        super().__init__(path)
        self.store, self.path = store, path

    def readinto(self, buffer: Any) -> int | None:
        self.fail()
        return super().readinto(buffer)

    def readall(self) -> bytes:
        self.fail()
        return super().readall()

    def fail(self) -> None:
        try:
            self.store.tick("read", self.path)
        except OSError as error:
            raise OSError(error.errno, error.strerror) from None  # as the kernel's, which names no file


def sweep(folder: Path, victim: int, lasting: bool, errnos: tuple[int, ...] = ERRNOS) -> tuple[int, list[str]]:
    """Fail each read of a resume on one rank, with errnos in turn; returns how many there are, and what was wrong."""
    files.WAITS_SECONDS[:] = [0.0, 0.0]
    before, store = names(folder), Store(folder)
    wrong: list[str] = []
    for at in range(1, 1000):
        number = errnos[at % len(errnos)]
        store.arm(at if dist.get_rank() == victim else 10_000, number, lasting)
        try:
            found: Any = load(folder)
        except ConfigError as error:
            found = str(error)
        store.at, failed = 0, [store.failing]
        dist.broadcast_object_list(failed, src=victim)
        dist.barrier()
        if failed[0] is None:
            return at - 1, wrong
        if not lasting and found != 20:
            wrong.append(f"read {at} {failed[0]} failed once: {found}")
        needs = ["cannot be read", os.strerror(failed[0][2]), failed[0][1]]
        if lasting and not all(need in str(found) for need in needs) and not (number == errno.ENOENT and found == 20):
            wrong.append(f"read {at} {failed[0]} fails: {found}")
        if names(folder) != before:
            wrong.append(f"read {at} {failed[0]}: {names(folder)}")
            return at, wrong
    return 0, ["no end"]


@pytest.mark.parametrize("lasting", [True, False], ids=["for good", "once"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_read_that_fails_on_one_rank_stops_all_and_renames_nothing(
    tmp_path: Path, victim: int, lasting: bool
) -> None:
    saved(tmp_path, 10, 20, world=2)
    for outcome in run(sweep, tmp_path, victim, lasting, world=2):
        assert outcome.error == ""
        reads, wrong = outcome.value
        assert wrong == []
        assert reads > (15 if victim == 0 else 3)


def _save_while_an_old_one_cannot_be_read(folder: Path) -> None:
    files.WAITS_SECONDS[:] = [0.0]
    store = Store(folder / "step-10" / "manifest.json")
    store.arm(1, errno.EIO, True)
    save(folder, 30, keep_latest_k=1)


def test_nothing_is_pruned_while_a_checkpoint_cannot_be_read(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    outcome = run(_save_while_an_old_one_cannot_be_read, tmp_path)[0]
    assert outcome.error == ""
    assert f"{tmp_path}/step-30 is saved; nothing older was put aside or pruned" in outcome.printed
    assert names(tmp_path) == {"step-10", "step-20", "step-30"}
    saved(tmp_path, 40, keep_latest_k=1)
    assert names(tmp_path) == {"step-40"}


@pytest.mark.parametrize("world", [1, 2])
def test_checkpoints_of_which_none_loads_are_no_beginning(tmp_path: Path, world: int) -> None:
    saved(tmp_path, 10, 20)
    flip_a_bit(tmp_path / "step-20")
    (tmp_path / "step-10" / "manifest.json").unlink()
    for outcome in run(load, tmp_path, world=world):
        assert outcome.error.startswith(
            f"ConfigError: checkpoint {tmp_path}/step-20 passed over: __0_0.distcp is corrupt"
        )
        assert f"checkpoint {tmp_path}/step-10 passed over: no manifest.json in it" in outcome.error
        assert "none can be continued: set checkpoint.initial_load_path, or move the folder away" in outcome.error
    assert names(tmp_path) == {"step-10", "step-20"}, "renamed on a doubt"


def _load_other_sizes(folder: Path) -> None:
    checkpointer(folder, 99, (6, 7, 3)).load()


def test_a_start_that_is_refused_renames_nothing(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    flip_a_bit(tmp_path / "step-20")
    assert "does not fit this model" in run(_load_other_sizes, tmp_path)[0].error
    assert names(tmp_path) == {"step-10", "step-20"}


def test_what_was_put_aside_earlier_is_no_beginning_either(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    (tmp_path / "step-10").rename(tmp_path / "corrupt-step-10")
    assert "corrupt-step-10 was put aside earlier" in run(load, tmp_path)[0].error


def test_without_a_manifest_a_checkpoint_is_passed_over_and_keeps_its_name(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    (tmp_path / "step-20" / "manifest.json").unlink()
    outcome = run(load, tmp_path)[0]
    assert (outcome.error, outcome.value) == ("", 10)
    assert f"checkpoint {tmp_path}/step-20 passed over: no manifest.json in it" in outcome.printed
    assert names(tmp_path) == {"step-10", "step-20"}


# ------------------------------------------------------------------------------------------- contents


def _rewrite_state(folder: Path, old: str, new: str) -> None:
    text = (folder / "state.json").read_text()
    assert old in text
    (folder / "state.json").write_text(text.replace(old, new))
    resign(folder)


def test_a_newer_state_is_refused_and_an_older_one_loads(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    _rewrite_state(tmp_path / "step-20", '"version": 1', '"version": 2')
    error = run(load, tmp_path)[0].error
    assert f"{tmp_path}/step-20/state.json: version 2, and this code reads versions up to 1: use the newer" in error
    (tmp_path / "step-20" / "state.json").write_text('{"sequences": 140, "step": 20, "model_only": false}')
    resign(tmp_path / "step-20")
    assert value_of(load, tmp_path) == 20
    assert names(tmp_path) == {"step-10", "step-20"}


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"step": 20', '"step": "20"', "step: not what a checkpoint has there"),
        ('"sequences": 140', '"sequences": -1', "sequences: not what"),
        ('"model_only": false', '"model_only": 0', "model_only: not what"),
        ('"began_at": 0', '"began_at": []', "branch: a number is expected"),
        ('"began_at": 0', '"began": 0', "branch: "),
    ],
)
def test_a_state_that_is_none_is_refused(tmp_path: Path, old: str, new: str, reason: str) -> None:
    saved(tmp_path, 20)
    _rewrite_state(tmp_path / "step-20", old, new)
    error = run(load, tmp_path)[0].error
    assert error.startswith(f"ConfigError: {tmp_path}/step-20/state.json: {reason}")


def _save_with_nan(folder: Path, name: str, value: float) -> None:
    saver = checkpointer(folder, 20)
    tensor = saver._tensors(with_optimizer=True)[name]
    tensor.view(-1)[-1] = value
    saver.save(20, {"sequences": 140})


@pytest.mark.parametrize(
    ("name", "value"),
    [("model.1.weight", float("nan")), ("model.0.bias", float("-inf")), ("optimizer.0.weight.exp_avg", float("inf"))],
)
def test_numbers_that_are_not_finite_are_refused_by_name(tmp_path: Path, name: str, value: float) -> None:
    run(_save_with_nan, tmp_path, name, value)
    outcomes = [*run(load, tmp_path, world=2), *run(_load_initial, tmp_path)]
    for outcome in outcomes[: 3 if name.startswith("model") else 2]:
        assert outcome.error == f"ConfigError: {tmp_path}/step-20: {name} holds numbers that are not finite"


def _load_initial(folder: Path) -> dict:
    loader = checkpointer(folder / "new", 99, initial_load_path=str(folder))
    loader.load_initial()
    return content(loader.stages[0], loader.optimizer)


def test_the_sweep_sees_a_load(tmp_path: Path) -> None:
    """What the tests above compare with."""
    saved(tmp_path, 20)
    assert value_of(_load_initial, tmp_path)["0.weight"] == content(*small(20))["0.weight"]
