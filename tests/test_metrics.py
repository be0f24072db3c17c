"""Reports of runs: one page that needs nothing else, from what any run has written."""

import base64
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from components.commands.report import main
from components.config import ConfigError, load_config
from components.observe.metrics import Metrics, _flat, _memory_gib, peak_flops
from components.observe.report import Panel, curve_panels, draw, dynamics_panels, points, read_rows, source_panels
from tests.processes import small_disk


def rows(steps: int, **more: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        row = {"step": step, "loss": 8 / step, "grad_norm": None if step == 2 else 1.0, "lr": 1e-3, "mfu": None}
        found.append(row | {"tokens_per_second": 5.0, "memory_gib": 1.0})
        layers = {"tok_embeddings": 1.0, "layers.0": 2.0 * step, "layers.1": 3.0}
        found.append({"step": step, "dynamics": {"weight_norm": layers, "attention_logit_max": {"layers.0": 5.0}}})
    return [*found, {"step": steps, "validation_loss": 7.0, "validation_tokens": 10}]


def write_run(folder: Path, steps: int) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(steps)) + '{"step": 9, "lo')
    about = {"description": "a <run>", "layout": "tp=2", "ranks": 2, "git": {"revision": "f" * 40, "dirty": True}}
    (folder / "run.json").write_text(json.dumps(about))
    return folder


def pictures(page: str) -> list[str]:
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', page)
    return [base64.b64decode(text).decode() for text in found]


def test_one_run_has_a_page_that_needs_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "a run", 30)
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert str(folder / "report.html") in capsys.readouterr().out
    assert "a &lt;run&gt;" in page
    assert "f" * 10 + "+" in page
    # Loss, validation loss, gradient norm, learning rate, speed, memory; and two of the tables of the dynamics.
    assert len(pictures(page)) == 8
    assert all("<svg" in picture for picture in pictures(page))
    assert not re.search(r"https?://|<script|<link", page)


def test_runs_are_drawn_over_each_other(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, steps) for name, steps in (("one", 30), ("two", 20))]
    again = tmp_path / "again"
    again.mkdir()
    namesake = write_run(again / "one", 3)
    assert main(["report", str(folders[0]), str(namesake)]) == 0
    assert f"Inside {namesake}" in (folders[0] / "report.html").read_text()
    assert main(["report", *map(str, folders), "--output", str(tmp_path / "both.html")]) == 0
    page = (tmp_path / "both.html").read_text()
    assert all(f"Inside {name}<" in page for name in ("one", "two"))
    (loss, *_) = curve_panels({folder.name: read_rows(folder / "metrics.jsonl") for folder in folders})
    assert {name: len(x) for name, (x, _) in loss.lines.items()} == {"one": 30, "two": 20}


def test_what_a_row_does_not_have_is_left_out() -> None:
    assert points(rows(3), "grad_norm") == ([1, 3], [1.0, 1.0])
    assert points(rows(3), "mfu") == ([], [])
    assert points(rows(2), "dynamics", "weight_norm", "layers.0") == ([1, 2], [2.0, 4.0])
    assert [list(panel.lines) for panel in dynamics_panels(rows(2))] == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.0"],
    ]
    assert dynamics_panels([{"step": 1, "loss": 2.0}]) == []


def test_the_losses_of_sources_are_drawn_and_tracked(tmp_path: Path) -> None:
    folder, sources = write_run(tmp_path / "mixed", 2), {"a/b": 2.0, "web": None}
    mixed = [{"step": step, "loss": 2.0, "loss_by_source": sources} for step in (1, 2)]
    mixed += [{"step": 2, "validation_loss": 1.0, "validation_loss_by_source": {"web": 1.0}}]
    training, validation = source_panels(mixed)
    assert training.lines == {"a/b": ([1, 2], [2.0, 2.0]), "web": ([], [])}
    assert validation.lines == {"web": ([2], [1.0])}
    assert _flat(mixed[0]) == {"step": 1, "loss": 2.0, "loss_by_source/a/b": 2.0, "loss_by_source/web": None}
    assert "Sources of" not in one_page(folder)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    assert len(pictures(one_page(folder))) == 4
    assert "Sources of the mixture" in one_page(folder)
    assert source_panels(rows(2)) == []


def one_page(folder: Path) -> str:
    assert main(["report", str(folder)]) == 0
    return (folder / "report.html").read_text()


