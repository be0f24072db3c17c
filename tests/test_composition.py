"""docs/composition.md says what was measured, and nothing of other code."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from components.commands.figures import BARS
from tests import composition, matrix
from tests.layouts import AXES, FAMILIES, layout


def row(verdict: str, gradient: float = 0.0, **settings: str) -> dict[str, Any]:
    figures = dict.fromkeys(BARS, 0.0) | {"gradient": gradient}
    refusal = "command line: parallelism.pipeline_parallel_degree = 2: too many" if verdict == "refused" else ""
    chosen = layout(**settings)
    return {
        "layout": dict(chosen.cell),
        "ranks": chosen.ranks,
        "code": composition.code(),
        "verdict": verdict,
        "figures": figures if verdict != "refused" else {},
        "refusal": refusal,
        "seconds": 2.0,
    }


ROWS = [
    row("proven", 3e-7, tp="2"),
    row("proven", 5e-7, tp="2", cp="2"),
    row("refused", cp="2", document_mask="true"),
    row("error", cp="4"),
    row("proven", 4e-7, model=FAMILIES[0], cp="2"),
]


def test_the_page_counts_what_was_measured() -> None:
    text = composition.page(ROWS, AXES, BARS)
    assert re.search(r"Revision \w{7}\. 5 layouts of up to 4 ranks", text)
    assert "3 proven, 1 refused, 1 neither." in text
    assert "| gradient | 5.0e-07 | 1.0e-05 |" in text
    assert "| tokens | equal | equal |" in text
    assert "| `parallelism.pipeline_parallel_degree` | 1 |" in text
    assert "| 5.0e-07 | 4 | tp 2 · cp 2 |" in text
    assert "Neither: {" in text


def test_results_of_other_code_and_torn_lines_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    lines = [json.dumps(each) for each in (*ROWS, ROWS[0] | {"seconds": 3.0}, ROWS[1] | {"code": "other"})]
    path.write_text("\n".join([*lines, lines[0][:50]]))
    found = composition.read(path)
    assert [each["verdict"] for each in found] == [each["verdict"] for each in ROWS]
    assert found[0]["seconds"] == 3.0
    assert composition.read(tmp_path / "nothing") == []


def test_the_page_and_the_picture_have_settings_that_are_in_no_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composition, "PAGE", tmp_path / "composition.md")
    monkeypatch.setattr(composition, "PICTURE", tmp_path / "composition.png")
    composition.write(ROWS, AXES, BARS)
    assert f", {FAMILIES[0]} |" in composition.PAGE.read_text()
    assert composition.PICTURE.read_bytes().startswith(b"\x89PNG")


def test_a_run_adds_its_results_and_a_resumed_one_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a folder" / "results.jsonl"
    path.parent.mkdir()
    path.write_text(composition.line(ROWS[0] | {"code": "other"}))
    refused = layout(dp="fsdp 2", reshard="always", pp="2", schedule="ZBVZeroBubble")
    monkeypatch.setattr(matrix, "spread", lambda seed: [layout(tied="true"), refused])
    assert matrix.main(["--results", str(path)]) == 0
    assert [each["verdict"] for each in composition.read(path)] == ["refused", "proven"]
    assert len(path.read_text().splitlines()) == 2
    capsys.readouterr()
    assert matrix.main(["--results", str(path), "--resume"]) == 0
    assert "'refused': 1}" in capsys.readouterr().out
    assert len(path.read_text().splitlines()) == 2


def test_every_layout_is_kept_in_the_repository_and_then_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PAGE", "PICTURE", "RECORD"):
        monkeypatch.setattr(composition, name, tmp_path / name)
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    given = layout(dp="fsdp 2", reshard="always", pp="2", schedule="ZBVZeroBubble", model=FAMILIES[0])
    larger = layout(dp="ddp 2", cp="4")
    monkeypatch.setattr(matrix, "main_layouts", lambda product_ranks: [given, larger])
    assert matrix.main(["--all", "--set", "dp=fsdp 2"]) == 0
    assert not composition.PAGE.exists()
    assert matrix.main(["--all", "--resume", "--most-ranks", "4"]) == 0
    assert "1 more were not run with this code" in composition.PAGE.read_text()
    assert composition.RECORD.read_text().count("\n") == 1
    assert [row["layout"] for row in composition.read(composition.RECORD)] == [dict(given.cell)]
    assert "1 layouts of up to" in composition.PAGE.read_text()
