"""The pages say what is there: keys, files, messages; the README leads to the index, and the index to every page."""

import ast
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from assets.figures.make import visible_rows
from components.config import ROOT
from components.config.keys import ARRAYS, NAMES, TABLES

PAGES = [ROOT / "README.md", ROOT / "recipes/README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = [ROOT / name for name in ("components", "models", "parallelize")]
SOURCES = [ROOT / "train.py", *(path for folder in FOLDERS for path in sorted(folder.rglob("*.py")))]


def named(page: Path) -> list[str]:
    """Texts in backticks that begin and end on one line."""
    return re.findall(r"`([^`\n]+)`", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_and_link_of_a_page_is_there(page: Path) -> None:
    tables = "|".join(re.escape(table) for table in sorted(TABLES, key=len, reverse=True) if table)
    keys = [match[1] for text in named(page) if (match := re.match(rf"(?:--)?((?:{tables})\.\w+)(?=[ =\]]|$)", text))]
    files = {
        "metrics.jsonl",
        "samples.jsonl",
        "evaluation.jsonl",
        "model.safetensors",
        *(path.name for path in SOURCES),
    }
    assert [key for key in keys if key not in {*NAMES, *ARRAYS, "checkpoint.no_enable"} | files] == []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target
        headings = (
            re.findall(r"^#+ (.*)", (page.parent / target if target else page).read_text(), re.M) if anchor else []
        )
        anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor[1:] in anchors, anchor


def test_the_readme_leads_to_the_index_and_the_index_to_every_page() -> None:
    index = ROOT / "docs/README.md"
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)/]*)\)", index.read_text())
    assert sorted(links) == sorted(path.name for path in index.parent.glob("*.md") if path != index)


def test_the_figure_of_windows_is_of_the_models_here() -> None:
    """If it is not: python -m assets.figures.make"""
    with Image.open(ROOT / "assets/figures/visible.png") as figure:
        assert figure.info["Description"] == json.dumps(visible_rows())


def test_every_message_that_is_explained_is_one_of_ours() -> None:
    """Each quoted message is in the source, apart from its numbers and ellipses."""
    rows = re.findall(r"^\| `(.+?)`", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    literals = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    source = "\n".join(value for value in literals if isinstance(value, str))
    quoted = [
        row for row in rows if " " in row and "NET/" not in row and "system error" not in row and " = " not in row
    ]
    assert len(quoted) > 15
    for row in quoted:
        for part in re.split(r"\d+|…|=$|SIGKILL|training\.\S+| at RDZV\S+", row):
            assert part.strip(" =;:.") in source, f"{row}: {part}"
