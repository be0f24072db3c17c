"""Whole runs that lose a rank, are stopped, and lose their launcher; and what a signal does to a rank at any time."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from components.commands import start
from components.data import __main__ as data
from components.launch import orphan, signals
from components.launch.exit_codes import ExitCode
from components.launch.signals import StopSignal
from tests import checkpoints
from tests.harness import observe
from tests.limits import wait_until
from tests.processes import alive
from tests.runs import RUN, Whole, content, descendants, rows, steps_saved

# Step 6 loses rank 1 on the first try. The validation after it then takes 0.2 s a batch, of 30 batches.
LOSES_A_RANK_THEN_VALIDATES_SLOWLY = """
import os, signal, time
from pathlib import Path
step, batches = train.train_step, train.validation_batches
folder = Path(FOLDER)
def train_step(run, batches, valid):
    if run.step == 5 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return step(run, batches, valid)
def validation_batches(*words):
    for number, batch in enumerate(batches(*words)):
        with (folder / f"batches_{rank}").open("a") as file:
            file.write(".")
        time.sleep(0.2)
        yield batch
train.train_step, train.validation_batches = train_step, validation_batches
"""
PRINTS = """
import time
step = train.train_step
def train_step(run, batches, valid):
    print("a line, for which nobody is left to read it", flush=True)
    time.sleep(0.3)
    return step(run, batches, valid)
train.train_step = train_step
"""
KILLS_A_LOADER_WORKER = """
import multiprocessing, os
step = train.train_step
def train_step(run, batches, valid):
    done = step(run, batches, valid)
    if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        for worker in multiprocessing.active_children():
            worker.kill()
    return done