@pytest.mark.parametrize("lines", [0, 1, 30])
def test_any_number_of_lines_can_be_drawn(tmp_path: Path, lines: int) -> None:
    panel = Panel("a title", "", {f"run {number}": ([1, 2], [0.0, None]) for number in range(lines)}, log=True)
    named = Panel("of a$x_{", "", {"run $x_{$d": ([1], [2.0]), "_run": ([1], [2.0])}, log=True)
    draw([panel, panel, named], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_of_no_run_is_told(made: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "nothing"
    if made:
        folder.mkdir()
    assert main(["report", str(folder)]) == 2
    assert f"{folder / 'metrics.jsonl'}: no rows" in capsys.readouterr().err


def test_a_page_replaces_nothing_but_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = '{"step": 1, "loss": 2.0, "time": 0}\n'
    (tmp_path / "metrics.jsonl").write_text(rows)
    for _ in range(2):
        assert main(["report", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "metrics.jsonl")]) == 2
    assert "no page; name another one" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_text() == rows


def test_bad_bytes_and_torn_lines_do_not_block_a_resume(tmp_path: Path) -> None:
    lines = [
        b'{"step": 1, "loss": 2.0}',
        b'{"step": 2, "lo\xff": 1}',
        b"[" * 5000,
        b"[1]",
        b'{"loss": 1}',
        b"",
        b'{"step": 3}',
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines, b'{"step": 4, "lo']))
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 3]
    metrics = metrics_of(tmp_path)
    metrics.resume(1, 10)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.0}\n'


def test_a_panel_without_lines_is_drawn_without_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="error"):
        draw([Panel("loss", "nats", {}, named=True)], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").exists()


def test_rows_of_what_is_looked_at_again_are_dropped(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"step": 1, "validation_loss": 1.0},
        {"step": 2, "loss": 2.0},
        {"step": 2, "dynamics": {}},
        {"step": 2, "validation_loss": 3.0},
    ]
    for looks_again, left in ((False, 4), (True, 3)):
        for name in ("metrics", "samples"):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        metrics_of(tmp_path).resume(2, 10, looks_again)
        for name in ("metrics", "samples"):
            assert read_rows(tmp_path / f"{name}.jsonl") == rows[:left]
    metrics_of(tmp_path, "--checkpoint.enable", "--checkpoint.load_only").resume(1, 10)
    assert read_rows(tmp_path / "metrics.jsonl") == rows[:1]
    (aside,) = tmp_path.glob("metrics-until-*.jsonl")
    assert read_rows(aside) == rows[:3], "the run itself may go on"


def test_a_row_that_finds_no_space_is_said_once_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = metrics_of(tmp_path)
    metrics.resume(0, 0)
    whole, metrics.rows.path = metrics.rows.path, Path("/dev/full")
    for step in (1, 2):
        metrics.log_validation(step, 1.0, 5)
    assert capsys.readouterr().err == "step 1: rows are lost: /dev/full: No space left on device\n"
    metrics.rows.path = whole
    whole.write_text('{"step": 1, "valid')  # what a full disk leaves
    metrics.log_validation(3, 1.0, 5)
    metrics.log_validation(4, 1.0, 5)
    assert [row["step"] for row in read_rows(whole)] == [3, 4]


def test_a_disk_that_is_full_before_the_first_step_refuses_the_run(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8k") as disk:
        (disk / "rest").write_bytes(bytes(4096))
        with pytest.raises(ConfigError, match=r"job\.dump_folder = .*No space left on device"):
            metrics_of(disk).resume(0, 0)


def metrics_of(folder: Path, *words: str) -> Metrics:
    return Metrics(load_config(["--job.dump_folder", str(folder), *words]), 0, torch.device("cpu"), (1, 1), "1 rank")


def test_variants_of_a_gpu_have_their_own_peak_and_unknown_ones_none() -> None:
    known = {"H200": 989e12, "H200 NVL": 835e12, "H100 80GB HBM3": 989e12, "H100 NVL": 835e12, "A100-SXM4-80GB": 312e12}
    known |= {"B200": 2250e12, "GB200": 2500e12}
    unknown = dict.fromkeys(("T4", "RTX A1000 Laptop GPU"))
    assert {name: peak_flops(f"NVIDIA {name}") for name in (*known, *unknown)} == known | unknown


def test_memory_of_a_gpu_is_the_peak_since_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = [3 * 2**30]
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: peaks[-1])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.append(2**30))
    assert [_memory_gib(torch.device("cuda")) for _ in range(2)] == [3, 1]
