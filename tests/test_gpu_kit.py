"""python -m tests.benchmarks.gpu without a GPU: its paths, its tables, and that it goes on where it stopped."""

import json
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from components.config import load_config
from models.llama import FLAVORS
from parallelize import groups
from parallelize.mesh import resolve_degrees
from parallelize.rules import check_layout
from tests import ranks
from tests.benchmarks.gpu import __main__ as kit
from tests.benchmarks.gpu import checks, nccl
from tests.benchmarks.gpu.rows import PATHS, SAME_BITS, SIZES, STEPS
from tests.benchmarks.peers.ours import sizes, words
from tests.small import RECIPE, SMALL

SHORT = ("--training.seq_len", "64")
"""Products of bfloat16 take minutes where the CPU has no instructions for them."""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it is for machines without a GPU")


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert kit.main([]) == 2
    assert "there is no GPU" in capsys.readouterr().err


def test_it_checks_measures_profiles_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--cpu", "--folder", str(tmp_path)]
    assert kit.main([*given, "--only", "plain attention"]) == 0
    assert kit.main([*given, "--only", "checkpointing full: here", "--minutes", "1.6"]) == 0  # begins nothing
    assert kit.main([*given, "--only", "checkpointing full: here"]) == 0
    tables = (tmp_path / "tables.md").read_text()
    assert "| bfloat16, plain attention |" in tables
    assert "holds" in tables
    assert "| aten::mm |" in tables
    printed = capsys.readouterr().out
    assert "1 left: the same command goes on" in printed
    rows = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [*map(list, map(json.loads, rows))] == [
        ["machine"],
        ["bfloat16, plain attention"],
        ["debug, 2 × 128, eager, checkpointing full: here"],
        ["profile"],
    ]
    assert kit.main([*given, "--only", "checkpointing full: here"]) == 0
    assert (tmp_path / "results.jsonl").read_text().splitlines() == rows
    (tmp_path / "tables.md").unlink()
    (tmp_path / "speeds.png").unlink()
    assert kit.main(["--tables", "--folder", str(tmp_path)]) == 0
    assert (tmp_path / "tables.md").read_text() == tables
    assert (tmp_path / "speeds.png").read_bytes().startswith(b"\x89PNG")
    assert kit.main(["--tables", "--folder", str(tmp_path / "none")]) == 2
    assert "there are no results in" in capsys.readouterr().err


