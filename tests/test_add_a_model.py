"""docs/add_a_model.md, followed to the letter: three files in a copy of the repository, and nothing else is edited."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from components.config import ROOT
from tests.test_extend import copy_repository

PAGE = (ROOT / "docs" / "add_a_model.md").read_text()


def files_of_the_page() -> dict[str, str]:
    """Each indented block under a line that names its file in bold: path -> content."""
    found = {}
    for match in re.finditer(r"^\*\*\d\. `([^`]+)`\*\*.*?\n\n((?:    [^\n]*\n|\n)+)", PAGE, re.M | re.S):
        lines = match[2].splitlines()
        found[match[1]] = "\n".join(line.removeprefix("    ") for line in lines).strip() + "\n"
    return found


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("copy") / "repository"
    copy_repository(copy)
    for path, content in files_of_the_page().items():
        assert not (copy / path).exists()
        (copy / path).write_text(content)
    return copy


def python(repository: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_it_is_three_files_of_at_most_150_lines() -> None:
    found = files_of_the_page()
    assert [*found] == ["models/palm.py", "parallelize/palm.py", "recipes/palm_debug.toml"]
    assert sum(len(content.splitlines()) for path, content in found.items() if not path.startswith("models")) <= 150


def test_it_trains(repository: Path) -> None:
    words = (
        *("--training.steps", "40", "--training.seq_len", "64", "--validation.enable", "false"),
        *("--training.global_batch_size", "2", "--training.local_batch_size", "2"),
    )
    said = python(repository, "train.py", "--job.config_file", "recipes/palm_debug.toml", *words)
    losses = [float(match) for match in re.findall(r"loss +([\d.]+)", said)]
    assert losses[0] > 8
    assert losses[-1] < losses[0] - 1


def test_the_matrix_proves_it(repository: Path) -> None:
    """Layouts drawn from all axes, but of the new family; compiled ones take several times as long."""
    fixed = ("--set", "model=palm", "--set", "compile=false")
    said = python(repository, "-m", "tests.matrix", "--random", "4", "--most-ranks", "4", *fixed)
    assert said.count(" proven ") == 4, said
    assert "broken" not in said
    assert "error" not in said
    assert "model palm" in said


def test_its_imports_are_right(repository: Path) -> None:
    python(repository, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_imports.py")


def test_hugging_face_has_none_and_that_is_said(repository: Path) -> None:
    words = ("--job.config_file", "recipes/palm_debug.toml", "--checkpoint.enable", "--checkpoint.last_save_in_hf")
    command = [sys.executable, "-m", "components.commands.start", *words]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "checkpoint.last_save_in_hf = true: Hugging Face has no palm" in done.stderr
