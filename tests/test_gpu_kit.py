"""python -m tests.benchmarks.gpu without a GPU: its paths, its tables, and that it goes on where it stopped."""

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from components.config import load_config
from models.llama import FLAVORS
from parallelize.mesh import resolve_degrees
from parallelize.rules import check_layout
from tests.benchmarks.gpu import __main__ as kit
from tests.benchmarks.gpu import checks
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
    assert kit.main([*given, "--only", "checkpointing full: here", "--seconds", "100"]) == 0  # begins nothing
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


def test_what_was_measured_is_in_the_tables() -> None:
    rows = map(json.loads, (Path(kit.__file__).parent / "results.jsonl").read_text().splitlines())
    known = {name for name, _ in (*checks.checks(), *kit.times(STEPS, "cuda"))}
    assert {name for row in rows for name in row} - known == {"machine", "profile"}


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