train.train_step = train_step
"""
VALIDATES = ("--validation.enable", "true", "--validation.freq", "6", "--validation.held_out_fraction", "0.05")


@pytest.mark.torchrun
def test_a_run_that_is_killed_stopped_and_orphaned_ends_as_the_unbroken_run(tmp_path: Path) -> None:
    folder, whole = tmp_path / "a run", tmp_path / "unbroken"
    folder.mkdir()
    given = (*VALIDATES, "--validation.local_batch_size", "1", "--training.dataloader.num_workers", "1")

    # A rank is lost: all are started again. Then every process of the run is told to stop, during a validation.
    fault = LOSES_A_RANK_THEN_VALIDATES_SLOWLY.replace("FOLDER", repr(str(folder)))
    first = Whole(folder, *given, fault=fault, MAX_RESTARTS="1")
    try:
        first.wait_until((folder / "killed").exists)
        lost_at = time.monotonic()
        first.wait_until((folder / "batches_0").exists)
        restart_seconds = time.monotonic() - lost_at
        everybody = [first.process.pid, *descendants(first.process.pid)]
        assert len(everybody) > 6, "the launcher, the process that ranks are forked from, ranks, and loader workers"
        for pid in everybody:
            os.kill(pid, signal.SIGTERM)
        code, output = first.end()
    finally:
        first.kill()
    assert code == 128 + signal.SIGTERM, output
    assert "rank 1 was killed by SIGKILL" in output
    assert "stopped by signal 15 after step 6, saved" in output
    assert steps_saved(folder)[-1] == 6
    assert max(len((folder / f"batches_{rank}").read_text()) for rank in (0, 1)) < 15, "validation went on"
    print(f"a restart took {restart_seconds:.1f} s")

    # The launcher is killed, and nobody reads what the ranks print.
    second = Whole(folder, *given, "--metrics.log_freq", "1000", fault=PRINTS)
    try:
        second.wait_for_step(7)
        ranks = second.ranks()
        os.kill(second.process.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        wait_until(lambda: not any(Path(f"/proc/{rank}/fd/1").exists() for rank in ranks))
        seconds = time.monotonic() - killed_at
    finally:
        second.kill()
        second.end()
    saved = steps_saved(folder)[-1]
    assert 6 < saved < 12
    logs = "".join(path.read_text() for path in sorted((folder / "logs").glob("*/rank_0.log"))[-1:])
    assert f"stopped by signal 15 after step {saved}, saved" in logs, "what is printed then goes to the log"
    print(f"ranks were gone {seconds:.1f} s after their launcher")

    # A loader worker is killed: one sentence, and all ranks are started again.
    third = Whole(folder, *given, fault=KILLS_A_LOADER_WORKER, MAX_RESTARTS="1")
    code, output = third.end()
    assert code == 0, output
    assert f"continuing after step {saved}" in output
    assert output.count("rank 1: a DataLoader worker is gone: killed, or out of memory") == 1
    assert "rank 1 ended with exit code 8" in output
    assert "Traceback" not in output
    assert (folder / "loss.png").stat().st_size > 10_000
    assert json.loads((folder / "run.json").read_text())["config"]["training"]["steps"] == 16
    steps = [row["step"] for row in rows(folder) if "loss" in row]
    assert steps == sorted(set(steps))
    observe(*RUN, *VALIDATES, ranks=2, steps=16, folder=str(whole / "checkpoint"))
    assert content(folder, 16) == content(whole, 16)


# Ranks alone


def later(seconds: float, *numbers: int) -> None:
    """Send signals to this process, from a thread."""

    def send() -> None:
        for number in numbers:
            time.sleep(seconds)
            os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


def prepares_data() -> None:
    def prepare_all(config: object) -> None:
        later(0.2, signal.SIGUSR1)
        time.sleep(20)

    vars(data)["prepare_all"] = prepare_all
    start.main(["--job.dump_folder", "/tmp"])


def test_a_signal_ends_the_launcher_while_it_prepares_data() -> None:
    (launcher,) = checkpoints.run(prepares_data)
    assert launcher.code == 128 + signal.SIGUSR1, launcher.error
    assert "SIGUSR1 before ranks were started: nothing to save" in launcher.printed


def starts_up_and_waits(folder: Path) -> bool:
    """Whether rank 0 has gone while rank 1 lets it wait."""
    StopSignal()
    if dist.get_rank() == 0:
        (folder / str(os.getpid())).touch()
        later(0.2, signal.SIGUSR1)
        dist.barrier()
    wait_until(lambda: any(folder.iterdir()))
    wait_until(lambda: not alive(int(next(folder.iterdir()).name)))
    return True


def test_a_signal_ends_a_rank_that_waits_for_others_before_training(tmp_path: Path) -> None:
    first, second = checkpoints.run(starts_up_and_waits, tmp_path, world=2)
    assert second.value, second.error
    assert first.code == 128 + signal.SIGUSR1, first.error
    assert "stopped by signal 10: nothing to save" in first.printed


def one_begins_and_one_leaves() -> None:
    stop = StopSignal()
    if dist.get_rank() == 0:
        later(0.2, signal.SIGTERM)
        with stop.saving():
            time.sleep(10)
    later(0.5, signal.SIGTERM)
    time.sleep(10)


def test_nothing_is_lost_when_one_rank_has_begun_and_another_has_not() -> None:
    outcomes = checkpoints.run(one_begins_and_one_leaves, world=2)
    assert [outcome.code for outcome in outcomes] == [143, 143], outcomes


def trains_until_asked(numbers: tuple[int, ...], window: float) -> tuple[int, int]:
    """The steps made and the code; rank 1 gets these signals, 0.3 s apart."""
    signals.SAME_STOP_SECONDS = window
    stop, steps = StopSignal(), 0
    with stop.saving():
        if dist.get_rank() == 1:
            later(0.3, *numbers)
        while not stop.agreed():
            steps += 1
            time.sleep(0.02)
        time.sleep(1)  # saves
        dist.barrier()
    return steps, stop.code


def test_signals_within_seconds_are_one_and_all_ranks_stop_at_the_same_step() -> None:
    outcomes = checkpoints.run(trains_until_asked, (signal.SIGINT, signal.SIGTERM), 5.0, world=2)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert outcomes[0].value == outcomes[1].value
    assert outcomes[0].value[1] == 128 + signal.SIGINT


def test_a_signal_after_that_ends_the_rank_unsaved_and_says_so() -> None:
    outcomes = checkpoints.run(trains_until_asked, (signal.SIGTERM, signal.SIGTERM), 0.2, world=2)
    assert outcomes[1].code == ExitCode.UNSAVED


def loses_its_launcher(folder: Path) -> int:
    reader, launcher = os.pipe()
    os.environ |= orphan.variables(str(folder / "rank.log"), 5) | {orphan.LAUNCHER_PIPE: str(reader)}
    heard, printed = os.pipe()
    os.dup2(printed, 1)
    os.close(printed)
    orphan.outlive_readers()
    stop = StopSignal()
    with stop.saving():
        os.close(heard)
        os.close(launcher)
        while not stop.agreed():
            print("nobody hears this")
            time.sleep(0.02)
    return stop.code


def test_a_rank_whose_launcher_is_gone_stops_and_prints_to_its_log(tmp_path: Path) -> None:
    (outcome,) = checkpoints.run(loses_its_launcher, tmp_path)
    assert outcome.value == 143, outcome.error
    assert (tmp_path / "rank.log").read_text().splitlines()[0] == "nobody hears this"


def hangs_without_a_launcher() -> None:
    reader, launcher = os.pipe()
    os.environ |= orphan.variables(os.devnull, 0.3) | {orphan.LAUNCHER_PIPE: str(reader)}
    with StopSignal().saving():
        os.close(launcher)
        time.sleep(10)


def test_a_rank_that_hangs_without_a_launcher_ends_itself() -> None:
    (outcome,) = checkpoints.run(hangs_without_a_launcher)
    assert outcome.code == ExitCode.UNSAVED
