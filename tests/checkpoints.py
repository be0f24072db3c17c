"""Ranks that save and load in milliseconds, and a small model and optimizer to save.

Each test runs in one process forked from a server that has torch imported; that process forks the ranks.
"""

import atexit
import functools
import itertools
import json
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from components.config import Checkpoint
from components.state import checkpoint
from components.state.checkpoint import Checkpointer
from tests.limits import MOST_IDLE, TimeLimit, wait_until
from tests.ranks import PRELOADED


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
        atexit.register(self.end)

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """What function returns in a fork of that process, which may fork ranks."""
        self.pipe.send((function, args))
        try:
            wait_until(functools.partial(self.pipe.poll, 0.1))
        except TimeLimit:
            self.end()
            raise
        failed, value = self.pipe.recv()
        assert not failed, value
        return value

    def end(self) -> None:
        """Also of whatever it forked and that still waits for something."""
        assert self.process.pid is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        _nursery.cache_clear()
        atexit.unregister(self.end)


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
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=2 * MOST_IDLE)
        )
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
    loader = checkpointer(folder, 99, load_step=step, **config)
    state = loader.load()
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


def flip_a_bit(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
