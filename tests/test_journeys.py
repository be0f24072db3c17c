"""docs/journeys.md, followed to the letter: each journey's commands, one after another in a copy of the repository."""

import json
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest

from components.config import ROOT
from components.observe.metrics import read_rows
from tests.limits import run
from tests.test_extend import copy_repository

PAGE = (ROOT / "docs/journeys.md").read_text()
SCREEN = 56
"""Lines that the commands of one journey may have."""


def commands() -> list[str]:
    """The first indented block of each journey."""
    sections = re.split(r"^## \d\. .*$", PAGE, flags=re.M)[1:]
    blocks = [re.search(r"(?:^(?:    .*)?\n)*^    .*$", section.strip("\n"), re.M) for section in sections]
    return [textwrap.dedent(block[0]).strip() for block in blocks if block]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("journeys") / "a clone"
    copy_repository(copy)
    return copy


def follow(repository: Path, script: str) -> str:
    """What the commands print; the environment is that of `source .venv/bin/activate`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NGPU")}
    settings = {"PATH": path, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = run(["bash", "-e", "-c", script], cwd=repository, env={**kept, **settings})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row]


def test_each_journey_fits_a_screen() -> None:
    assert [len(each.splitlines()) <= SCREEN for each in commands()] == [True] * 3


@pytest.mark.slow
@pytest.mark.torchrun
def test_each_journey_ends_as_the_page_says(repository: Path) -> None:
    first, second, third = commands()

    said = follow(repository, first)
    assert "|genesis|" in said
    assert (repository / "outputs/mine/report.html").exists()
    curve = losses(repository / "outputs/mine")
    assert curve[-1] < curve[0] - 2

    said = follow(repository, second)
    *_, whole, adapted = said.splitlines()
    assert whole == adapted
    assert whole.endswith("<|end_of_text|>")  # within 60 tokens
    accuracy = [
        row["validation_reward_accuracy"]
        for row in read_rows(repository / "outputs/preferred/metrics.jsonl")
        if "validation_reward_accuracy" in row
    ]
    assert accuracy[-1] > max(0.7, accuracy[0])

    said = follow(repository, third)
    assert "the same run" in said
    assert "preempted" in said
    assert "a new layout, because run.json has one of 4 ranks" in said
    moved = losses(repository / "outputs/moved")
    assert len(moved) == len(curve) == 150
    assert max(abs(one - other) / one for one, other in zip(curve, moved, strict=True)) < 1e-3
    run_json = json.loads((repository / "outputs/moved/run.json").read_text())
    assert run_json["ranks"] == 2