def test_what_is_missing_comes_first_then_what_is_of_other_code(capsys: pytest.CaptureFixture[str]) -> None:
    today = kit.code()
    layouts, speeds = (
        kit.Round(kind, 8, 60, [(f"{kind} {number}", dict) for number in range(4)]) for kind in ("layouts", "speeds")
    )
    rows: dict[str, Any] = {
        "layouts 0": {"verdict": "holds", "code": today},
        "layouts 1": {"verdict": "holds", "code": "older", "took": 20},
        "layouts 2": {"verdict": "error", "code": today},
        "speeds 1": {"wall": 1.0, "code": "older"},
    }
    planned = kit.plan([layouts, speeds], rows, [" 0", " 1", " 2"])
    names = [name for _, work in planned for name, _ in work]
    assert names == ["layouts 2", "speeds 0", "speeds 2", "layouts 1", "speeds 1"]
    assert [*kit.dry(planned, rows, 76)][-2:] == ["    16 s  speeds 2", "    24 s  end, as far as is known; 2 left"]
    assert kit.main(["--dry", "--minutes", "9", "--folder", str(Path(kit.__file__).parent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "NCCL: " in lines[0]
    assert any(": here" in line for line in lines)


def test_what_was_measured_is_in_the_tables() -> None:
    rows = map(json.loads, (Path(kit.__file__).parent / "results.jsonl").read_text().splitlines())
    known = {name for name, _ in (*checks.checks(), *nccl.checks(), *kit.times(STEPS, "cuda"))}
    assert {name for row in rows for name in row} - known == {"machine", "profile"}


def test_layouts_of_several_ranks_are_compared_with_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over gloo here. The layout of another run is broken, and one that ends in an error says why."""
    monkeypatch.setattr(ranks, "COMPUTING", ranks.COMPUTING)
    given = ["--nccl", "--cpu", "--folder", str(tmp_path)]
    assert kit.main([*given, "--only", "NCCL: tp 2", "--minutes", "0"]) == 0  # begins nothing
    assert "left: the same command goes on" in capsys.readouterr().out
    right = nccl.LAYOUTS["NCCL: fsdp 2"]
    wrong = replace(right, words=(*right.words, "--debug.seed", "7"))
    refused = replace(right, words=(*right.words, "--no.such", "key"))
    monkeypatch.setattr(nccl, "LAYOUTS", {"NCCL: right": right, "NCCL: wrong": wrong, "NCCL: refused": refused})
    assert kit.main(given) == 1
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    rows = {name: row for line in lines for name, row in line.items()}
    assert [row.get("verdict") for row in rows.values()] == [None, "holds", "broken", "error"]
    assert rows["NCCL: right"]["gradient"] <= 1e-5
    assert rows["NCCL: right"]["from the CPU"] <= 1e-5
    assert "weights at step 0" in rows["NCCL: wrong"]["why"]
    assert "unknown table [no]" in rows["NCCL: refused"]["why"]
    assert "| all | 1 of 3 |" in (tmp_path / "tables.md").read_text()
    monkeypatch.setitem(nccl.LAYOUTS, "NCCL: refused", right)
    assert kit.main(given) == 1
    again = (tmp_path / "results.jsonl").read_text().splitlines()[len(lines) :]
    assert [*map(json.loads, again)] == [{"NCCL: refused": rows["NCCL: right"] | {"seconds": ANY, "took": ANY}}], (
        "errors run again"
    )


def test_every_layout_on_nccl_is_accepted() -> None:
    assert len(nccl.LAYOUTS) >= 60
    for each in nccl.LAYOUTS.values():
        config = load_config(["--job.config_file", str(RECIPE), *SMALL, *each.words])
        check_layout(config, resolve_degrees(config, each.ranks))


def nothing_arrives(_: Any, device: torch.device) -> dict[str, float]:
    """Work of a rank whose exchange leaves what was there."""
    vars(torch.distributed)["all_to_all_single"] = lambda *_: None
    return nccl.collectives(_, device)


def test_a_collective_that_gives_what_it_should_not_is_named() -> None:
    world = ranks.Ranks(3, nothing_arrives, {})
    found = world.run(None)
    world.end()
    assert "all_to_all of 8 torch.float32 is wrong on rank 0" in str(found)


def test_ranks_share_gpus_only_where_there_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is then a host of its own to NCCL, and has a GPU that there is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    for name, value in {"RANK": "7", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "NCCL_HOSTID": ""}.items():
        monkeypatch.setenv(name, value)
    for name in groups.SHARED_GPU:
        monkeypatch.setenv(name, "")
    assert groups.init_distributed(60) == torch.device("cuda", 3)
    assert os.environ["NCCL_HOSTID"] == ""
    assert groups.init_distributed(60, share_gpus=True) == torch.device("cuda", 1)
    assert os.environ["NCCL_HOSTID"] == "rank-7"
    assert os.environ["NCCL_NET"] == "Socket"
    monkeypatch.setenv("NCCL_HOSTID", "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert groups.init_distributed(60, share_gpus=True) == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert groups.init_distributed(60) == torch.device("cuda", 0), "a rank that sees its own GPU alone"
    assert os.environ["NCCL_HOSTID"] == ""


def test_checks_at_once_leave_out_what_would_begin_late() -> None:
    """Words that are no path's are said by a row."""
    path = replace(PATHS[0], words=("--no.such", "key"))
    work = [(name, partial(checks.check, path)) for name in ("one", "other")]
    assert {*checks.at_once(2, 0.0, work)} == {("one", None), ("other", None)}
    found = dict(checks.at_once(2, time.monotonic() + 60, work))
    assert {row["verdict"] for row in found.values() if row} == {"refused"}
    assert len(found) == 2


def test_a_path_beyond_its_bar_is_broken_and_one_that_the_device_lacks_is_refused() -> None:
    (path,) = (path for path in PATHS if path.name == "bfloat16, plain attention")
    path = replace(path, run=SHORT)
    assert checks.check(replace(path, bars=(0.0, 0.0)))["verdict"] == "broken"
    found = checks.check(replace(path, words=("--model.attention_kernel", "flex")))
    assert found["verdict"] == "refused"
    assert found["why"].endswith("FlexAttention has no backward on a CPU")


def test_bits_that_differ_are_counted() -> None:
    (same,) = (same for same in SAME_BITS if same.name == "states on the host, AdamW")
    same = replace(same, run=("--training.mixed_precision_param", "float32", *SHORT))
    assert checks.check_bits(same) == {"verdict": "holds", "differ": 0}
    broken = checks.check_bits(replace(same, words=("--optimizer.lr", "1e-2")))
    assert broken["verdict"] == "broken"
    assert broken["differ"] > 0


def test_every_path_and_step_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    base = ["--job.config_file", str(RECIPE), *SMALL]
    for given in [[*base, *SIZES, *path.run, *path.words] for path in PATHS]:
        config = load_config(given)
        check_layout(config, resolve_degrees(config, 1))
    for step in STEPS:
        monkeypatch.setitem(FLAVORS, "peers", sizes(step.job("cuda")))
        config = load_config(words(step.job("cuda")))
        check_layout(config, resolve_degrees(config, 1))
