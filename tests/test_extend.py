"""docs/extend.md, followed to the letter: each section in a copy of the repository; at most two files and 50 lines."""

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from components.config import ROOT
from tests.limits import run

PAGE = ROOT / "docs" / "extend.md"
PLACE = re.compile(r"\*\*`([^`]+)`\*\*(?:, (below|instead of) `([^`]+)`)?:")


@dataclass
class Edit:
    """A block of lines: a new file, or lines below or instead of one that is there once."""

    path: str
    where: str
    line: str
    block: list[str]

    def apply(self, repository: Path) -> None:
        file = repository / self.path
        if not self.where:
            assert not file.exists(), file
            file.write_text("\n".join(self.block) + "\n")
            return
        lines = file.read_text().splitlines()
        (number,) = (number for number, line in enumerate(lines) if line.strip() == self.line)
        lines[number + (self.where == "below") : number + 1] = self.block
        file.write_text("\n".join(lines) + "\n")


@dataclass
class Section:
    """What the page says of one kind of thing: edits, and the commands that show it."""

    title: str
    edits: list[Edit]
    commands: list[str]


def sections(page: str) -> list[Section]:
    """Edits stand under a line that names their file; what follows `Then` are commands."""
    found = []
    for text in page.split("\n## ")[1:]:
        title, _, body = text.partition("\n")
        edits, commands, place = [], [], None
        for part in re.split(r"\n{2,}(?=\S)", body.strip("\n")):
            head, _, block = part.partition("\n\n")
            if not block:
                continue
            lines = [line.removeprefix("    ") for line in block.rstrip().splitlines()]
            assert all(line.startswith("    ") or not line for line in block.rstrip().splitlines()), f"{title}: {part}"
            place = PLACE.search(head)
            if place:
                edits.append(Edit(place[1], place[2] or "", place[3] or "", lines))
            elif head.endswith("Then"):
                commands += [line for line in lines if line]
        found.append(Section(title, edits, commands))
    return found


def copy_repository(target: Path) -> None:
    """With what Python has compiled of it; the texts are the same, and are not tokenized again."""
    ignored = shutil.ignore_patterns(".git", ".venv", ".cache", "outputs", ".*_cache")
    shutil.copytree(ROOT, target, ignore=ignored)
    tokens = ROOT / ".cache" / "tokens"
    tokens.mkdir(parents=True, exist_ok=True)
    (target / ".cache").mkdir()
    (target / ".cache" / "tokens").symlink_to(tokens)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    copy_repository(tmp_path / "repository")
    return tmp_path / "repository"


SECTIONS = sections(PAGE.read_text())


def test_every_kind_of_thing_has_a_section() -> None:
    assert [section.title for section in SECTIONS] == [
        "A key",
        "An optimizer",
        "A rate schedule",
        "An objective",
        "A pipeline schedule",
        "A dataset format",
        "A metric",
        "An activation",
        "A norm",
        "An attention kernel",
    ]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_it_is_two_files_and_50_lines_at_most(section: Section) -> None:
    assert section.commands
    assert 1 <= len({edit.path for edit in section.edits}) <= 2
    assert sum(len(edit.block) for edit in section.edits) <= 50


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_it_works_as_the_page_says(section: Section, repository: Path) -> None:
    for edit in section.edits:
        edit.apply(repository)
    for command in section.commands:
        words = shlex.split(command.replace("python ", f"{shlex.quote(sys.executable)} ", 1))
        done = run(words, cwd=repository)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"


@pytest.mark.parametrize("tool", ["ruff check .", "ruff format --check .", "pytest -q tests/test_imports.py"])
def test_all_of_it_together_keeps_the_rules_of_the_repository(tool: str, repository: Path) -> None:
    for edit in (edit for section in SECTIONS for edit in section.edits):
        edit.apply(repository)
    done = subprocess.run([sys.executable, "-m", *tool.split()], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
