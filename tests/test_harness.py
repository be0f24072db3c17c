"""What runs layouts is tested too."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from components.commands import figures
from components.config import ROOT
from tests import harness
from tests.limits import wait_until
from tests.processes import alive

WAITING = """
import os, time
from tests.harness import observe
def wait(run):
    print(os.getpid(), flush=True)
    time.sleep(600)
if __name__ == "__main__":
    observe("--parallelism.data_parallel_shard_degree", "1", steps=0, at_end=wait)
"""


def test_a_rank_ends_with_the_test_that_started_it() -> None:
    """Or it would keep the cores busy for all tests to come."""
    folder = ROOT / ".cache" / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"waiting_{os.getpid()}.py"
    script.write_text(WAITING)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    process = subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        rank = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until(lambda: not alive(rank))
    finally:
        process.kill()
        script.unlink()


def test_the_command_fails_where_a_bar_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["harness", "1", "--optimizer.lr", "2e-3"])
    assert harness.main() == 0
    monkeypatch.setitem(figures.BARS, "loss", -1.0)
    assert harness.main() == 1


def test_kept_ranks_end_with_a_process_of_multiprocessing() -> None:
    """It waits for its children before it ends, and they for another case."""
    process = multiprocessing.get_context("spawn").Process(target=harness.observe, kwargs={"steps": 1})
    process.start()
    try:
        wait_until(lambda: process.exitcode is not None)
        assert process.exitcode == 0
    finally:
        process.kill()


def test_a_tensor_of_zeros_is_compared_beside_all_tensors() -> None:
    """One process has an exact 0 where a layout has rounding; alone, any number is far from 0."""
    references = {"queries": torch.zeros(4), "values": torch.full((4,), 0.5)}
    for size, error in ((1e-11, 2e-11), (1e-3, 2e-3)):
        values = references | {"queries": torch.full((4,), size)}
        assert figures.errors(values, references) == {"queries": pytest.approx(error), "values": 0.0}
    assert figures.errors({"queries": torch.ones(4)}, {"queries": torch.zeros(4)}) == {"queries": math.inf}


def test_a_loss_that_is_no_number_is_over_its_bar() -> None:
    right = figures.Observation({}, {"w": torch.ones(1)}, {"w": torch.ones(1)}, [1.0] * 3, [[1.0] * 3], {}, 0.0)
    assert figures.broken_bars(right, right) == {}
    assert [*figures.broken_bars(replace(right, losses=[1.0, math.nan, 1.0]), right)] == ["loss"]
    wrong = replace(right, norms=[[1.0, math.nan, 1.0]])
    assert "gradient norm" in figures.broken_bars(wrong, right)
    assert figures.errors({}, {}) == {}
