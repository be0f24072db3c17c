"""What is checked before ranks are started: the environment variables, the folder, the job file; and how soon."""

import difflib
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.commands import start
from components.config import ROOT, ConfigError, JobConfig, load_config
from components.data import __main__ as prepare
from components.launch import settings as settings_module
from components.launch import signals
from components.launch.settings import Settings, read_settings
from tests.cpu import children_seconds
from tests.jobs import OURS, job
from tests.limits import run


def settings(config: JobConfig | None = None, **environment: str) -> Settings:
    return read_settings(config or JobConfig(), environment)


def test_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (settings_module, start):
        monkeypatch.setattr(module, "gpus", lambda: 0)
    assert settings().ranks == 2
    assert settings(load_config(["--parallelism.data_parallel_replicate_degree", "4"])).ranks == 4
    assert settings(load_config(["--parallelism.data_parallel_shard_degree", "1"])).ranks == 1
    assert settings(NGPU="3").ranks == 3
    four = load_config(["--parallelism.data_parallel_shard_degree", "4"])
    assert settings(four, NNODES="2", RDZV_ENDPOINT="a:1").ranks == 2
    for module in (settings_module, start):
        monkeypatch.setattr(module, "gpus", lambda: 8)
    assert settings().ranks == 8
    assert settings(NGPU="1").ranks == 1
    with pytest.raises(ConfigError, match='NGPU = "16": this node has 8 GPUs'):
        start.check([], {"NGPU": "16"})


def test_wrong_variables_are_all_named() -> None:
    wrong = {
        "NGPU": "two",
        "NNODES": "0",
        "NODE_RANK": "1",
        "RDZV_ENDPOINT": "host",
        "MAX_RESTARTS": "-1",
        "SHUTDOWN_TIMEOUT_SECONDS": "soon",
    }
    with pytest.raises(ConfigError) as caught:
        read_settings(JobConfig(), wrong)
    for name, value in wrong.items():
        assert [line for line in caught.value.messages if line.startswith(f'environment: {name} = "{value}": ')]
    with pytest.raises(ConfigError, match=r'LOG_RANK = "2": expected all, or ranks from 0 to 1'):
        settings(NGPU="2", LOG_RANK="2")
    with pytest.raises(ConfigError, match="RDZV_ENDPOINT is needed too"):
        settings(NGPU="2", NNODES="2")
    assert settings(NGPU="2", MAX_RESTARTS="1").restarts == 1


def test_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    assert [settings(NGPU=ranks).threads for ranks in ("1", "2", "5", "24")] == [12, 6, 2, 1]


def test_the_dump_folder_must_be_one_that_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is not a folder"):
        start.check(["--job.dump_folder", str(tmp_path / "file/outputs")], {"NGPU": "1"})
    start.check(["--job.dump_folder", str(tmp_path / "a/b")], {"NGPU": "1"})
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "checking makes nothing"


def test_checkpoints_must_be_writable_before_a_model_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--job.dump_folder", str(tmp_path), "--checkpoint.enable"]
    (tmp_path / "checkpoint").touch()
    with pytest.raises(ConfigError, match=f"checkpoint.folder.*: {tmp_path}/checkpoint is not a folder"):
        start.check(words, {"NGPU": "1"})
    (tmp_path / "checkpoint").unlink()
    start.check(words, {"NGPU": "1"})
    (tmp_path / "checkpoint").mkdir()
    allowed = os.access
    read_only = str(tmp_path / "checkpoint")  # as a file system mounted so, on which root cannot write either
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != read_only and allowed(path, mode))
    with pytest.raises(ConfigError, match=f"checkpoint.folder.*: no permission to write in {tmp_path}/checkpoint"):
        start.check(words, {"NGPU": "1"})
    start.check([*words, "--checkpoint.load_only"], {"NGPU": "1"})


def test_without_a_job_file_the_debug_recipe_is_run() -> None:
    recipe = ["--job.config_file", str(start.DEFAULT_RECIPE)]
    assert start.with_recipe(["--training.steps", "3"]) == [*recipe, "--training.steps", "3"]
    for words in (["--job.config_file", "a.toml"], ["--job.config-file=a.toml"]):
        assert start.with_recipe(words) == words


def test_garbage_is_collected_while_data_are_prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """But not among what is imported, nor while torch is."""
    seen: list[object] = []
    monkeypatch.setattr(start, "preload", lambda modules, threads: None)
    monkeypatch.setattr(start, "check_model", lambda config, settings: seen.append(gc.isenabled()))
    monkeypatch.setattr(signals, "end_at_signals", lambda when: None)
    monkeypatch.setattr(
        prepare, "prepare_all", lambda config: seen.append((gc.isenabled(), gc.get_freeze_count() > 1e4))
    )
    monkeypatch.setattr(start, "start", lambda *arguments: 0)
    try:
        assert start.main(["--job.dump_folder", str(tmp_path)]) == 0
    finally:
        gc.unfreeze()
    assert seen == [False, (True, True)]


# Through the launcher


def launch(words: list[str], folder: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """The launcher's own process, and its seconds of processor time."""
    environment = {name: value for name, value in os.environ.items() if name not in ("NGPU", "NNODES", "LOG_RANK")}
    code = (
        "import sys\n"
        "from components.commands.start import main\n"
        "code = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules, 'imported torch to refuse a job'\n"
        "sys.exit(code)\n"
    )
    before = children_seconds()
    done = run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **variables},
    )
    return done, children_seconds() - before


@pytest.mark.parametrize(
    ("text", "variables", "expected"),
    [
        ("[training", {}, "job.toml:1:10: not TOML"),
        ("[training]\nstepz = 1\n", {}, "job.toml:2: training.stepz = 1: unknown key; did you mean training.steps?"),
        ('[training]\nsteps = "1"\n', {}, 'job.toml:2: training.steps = "1": expected an integer of 1 or more'),
        ('[checkpoint]\nfolder = "../.."\n', {}, "must be a folder inside job.dump_folder"),
        ("[parallelism]\ndata_parallel_shard_degree = 3\n", {"NGPU": "2"}, "makes 3 ranks, but there are 2. What fits"),
        ("", {"NGPU": "abc"}, 'environment: NGPU = "abc": expected an integer of 1 or more'),
        ("", {"NGPU": "0"}, 'environment: NGPU = "0": expected an integer of 1 or more'),
        ('[job]\ndump_folder = "job.toml/outputs"\n', {}, "job.toml is not a folder"),
    ],
)
def test_a_mistake_ends_the_launch_in_a_second_with_code_2(
    text: str, variables: dict[str, str], expected: str, tmp_path: Path
) -> None:
    job(tmp_path, text)
    done, seconds = launch(["--job.config_file", "job.toml"], tmp_path, **variables)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"], "the dump folder was touched"
    assert seconds < 1.5


def test_help_shows_every_key() -> None:
    done, _ = launch(["--help"], ROOT, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    missing = [key for key in OURS if f"--{key}" not in done.stdout]
    assert not missing, difflib.get_close_matches(missing[0], done.stdout.split())
    assert "origins" not in done.stdout
    for name in ("--check", "NGPU", "NNODES", "NODE_RANK", "RDZV_ENDPOINT", "LOG_RANK", "PYTHON", "exit codes"):
        assert name in done.stdout
