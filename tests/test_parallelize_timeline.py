"""Timelines of torch's schedules have the idle time and the live micro-batches that docs/pipeline_parallel.md gives."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from components.config import ROOT
from parallelize.schedules import SCHEDULES
from parallelize.timeline import Box, actions, idle, most_alive, simulate

PARTS = {"1F1B": 1, "GPipe": 1, "Interleaved1F1B": 2, "LoopedBFS": 2} | {"InterleavedZeroBubble": 6, "ZBVZeroBubble": 6}
PARTS |= {"DualPipeV": 3}


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
@pytest.mark.parametrize("schedule", PARTS)
def test_idle_time_and_memory_are_those_of_the_formulas(schedule: str, pp: int, micro_batches: int) -> None:
    boxes = simulate(actions(schedule, pp, micro_batches))
    assert idle(boxes) == pytest.approx((pp - 1) / (PARTS[schedule] * micro_batches))
    alive = {
        "GPipe": micro_batches,
        "1F1B": pp,
        "Interleaved1F1B": min(2 * micro_batches, 2 * (pp - 1) + pp + 1),
        "LoopedBFS": 2 * micro_batches,
        "DualPipeV": 2 * pp + 1,
    }.get(schedule, 2 * pp)
    assert most_alive(boxes, 0) == alive


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_micro_batch_passes_every_stage_once(schedule: str) -> None:
    boxes = simulate(actions(schedule, 4, 8))
    stages = 4 * SCHEDULES[schedule].stages_a_rank[0]
    everything = {(stage, number) for stage in range(stages) for number in range(8)}
    forward = [(box.stage, box.micro_batch) for box in boxes if box.kind == "F"]
    backward = [(box.stage, box.micro_batch) for box in boxes if box.kind in ("B", "I")]
    assert sorted(forward) == sorted(backward) == sorted(everything)
    for rank in range(4):
        ends = sorted((box.start, box.end) for box in boxes if box.rank == rank)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


def test_more_stages_a_rank_are_idle_for_less() -> None:
    assert idle(simulate(actions("Interleaved1F1B", 4, 8, 3))) < idle(simulate(actions("Interleaved1F1B", 4, 8, 2)))


def test_ranks_that_wait_for_each_other_are_an_error() -> None:
    with pytest.raises(ValueError, match="ranks wait for ever"):
        simulate([[(("B", 0, 0),), (("F", 0, 0),)], [(("F", 1, 0),), (("B", 1, 0),)]])


def test_idle_counts_the_gap() -> None:
    assert idle([Box(0, "F", 0, 0, 0, 1), Box(1, "F", 1, 0, 1, 2)]) == 1


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "parallelize.timeline", *words, "--output", str(folder / "drawn here.png")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.quick
def test_the_command_draws_a_picture(tmp_path: Path) -> None:
    (tmp_path / "a table.csv").write_text("0F0,0B0\n1F0,1B0\n")
    named = ("1F1B", "DualPipeV", str(tmp_path / "a table.csv"))
    done = run(tmp_path, *named, "--pp", "2", "--microbatches", "6", "--splits", "2")
    assert done.returncode == 0, done.stderr
    assert "a table.csv: idle 100.0% of working time" in done.stdout
    assert "1F1B, sequences in 2 parts: idle 8.3% of working time" in done.stdout
    assert "1F1B: idle 16.7% of working time" in done.stdout
    assert (tmp_path / "drawn here.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "says"), [(("1F1B", "--pp", "4", "--microbatches", "2"), "greater than"), (("1F1b",), "not one of 1F1B")]
)
def test_what_a_schedule_does_not_take_is_said(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = run(tmp_path, *words)
    assert done.returncode == 2
    assert says in done.stderr
    assert not list(tmp_path.iterdir())
