"""Saves in the background: training goes on, one save waits for another, a late one publishes nothing."""

import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem

from components.launch.ending import leave
from tests.checkpoints import checkpointer, load, names, run, save, saved, value_of
from tests.limits import MOST_IDLE


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
            self.opened.wait(MOST_IDLE)
        self.write(*args)


def _train_during_save(folder: Path) -> float:
    """Save while the main thread trains and talks to the other rank."""
    saver, gate = checkpointer(folder, 10, async_mode="async"), _Gate()
    saver.save(10, {"sequences": 70})
    gate.reached.wait(MOST_IDLE)
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
    gate.reached.wait(MOST_IDLE)
    save(folder, 10)
    new, gate_2 = checkpointer(folder, 20, async_mode="async"), _Gate()
    new.save(20, {"sequences": 140})
    gate_2.reached.wait(MOST_IDLE)
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
    assert value_of(load, tmp_path) == 20
    assert value_of(load, tmp_path, 10) == 10


def _exit_during_save(folder: Path) -> None:
    """The first rank is writing; the other has written, and waits for the first."""
    saver, gate = checkpointer(folder, 20, async_mode="async"), _Gate()
    if dist.get_rank() == 1:
        gate.opened.set()
    saver.save(20, {})
    gate.reached.wait(MOST_IDLE)
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
