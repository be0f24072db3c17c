"""./run_train.sh --check: a tick or a cross for all that can be known before a run."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.commands import check
from components.config import ROOT, load_config
from components.data import data_spec, prepare
from components.data.__main__ import prepare_all
from tests.small import FLAVORS
from tests.test_tokenizer import save_json_tokenizer

WITHOUT_MEMORY = {name: look for name, look in check.CHECKS.items() if name != "memory"}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NGPU", "NNODES", "RDZV_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(check, "CHECKS", WITHOUT_MEMORY)


def marks(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, str]]:
    """The exit code, and of each check its mark and what follows."""
    code = check.main(list(words))
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    return code, {line[2:19].strip(): line[0] + line[19:] for line in lines}


@pytest.mark.quick
def test_the_command_lists_all_checks_and_leaves_nothing(tmp_path: Path) -> None:
    words = [str(ROOT / "run_train.sh"), "--check", "--job.dump_folder", str(tmp_path / "out"), "--checkpoint.enable"]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith("✓ ") for line in lines)
    assert len(lines) == 15
    assert re.search(r"rank 0 holds 0\.\d\d GiB at the highest point, of ", done.stdout)
    assert list(tmp_path.iterdir()) == []


def test_every_cross_is_listed_and_the_rest_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "lines.jsonl").write_text("no json\n")
    code, seen = marks(
        capsys,
        *("--job.dump_folder", str(tmp_path / "file/out"), "--model.hf_assets_path", str(tmp_path)),
        *("--training.dataset_path", str(tmp_path / "lines.jsonl"), "--checkpoint.initial_load_path", str(tmp_path)),
    )
    assert code == 2
    assert [name for name, mark in seen.items() if mark[0] == "✗"] == [
        "folders",
        "tokenizer",
        "data",
        "initial weights",
    ]
    assert "file is not a folder" in seen["folders"]
    assert "no tokenizer at" in seen["tokenizer"]
    assert "lines.jsonl:1: not JSON" in seen["data"]
    assert "no checkpoint there" in seen["initial weights"]
    assert seen["clock"].startswith("✓")


@pytest.mark.parametrize(
    ("words", "name", "reason"),
    [
        (["--training.stepz", "1"], "configuration", "did you mean training.steps"),
        (["--parallelism.tensor_parallel_degree", "3"], "layout", "which 3 ranks cannot share"),
        (["--model.flavor", "405B", "--checkpoint.enable"], "disk", "a checkpoint takes"),
        (
            ["--training.dataset_path", "short.txt", "--training.seq_len", "100000"],
            "data",
            "less",
        ),
        (["--training.dataset_path", "none"], "data", "no such file"),
        (["--checkpoint.initial_load_path", "run"], "initial weights", "there; did you mean run/checkpoint?"),
    ],
)
def test_a_cross_names_what_is_wrong(
    words: list[str],
    name: str,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("In the beginning")
    (tmp_path / "run/checkpoint/step-3").mkdir(parents=True)
    code, seen = marks(capsys, "--job.dump_folder", str(tmp_path), *words)
    assert code == 2
    assert seen[name][0] == "✗"
    assert reason in seen[name]


def test_a_cache_that_cannot_be_written_is_a_cross_until_it_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("In the beginning " * 200)
    words = ["--job.dump_folder", str(tmp_path), "--training.seq_len", "64", "--training.local_batch_size", "2"]
    words += ["--training.dataset_path", str(tmp_path / "a.txt"), "--training.dataset_cache", str(tmp_path / "cache")]
    (tmp_path / "cache").mkdir()
    allowed = os.access
    refused = str(tmp_path / "cache")
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != refused and allowed(path, mode))
    seen = marks(capsys, *words)[1]
    assert seen["data"].startswith(
        f'✗command line: training.dataset_cache = "{tmp_path}/cache": no permission to write'
    )
    prepare(data_spec(load_config(words).training, "assets/tokenizer"), 1)
    assert marks(capsys, *words)[1]["data"].startswith("✓1 files")


def test_epochs_of_a_mixture_are_said_once_it_is_tokenized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "CHECKS", {"data": check.data})
    words = ["--training.dataset_cache", str(tmp_path / "cache"), "--training.seq_len", "16", "--training.steps", "3"]
    words += ["--training.global_batch_size", "8", "--validation.no_enable"]
    for number, name in enumerate("ab", 1):
        (tmp_path / f"{name}.txt").write_text("In the beginning " * 100 * number)
        source = {"name": name, "dataset_path": str(tmp_path / f"{name}.txt")}
        words += [word for key, value in source.items() for word in (f"--training.mixture[{number}].{key}", value)]
    assert marks(capsys, *words)[1]["data"].endswith("epochs are known once all sources are tokenized")
    prepare_all(load_config(words))
    capsys.readouterr()
    assert "source a: 12 of 24 sequences, " in marks(capsys, *words)[1]["data"]
    once = [*words, "--training.mixture[1].max_epochs", "0.1"]
    assert marks(capsys, *once)[1]["data"].startswith("✗training.mixture: max_epochs = 0.1 of a: ")


@pytest.mark.parametrize("streaming", [[], ["--training.dataset_streaming", "--validation.no_enable"]])
def test_data_that_are_not_read_are_a_cross_where_they_are_most(
    streaming: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "CHECKS", {"data": check.data})
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    data = tmp_path / "data"
    data.mkdir()
    words = ["--training.dataset_path", str(data), "--training.dataset_cache", str(tmp_path / "cache"), *streaming]
    words += ["--training.seq_len", "8"]
    for name in ("a.txt", "b.txt"):
        (data / name).write_text("In the beginning")
    for text, mark in (("text\n", "✓"), ("text\n" * 9, "✗")):
        (data / "e.csv").write_text(text)
        code, seen = marks(capsys, *words)
        assert (code, seen["data"][0]) == (0 if mark == "✓" else 2, mark)
        assert f"not read: 1 file, {len(text)} bytes ({data}/e.csv)" in seen["data"]


def test_what_needs_a_layout_is_left_out_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    _, seen = marks(capsys, "--model.flavor", "none")
    assert seen["tokenizer"] == "-not checked: needs layout"


def test_a_tokenizer_that_does_not_fit_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, seen = marks(capsys, "--job.dump_folder", str(tmp_path), "--model.flavor", "tiny")
    assert f"4096 tokens, but llama tiny has a table of {FLAVORS['tiny'].vocab_size}" in seen["tokenizer"]


def test_the_tokens_between_documents_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--job.dump_folder", str(tmp_path), "--model.hf_assets_path", str(tmp_path)]
    save_json_tokenizer(tmp_path, settings=False)
    _, seen = marks(capsys, *words)
    assert re.fullmatch(r"✓\d+ tokens, and a table of 4,096; documents run together: no file of .*", seen["tokenizer"])
    _, seen = marks(capsys, *words, "--training.dataset_separator", "</s>")
    assert re.fullmatch(r"✓\d+ tokens, and a table of 4,096", seen["tokenizer"])
    _, seen = marks(capsys, *words, "--training.dataset_separator", "</z>")
    assert seen["tokenizer"].startswith('✗command line: training.dataset_separator = "</z>": not a token of ')


def test_memory_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "CHECKS", {"memory": check.memory})
    monkeypatch.setattr(check, "_memory_gib", lambda settings: 0.1)
    code, seen = marks(capsys, "--job.dump_folder", str(tmp_path))
    assert (code, seen["memory"][0]) == (2, "✗")
    assert "of 0.1 GiB" in seen["memory"]


def test_a_port_in_use_and_a_host_that_nobody_knows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "CHECKS", {"port": check.port})
    monkeypatch.setenv("NNODES", "1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RDZV_ENDPOINT", endpoint)
        assert marks(capsys)[1]["port"] == f"✗RDZV_ENDPOINT = {endpoint}: Address already in use"
    assert marks(capsys)[1]["port"] == f"✓{endpoint} is free on this node"
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")  # as in some containers
    monkeypatch.setattr(socket.socket, "settimeout", lambda *_: None)
    monkeypatch.setattr(socket.socket, "connect_ex", lambda *_: 1)
    monkeypatch.setenv("RDZV_ENDPOINT", "192.0.2.1:1")
    assert marks(capsys)[1]["port"] == "✓192.0.2.1:1 is of another node, which does not listen yet"
    monkeypatch.setenv("RDZV_ENDPOINT", "no-such-host.invalid:1")
    assert marks(capsys)[1]["port"].startswith("✗RDZV_ENDPOINT = no-such-host.invalid:1: ")


def test_a_clock_that_is_behind_the_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "CHECKS", {"clock": check.clock})
    step = tmp_path / "checkpoint" / "step-5"
    step.mkdir(parents=True)
    words = ["--job.dump_folder", str(tmp_path)]
    assert marks(capsys, *words)[0] == 0
    os.utime(step, (time.time() + 3600,) * 2)
    code, seen = marks(capsys, *words)
    assert (code, "the newest checkpoint is 3" in seen["clock"]) == (2, True)


def test_packages_on_pythonpath_are_found_by_the_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text('raise SystemExit("the torch on PYTHONPATH")')
    monkeypatch.setattr(check, "CHECKS", {"memory": check.memory})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, seen = marks(capsys)
    assert (code, seen["memory"]) == (2, "✗the torch on PYTHONPATH")
