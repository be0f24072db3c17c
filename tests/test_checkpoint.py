"""Checkpoints on real ranks: any layout loads what any other saved, and no fault loads wrong weights.

Each test runs in one process forked from a server that has torch imported; that process forks the ranks.
"""

import functools
import io
import itertools
import json
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem

import train
from components.config import Checkpoint, ConfigError, load_config
from components.launch.ending import leave
from components.optimizer import build_optimizer
from components.state import checkpoint
from components.state.checkpoint import Checkpointer
from components.state.init import give_memory, initialize_weights
from models import meta_model
from parallelize import parallelize_model
from parallelize.mesh import Mesh, resolve_degrees
from tests.harness import PRELOADED, RECIPE, SMALL, _whole

# ---------------------------------------------------------------------------------------------- ranks


@dataclass
class Outcome:
    """How one rank ended."""

    code: int
    value: Any
    error: str
    printed: str


class Nursery:
    """A process that is ready to save and load, and forks: what a test does costs milliseconds, and leaves no trace."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there,))
        self.process.start()
        there.close()

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """What function returns in a fork of that process, which may fork ranks."""
        self.pipe.send((function, args))
        if not self.pipe.poll(60):
            self.end()
            pytest.fail("no answer in 60 seconds")
        failed, value = self.pipe.recv()
        assert not failed, value
        return value

    def end(self) -> None:
        """Also of whatever it forked and that still waits for something."""
        assert self.process.pid is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        _nursery.cache_clear()


def _serve(pipe: Connection) -> None:
    os.setsid()
    small(0)  # what torch imports late is imported once
    while True:
        function, args = pipe.recv()
        pid = os.fork()
        if pid == 0:
            try:
                pipe.send((False, function(*args)))
            except BaseException:
                pipe.send((True, traceback.format_exc()))
            os._exit(0)
        os.waitpid(pid, 0)


@functools.cache
def _nursery() -> Nursery:
    return Nursery()


def nursery(function: Callable[..., Any], *args: Any) -> Any:
    return _nursery()(function, *args)


@pytest.fixture(scope="module", autouse=True)
def _end_of_nursery() -> Iterator[None]:
    yield
    if _nursery.cache_info().currsize:
        _nursery().end()


def fork_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Outcome]:
    """Call function on each of `world` gloo ranks; how each of them ended."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pids = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                _rank(rank, world, folder, function, args)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        outcomes = []
        for rank, code in enumerate(codes):
            path = folder / f"{rank}.pickle"
            value, error = pickle.loads(path.read_bytes()) if path.exists() else (None, "")
            outcomes.append(Outcome(code, value, error, (folder / f"{rank}.txt").read_text()))
        return outcomes


def _rank(rank: int, world: int, folder: Path, function: Callable[..., Any], args: tuple) -> NoReturn:
    value, error = None, ""
    output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=5))
        value = function(*args)
    except BaseException as failure:
        error = f"{type(failure).__name__}: {failure}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    sys.stdout.flush()
    (folder / "new").with_suffix(f".{rank}").write_bytes(pickle.dumps((value, error)))
    (folder / "new").with_suffix(f".{rank}").rename(folder / f"{rank}.pickle")
    os._exit(1 if error else 0)


def run(function: Callable[..., Any], *args: Any, world: int = 1) -> list[Outcome]:
    return nursery(fork_ranks, world, function, *args)


def value_of(function: Callable[..., Any], *args: Any, world: int = 1) -> Any:
    """What function returned on rank 0; every rank must have ended well."""
    outcomes = run(function, *args, world=world)
    assert not any(outcome.code for outcome in outcomes), "\n".join(o.error + "\n" + o.printed for o in outcomes)
    return outcomes[0].value


# ------------------------------------------------------------------------------- a small thing to save


def small(seed: int, sizes: tuple[int, ...] = (6, 5, 3)) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer with moments; every number depends on the seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(rows, columns) for rows, columns in itertools.pairwise(sizes)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(seed % 3 + 1):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


