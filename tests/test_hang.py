"""A rank that the others wait for in vain is named, with the mesh dimension and the operation."""

import functools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import train
from components.commands.figures import Observation
from components.observe.hang import HangWatch, Report, Wait, sentence
from parallelize.groups import set_timeout
from tests.harness import Case, observe_all
from tests.processes import alive
from tests.test_guards import ALONE

TIMEOUT = 4


def hang(folder: Path, run: train.Run) -> None:
    """Rank 1 stops in the second step; the others write what they are told."""
    rank = dist.get_rank()
    set_timeout(300, run.mesh)
    (folder / f"pid {rank}").write_text(str(os.getpid()))
    sys.stderr = (folder / f"rank {rank}").open("w")  # what ends in a log
    batches = train.local_batches(run)
    with HangWatch(run.mesh):
        time.sleep(0.5)
        set_timeout(TIMEOUT, run.mesh)  # as after the first step
        for step in range(3):
            if rank == 1 and step == 1:
                (folder / "stopped").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            train.train_step(run, batches, train.divisor(run))


def kill_later(folder: Path, ranks: int, over: threading.Event) -> None:
    """Rank 1, once the others have ended; notes how long that took."""
    pids = [folder / f"pid {rank}" for rank in range(ranks)]
    while not over.wait(0.1) and not all(path.exists() and path.read_text() for path in pids):
        pass
    numbers = [int(path.read_text()) for path in pids]
    while not over.wait(0.1) and any(alive(pid) for pid in numbers if pid != numbers[1]):
        pass
    (folder / "seconds").write_text(str(time.time() - (folder / "stopped").stat().st_mtime))
    os.kill(numbers[1], signal.SIGKILL)


LAYOUTS = {
    "fsdp 2": (2, ("--training.local_batch_size", "6"), "waiting in all_gather of fsdp (ranks 0, 1)"),
    "pp 2": (
        2,
        (*ALONE, "--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "36"),
        "waiting in send or receive of pp (ranks 0, 1)",
    ),
    "ddp 2 tp 2": (
        4,
        (
            *(*ALONE, "--parallelism.data_parallel_replicate_degree", "2"),
            *("--parallelism.tensor_parallel_degree", "2", "--training.local_batch_size", "18"),
        ),
        " of tp (ranks 0, 1)",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stopped_rank_is_named_with_dimension_and_operation(layout: str, tmp_path: Path) -> None:
    ranks, overrides, waiting = LAYOUTS[layout]
    over = threading.Event()
    stopped = threading.Thread(target=kill_later, args=(tmp_path, ranks, over))
    stopped.start()
    case = Case(overrides=overrides, ranks=ranks, steps=1, at_end=functools.partial(hang, tmp_path))
    (failure,) = observe_all([case])
    over.set()
    stopped.join()
    assert str(failure).startswith(f"ranks ended with {[-9 if rank == 1 else 5 for rank in range(ranks)]}")
    assert float((tmp_path / "seconds").read_text()) < 60, "the timeout and some seconds; torch's own is ten minutes"
    logs = [(tmp_path / f"rank {rank}").read_text() for rank in range(ranks) if rank != 1]
    for log in logs:
        assert "rank 1 not answering; rank" in log, log
        assert waiting in log, log
        assert "(most recent call first)" in log, "the stacks"
    assert len(logs) == 1 or any(" in train_step" in log for log in logs), "where those are whose call has not failed"


def slow_stage(run: train.Run) -> int:
    """A step three times as long as the timeout, in which stage 0 waits for stage 1 again and again."""
    set_timeout(2, run.mesh)
    stage, forward = run.stages[0], run.stages[0].forward

    def slowly(*given: Any, **named: Any) -> Any:
        time.sleep(0.17 * dist.get_rank())
        return forward(*given, **named)

    vars(stage)["forward"] = slowly
    began = time.monotonic()
    with HangWatch(run.mesh):
        train.train_step(run, train.local_batches(run), train.divisor(run))
    return round(time.monotonic() - began)


def test_a_stage_that_is_slow_is_no_hang() -> None:
    ranks, overrides, _ = LAYOUTS["pp 2"]
    (observed,) = observe_all([Case(overrides=overrides, ranks=ranks, steps=1, at_end=slow_stage)])
    assert isinstance(observed, Observation), observed
    assert observed.extra > 5


def test_the_sentence_names_who_is_missing_where() -> None:
    """A rank that lives but is at no collective; ranks that only wait for those that wait."""

    def report(*waits: Wait, failed: bool = False) -> Report:
        return Report(list(waits), failed, "loader.py:80 (_batches)")

    first, behind = Wait("fsdp", [1, 3], "reduce_scatter", 100.0), Wait("tp", [0, 1], "all_gather", 90.0)
    stuck = {0: report(behind, failed=True), 1: report(first), 2: report(Wait("tp", [2, 3], "all_gather", 95.0))}
    said = sentence({**stuck, 3: report()}, 4)
    assert "rank 3 waiting for no other rank, at loader.py:80 (_batches); rank 2 waiting in all_gather of tp" in said
    assert "rank 3 not answering; rank 2 waiting in all_gather of tp (ranks 2, 3) since" in sentence(stuck, 4)
    assert "disagree" in sentence({0: report(first), 1: report(behind)}, 2)
    assert sentence({0: report(failed=True)}, 2).startswith("rank 1 not answering. The stacks")
