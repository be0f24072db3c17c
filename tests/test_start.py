"""What is checked before ranks are started: the environment variables, the folder, the job file."""

import os
from pathlib import Path

import pytest

from components import start
from components.config import ConfigError, JobConfig, load_config
from components.launch import settings as settings_module
from components.launch.settings import Settings, read_settings


def settings(config: JobConfig | None = None, **environment: str) -> Settings:
    return read_settings(config or JobConfig(), environment)


def test_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (settings_module, start):
        monkeypatch.setattr(module, "gpus", lambda: 0)
    assert settings().ranks == 2
    assert settings(load_config(["--parallelism.data_parallel_replicate_degree", "4"])).ranks == 4
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
    with pytest.raises(ConfigError, match='MAX_RESTARTS = "1": with several nodes expected 0'):
        settings(NGPU="2", NNODES="2", RDZV_ENDPOINT="a:1", MAX_RESTARTS="1")
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


def test_without_a_job_file_the_debug_recipe_is_run() -> None:
    recipe = ["--job.config_file", str(start.DEFAULT_RECIPE)]
    assert start.with_recipe(["--training.steps", "3"]) == [*recipe, "--training.steps", "3"]
    for words in (["--job.config_file", "a.toml"], ["--job.config-file=a.toml"]):
        assert start.with_recipe(words) == words