def content(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a checkpoint should bring back, as bits."""
    parts = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parts |= {f"{name}.{moment}": value for moment, value in optimizer.state[parameter].items()}
    return {name: (tuple(part.shape), part.numpy().tobytes()) for name, part in parts.items()}


def weights(model: nn.Module) -> dict[str, bytes]:
    return {name: parameter.detach().numpy().tobytes() for name, parameter in model.named_parameters()}


def checkpointer(folder: Path, seed: int = 0, sizes: tuple[int, ...] = (6, 5, 3), **config: Any) -> Checkpointer:
    model, optimizer = small(seed, sizes)
    return Checkpointer(folder, Checkpoint(enable=True, **config), [model], optimizer)


def save(folder: Path, *steps: int, model_only: bool = False, **config: Any) -> None:
    """Save steps, the content of each being small(step)."""
    for step in steps:
        saver = checkpointer(folder, step, **config)
        saver.save(step, {"sequences": step * 7}, model_only)
        saver.wait()


def load(folder: Path, step: int = -1, **config: Any) -> int | None:
    """The step that was resumed from, None if there was nothing; what was loaded must be what that step had."""
    loader = checkpointer(folder, 99, **config)
    state = loader.load(step)
    got = content(loader.stages[0], loader.optimizer)
    if state is None:
        assert got == content(*small(99)), "nothing to resume from, and yet something was changed"
        return None
    assert state["sequences"] == state["step"] * 7
    assert got == content(*small(state["step"])), f"BAD LOAD of step {state['step']}"
    return state["step"]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def resign(folder: Path) -> None:
    """Make the manifest fit what is in the folder: whoever can write a checkpoint can do that."""
    files = {path.name: checkpoint.digest(path) for path in folder.iterdir() if path.name != "manifest.json"}
    (folder / "manifest.json").write_text(json.dumps(files))


def saved(folder: Path, *steps: int, world: int = 1, **config: Any) -> Path:
    value_of(_save_with, folder, steps, config, world=world)
    return folder


def _save_with(folder: Path, steps: tuple[int, ...], config: dict[str, Any]) -> None:
    save(folder, *steps, **config)


# --------------------------------------------------------------------------------------------- layouts

LAYOUTS = {"one rank": (1, 1), "ddp 2": (2, 1), "fsdp 2": (1, 2), "hsdp 2x2": (2, 2), "fsdp 3": (1, 3)}


def _build(replicate: int, shard: int, seed: int) -> tuple[list[nn.Module], torch.optim.Optimizer]:
    """As train.py builds them; nothing in this flavor divides by 2, 3 or 4."""
    degrees = {"replicate": replicate, "shard": shard}
    overrides = [word for n, size in degrees.items() for word in (f"--parallelism.data_parallel_{n}_degree", str(size))]
    argv = ["--job.config_file", str(RECIPE), *SMALL, "--model.flavor", "odd", "--debug.seed", str(seed), *overrides]
    config = load_config(argv)
    mesh = Mesh(resolve_degrees(config, dist.get_world_size()), "cpu")
    whole = meta_model(config.model.name, config.model.flavor)
    stages = parallelize_model(config.model.name)(whole, mesh, config)
    give_memory(stages, torch.device("cpu"))
    for stage in stages:
        initialize_weights(stage, stage.init_std, seed)
    return stages, build_optimizer(stages, config.optimizer)


def _gathered(stages: list[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    whole = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            whole[name] = _whole(parameter)
            whole |= {f"{name} {moment}": _whole(value) for moment, value in optimizer.state[parameter].items()}
    return whole


def _save_layout(replicate: int, shard: int, folder: Path, seed: int, mode: str) -> None:
    stages, optimizer = _build(replicate, shard, seed)
    for step in range(seed):
        for stage in stages:
            for parameter in stage.parameters():
                parameter.grad = parameter.detach() * 0.1 + 0.01 * (step + 1)
        optimizer.step()
    saver = Checkpointer(folder, Checkpoint(enable=True, async_mode=mode), stages, optimizer)  # type: ignore[arg-type]
    saver.save(seed, {})
    expected = _gathered(stages, optimizer)
    for stage in stages:
        for parameter in stage.parameters():
            parameter.data.zero_()  # training goes on while the copy is written
    saver.wait()
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")


def _load_layouts(replicate: int, shard: int, folders: dict[str, Path]) -> list[str]:
    """Differences, after loading each of the folders into one model."""
    stages, optimizer = _build(replicate, shard, 77)
    wrong = []
    for name, folder in folders.items():
        Checkpointer(folder, Checkpoint(enable=True), stages, optimizer).load()
        got, expected = _gathered(stages, optimizer), torch.load(folder / "expected.pt")
        assert got.keys() == expected.keys()
        assert any(key.endswith(" exp_avg_sq") for key in got)
        assert any(key.endswith(" step") for key in got)
        wrong += [f"{name}: {key}" for key in got if not torch.equal(got[key], expected[key])]
    return wrong


def _all_layouts(folder: Path) -> list[str]:
    folders = {name: folder / name for name in LAYOUTS}  # paths with spaces
    wrong = []
    for seed, (name, (replicate, shard)) in enumerate(LAYOUTS.items(), 1):
        mode = "async" if seed % 2 else "disabled"
        outcomes = fork_ranks(replicate * shard, _save_layout, replicate, shard, folders[name], seed, mode)
        wrong += [f"saving {name}: {outcome.error}" for outcome in outcomes if outcome.code]
    for name, (replicate, shard) in LAYOUTS.items():
        for outcome in fork_ranks(replicate * shard, _load_layouts, replicate, shard, folders):
            wrong += [f"{name} loads {key}" for key in outcome.value or []]
            wrong += [f"loading {name}: {outcome.error}"] if outcome.code else []
    return wrong


def test_every_layout_loads_what_every_other_saved_bit_by_bit(tmp_path: Path) -> None:
    assert nursery(_all_layouts, tmp_path) == []


# -------------------------------------------------------------------- killed at any moment of a save


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


# ----------------------------------------------------------------------------- what is damaged later


def _flip_a_bit(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _zero_a_block(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[4096:8192] = bytes(4096)
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bit flip": (_flip_a_bit, "__0_0.distcp is corrupt"),
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
    _flip_a_bit(tmp_path / "step-20")
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
    _flip_a_bit(tmp_path / "step-20")
    assert [outcome.value for outcome in run(_load_late, tmp_path, world=2)] == [10, 10]


def test_a_step_that_is_asked_for_must_be_there_and_verify(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    assert value_of(load, tmp_path, 20) == 20
    _flip_a_bit(tmp_path / "step-20")
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


# ------------------------------------------------------------------------------------------- pruning


def test_pruning_counts_only_whole_checkpoints_and_leaves_strangers_alone(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    for step in (20, 30):
        shutil.copytree(tmp_path / "step-10", tmp_path / f"step-{step}")
        (tmp_path / f"step-{step}" / "__0_0.distcp").unlink()
    strangers = {"my-step-5-backup", "step-10-old", "step-005", "notes"}
    for name in strangers:
        shutil.copytree(tmp_path / "step-10", tmp_path / name)
    saved(tmp_path, 40, keep_latest_k=2)
    assert names(tmp_path) == strangers | {"step-10", "step-20", "step-30", "step-40"}
    saved(tmp_path, 50, keep_latest_k=2)
    assert names(tmp_path) == strangers | {"step-20", "step-30", "step-40", "step-50"}
    saved(tmp_path, 60, keep_latest_k=1)
    assert names(tmp_path) == strangers | {"step-20", "step-30", "step-60"}


def test_what_was_just_saved_is_kept_even_if_there_are_later_steps(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    saved(tmp_path, 15, keep_latest_k=2)
    assert names(tmp_path) == {"step-15", "step-30"}


def test_zero_keeps_all(tmp_path: Path) -> None:
    saved(tmp_path, *range(1, 13), keep_latest_k=0)
    assert len(names(tmp_path)) == 12
    saved(tmp_path, 13)
    assert names(tmp_path) == {f"step-{step}" for step in range(4, 14)}


# -------------------------------------------------------------------------------- what does not fit


def _load_sizes(folder: Path, sizes: tuple[int, ...], config: dict[str, Any]) -> None:
    checkpointer(folder, 99, sizes, **config).load()


def test_every_name_and_shape_that_does_not_fit_is_named(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    error = run(_load_sizes, tmp_path, (6, 7, 3), {})[0].error
    for line in (
        "model.0.weight is (5, 6) there and (7, 6) here",
        "model.0.bias is (5,) there and (7,) here",
        "model.1.weight is (3, 5) there and (3, 7) here",
        "optimizer.0.weight.exp_avg is (5, 6) there and (7, 6) here",
        "optimizer.1.weight.exp_avg_sq is (3, 5) there and (3, 7) here",
    ):
        assert f"{tmp_path}/step-10 does not fit this model: {line}" in error
    more = run(_load_sizes, tmp_path, (6, 5, 3, 2), {})[0].error
    assert "model.2.weight is missing" in more
    assert "optimizer.2.bias.step is missing" in more
    less = run(_load_sizes, tmp_path, (6, 5), {"exclude_from_loading": ["optimizer"]})[0].error
    assert "model.1.weight is not in this model" in less
    assert "optimizer" not in less.replace("exclude", "")
    both = run(_load_sizes, tmp_path, (6, 5), {})[0].error
    assert "optimizer.1.weight.exp_avg is not in this model" in both


def _weights_only(folder: Path, config: dict[str, Any], initial: bool = False) -> tuple[Any, bool, bool]:
    """State, whether the weights are those of the state's step, and whether the optimizer is as it was."""
    loader = checkpointer(folder, 99, **config)
    before = content(loader.stages[0], loader.optimizer)
    state = loader.load_initial() if initial else loader.load()
    after = content(loader.stages[0], loader.optimizer)
    step = 10 if state is None else state["step"]
    moments = all(before[name] == after[name] for name in before if name not in weights(loader.stages[0]))
    return state, weights(loader.stages[0]) == weights(small(step)[0]), moments


def test_without_the_optimizer(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    state, same_weights, same_moments = value_of(_weights_only, tmp_path, {"exclude_from_loading": ["optimizer"]})
    assert (state["step"], same_weights, same_moments) == (10, True, True)


class _Counting(torch.optim.SGD):
    """Keeps numbers of its own beside a tensor, as old optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state |= {"steps": state.get("steps", 0) + 1, "decay": 0.1 / (1 + state.get("steps", 0)), "unset": None}


def _counting(steps: int) -> Checkpointer:
    """Of a model whose first weight is frozen."""
    model = small(0)[0]
    first, *trained = model.parameters()
    first.requires_grad_(False)
    optimizer = _Counting(trained, lr=0.1, momentum=0.9)
    for _ in range(steps):
        for parameter in trained:
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
    return Checkpointer(Path("checkpoint"), Checkpoint(enable=True), [model], optimizer)


def _save_and_load_counting(folder: Path) -> tuple[list[dict[str, Any]], ...]:
    os.chdir(folder)
    saver, loader = _counting(3), _counting(0)
    saver.save(3, {})
    loader.load()
    names = saver._tensors(with_optimizer=True)
    assert "model.0.weight" in names
    assert "optimizer.0.weight.steps" not in names
    kept = ([*one.optimizer.state.values()] for one in (saver, loader))
    return tuple([{**state, "momentum_buffer": state["momentum_buffer"].tolist()} for state in one] for one in kept)


def test_numbers_that_an_optimizer_keeps_are_saved_and_what_is_frozen_has_none(tmp_path: Path) -> None:
    before, after = value_of(_save_and_load_counting, tmp_path)
    assert len(before) == len(after) == 3
    for was, found in zip(before, after, strict=True):
        assert (was["momentum_buffer"], 3, 0.1 / 3) == (found["momentum_buffer"], found["steps"], found["decay"])
        assert type(found["steps"]) is int


def _save_model_only(folder: Path, step: int) -> None:
    save(folder, step, model_only=True)


def test_a_checkpoint_of_weights_alone_is_not_resumed_from_but_can_be_started_from(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    value_of(_save_model_only, tmp_path, 10)
    assert b"optimizer" not in (tmp_path / "step-10" / ".metadata").read_bytes()
    assert b"optimizer" in (tmp_path / "step-5" / ".metadata").read_bytes()
    outcome = run(load, tmp_path)[0]
    assert (outcome.error, outcome.value) == ("", 5)
    assert f"checkpoint {tmp_path}/step-10 passed over: it holds only weights" in outcome.printed
    assert "step-10" in names(tmp_path)
    assert "it holds only weights" in run(load, tmp_path, 10)[0].error
    for path in (tmp_path, tmp_path / "step-10"):
        config = {"initial_load_path": str(path)}
        assert value_of(_weights_only, tmp_path / "new run", config, True) == (None, True, True)
    both = {"initial_load_path": str(tmp_path / "step-10"), "initial_load_model_only": False}
    assert "it holds only weights" in run(_weights_only, tmp_path / "new run", both, True)[0].error
    assert value_of(_resume_from, tmp_path, {"initial_load_model_only": False}) == 5


def _resume_from(folder: Path, config: dict[str, Any]) -> int:
    loader = checkpointer(folder / "new run", 99, initial_load_path=str(folder), **config)
    assert loader.load() is None
    state = loader.load_initial()
    assert state is not None
    assert content(loader.stages[0], loader.optimizer) == content(*small(state["step"]))
    return state["step"]


def _start(folder: Path, initial: Path) -> None:
    loader = checkpointer(folder, 99, initial_load_path=str(initial))
    train.resume(_FakeRun(loader.config), loader)  # type: ignore[arg-type]
    assert weights(loader.stages[0]) == weights(small(10)[0])


class _FakeRun:
    def __init__(self, config: Checkpoint) -> None:
        self.config = self
        self.checkpoint = config


def test_with_only_torn_checkpoints_the_initial_weights_are_taken(tmp_path: Path) -> None:
    initial = saved(tmp_path / "initial", 5, 10, 20)
    _flip_a_bit(initial / "step-20")
    own = saved(tmp_path / "own", 10, 20)
    for step in (10, 20):
        (own / f"step-{step}" / "__0_0.distcp").unlink()
    outcome = run(_start, own, initial)[0]
    assert outcome.error == ""
    for line in (
        f"checkpoint {own}/step-10 passed over: ",
        f"checkpoint {own}/step-20 passed over: ",
        f"checkpoint {initial}/step-20 passed over: __0_0.distcp is corrupt",
        f"weights from {initial}",
    ):
        assert line in outcome.printed
    assert names(own) == {"corrupt-step-10", "corrupt-step-20"}
    assert names(initial) == {"step-5", "step-10", "step-20"}


def test_an_initial_path_without_a_good_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    error = run(_start, tmp_path / "own", tmp_path / "empty")[0].error
    assert error.startswith(f"ConfigError: checkpoint.initial_load_path: {tmp_path}/empty: no step-N folder in it; ")
    saved(tmp_path, 10)
    _flip_a_bit(tmp_path / "step-10")
    error = run(_start, tmp_path / "own", tmp_path / "step-10")[0].error
    assert f"{tmp_path}/step-10: __0_0.distcp is corrupt" in error


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


# ------------------------------------------------------------------------------------------- disk full


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
        assert seconds < 3  # and not when the group gives up
        assert polls == (2 if mode == "async" else 0)
    assert names(tmp_path) == {"step-10"}
    assert value_of(load, tmp_path) == 10


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_disk_that_is_full(tmp_path: Path, mode: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    try:
        saved(disk, 10, world=2)
        for outcome in run(_save_on_full_disk, disk, -1, mode, (160, 150, 30), world=2):
            assert "No space left on device" in outcome.value[0], outcome
        assert names(disk) == {"step-10"}
        assert value_of(load, disk) == 10
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _fail_to_publish(folder: Path, name: str) -> str:
    original = getattr(checkpoint, name)
    calls = []

    def fails(*args: Any) -> Any:
        calls.append(args)
        if args[0].name == "manifest.json" or name == "sync":
            raise OSError(28, "No space left on device")
        return original(*args)

    setattr(checkpoint, name, fails)
    try:
        checkpointer(folder, 20).save(20, {})
    except OSError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["write_json", "sync"])
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


# -------------------------------------------------------------------------------------- in the background


class _Gate:
    """Holds the thread that first writes a tensor until it is opened."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.held: int | None = None
        self.write = torch.save
        filesystem.torch.save = self  # type: ignore[assignment]

    def __call__(self, *args: Any) -> None:
        self.held = self.held or threading.get_ident()
        if self.held == threading.get_ident():
            self.reached.set()
            self.opened.wait(20)
        self.write(*args)


def _train_during_save(folder: Path) -> float:
    """Save while the main thread trains and talks to the other rank."""
    saver, gate = checkpointer(folder, 10, async_mode="async"), _Gate()
    saver.save(10, {"sequences": 70})
    gate.reached.wait(5)
    model, optimizer = saver.stages[0], saver.optimizer
    assert not folder.joinpath("step-10").exists()
    for number in range(200):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if number == 50:
            gate.opened.set()
        total = torch.tensor([float(number)])
        dist.all_reduce(total)
        assert total.item() == 2 * number
        values: list = [None, None]
        dist.all_gather_object(values, ("training", number))
        assert values == [("training", number)] * 2
        saver.poll()
    saver.wait()
    saver.poll()
    return 0


def test_training_goes_on_during_a_save_and_does_not_change_it(tmp_path: Path) -> None:
    value_of(_train_during_save, tmp_path, world=2)
    assert value_of(load, tmp_path) == 10
    assert value_of(load, tmp_path, world=2) == 10


def _save_twice(folder: Path) -> list[str]:
    """What was there when the second save had been started: it waits for the first."""
    saver = checkpointer(folder, 10, async_mode="async")
    saver.save(10, {"sequences": 70})
    saver.save(20, {"sequences": 140})
    there = sorted(path.name for path in folder.glob("step-*"))
    saver.wait()
    return [*there, "then", *sorted(names(folder))]


def test_a_save_waits_for_the_one_before_it(tmp_path: Path) -> None:
    assert value_of(_save_twice, tmp_path) == ["step-10", "then", "step-10", "step-20"]


def _late_writer(folder: Path) -> str:
    """A writer of an earlier start comes back to life after the step was saved again, and another one too."""
    gate = _Gate()
    old = checkpointer(folder, 1010, async_mode="async")
    old.save(10, {"sequences": -1})
    gate.reached.wait(5)
    save(folder, 10)
    new, gate_2 = checkpointer(folder, 20, async_mode="async"), _Gate()
    new.save(20, {"sequences": 140})
    gate_2.reached.wait(5)
    gate.opened.set()
    error = ""
    try:
        old.wait()
    except OSError as failure:
        error = str(failure)
    gate_2.opened.set()
    new.wait()
    return error


def test_a_late_writer_publishes_nothing(tmp_path: Path) -> None:
    assert "step-10 could not be saved" in value_of(_late_writer, tmp_path)
    assert names(tmp_path) == {"step-10", "step-20"}
    assert value_of(load, tmp_path, 10) == 10
    assert value_of(load, tmp_path) == 20


def _exit_during_save(folder: Path) -> None:
    """The first rank is writing; the other has written, and waits for the first."""
    saver, gate = checkpointer(folder, 20, async_mode="async"), _Gate()
    if dist.get_rank() == 1:
        gate.opened.set()
    saver.save(20, {})
    gate.reached.wait(5)
    time.sleep(0.1)
    threading.Timer(0.3, gate.opened.set).start()
    leave(5)


def test_a_save_ends_with_its_process(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    for _ in range(5):
        outcomes = run(_exit_during_save, tmp_path, world=2)
        assert [outcome.code for outcome in outcomes] == [5, 5]
    time.sleep(0.6)
    assert "step-20" not in names(tmp_path)
    assert value_of(load, tmp_path) == 10
    assert names(tmp_path) == {"step-10"}
