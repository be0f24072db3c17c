"""Job files: every mistake is refused, with its place and what is right; nothing that was given is ignored."""

import argparse
import functools
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from components.config import ROOT, ConfigError, absolute_tables, from_json, load, load_config, to_dict, to_json
from components.config.bounds import path_argument
from components.config.files import read_json, read_json_as
from components.config.keys import ARRAYS, FIELDS, describe_type
from tests.jobs import OURS, job, refused

RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))


# Wrong types and values

WRONG = """\
[training]
steps = "100"
seq_len = 1.5
local_batch_size = 0
global_batch_size = -2
max_norm = 0.0
dataset = ""
dataset_errors = "ignore"
mixed_precision_param = "float16"
gc_freq = true
[training.dataloader]
num_workers = -1
pin_memory = 1
prefetch_factor = 0
[optimizer]
lr = "3e-4"
beta1 = 1.0
beta2 = -0.1
eps = nan
weight_decay = inf
name = "SGD"
implementation = "triton"
[lr_scheduler]
warmup_steps = 2.5
decay_ratio = 1.5
decay_type = "exponential"
[checkpoint]
enable = "false"
interval = 0
keep_latest_k = -1
exclude_from_loading = "optimizer"
load_step = "newest"
[parallelism]
tensor_parallel_degree = 0
context_parallel_degree = "2"
data_parallel_shard_degree = -3
pipeline_parallel_degree = 1.0
fsdp_reshard_after_forward = false
[metrics]
log_freq = 1979-05-27
[validation]
freq = [10]
held_out_fraction = 1
[job]
dump_folder = 7
[debug]
seed = -5
"""


def test_all_wrong_types_and_values_are_listed_at_once(tmp_path: Path) -> None:
    path = job(tmp_path, WRONG)
    expected = [
        (number, line.partition(" =")[0])
        for number, line in enumerate(WRONG.splitlines(), 1)
        if not line.startswith("[")
    ]
    messages = refused("--job.config_file", path)
    assert len(messages) == len(expected) >= 30
    for (number, key), message in zip(expected, messages, strict=True):
        assert message.startswith(f"{path}:{number}: "), message
        assert f".{key} = " in message, message
        assert ": expected " in message, message


def test_a_number_in_the_place_of_a_table(tmp_path: Path) -> None:
    path = job(tmp_path, "training = 5\n")
    assert refused("--job.config_file", path) == [f"{path}:1: training = 5: [training] is a table, not a key"]


def test_a_key_outside_of_tables_and_one_of_a_short_table_are_told(tmp_path: Path) -> None:
    path = job(tmp_path, "foo = 3\nbase_model = 'x'\n[lora]\nzzz = 1\n")
    outside, theirs, short = refused("--job.config_file", path)
    assert outside == f"{path}:1: foo = 3: unknown key, and in no table"
    assert "here it is model.flavor, a folder, with checkpoint.initial_load_in_hf = true" in theirs
    assert short.startswith(f"{path}:4: lora.zzz = 1: unknown key; [lora] has rank, alpha, ")


def test_an_integer_is_a_number_but_no_other_type_is_converted(tmp_path: Path) -> None:
    config = load_config(["--job.config_file", str(job(tmp_path, "[training]\nmax_norm = 2\n"))])
    assert config.training.max_norm == 2.0
    assert isinstance(config.training.max_norm, float)


# The file and the command line


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[training", ":1:10:"),
        ("[training]\nsteps = \n", ":2:9:"),
        ("[training]\nsteps = 1\nsteps = 2\n", ":3:10:"),
        ("[training]\n[training]\n", ":2:10:"),
        ('[job]\ndescription = "open\n', ":2:20:"),
    ],
)
def test_malformed_toml_has_a_line_and_a_column(text: str, place: str, tmp_path: Path) -> None:
    path = job(tmp_path, text)
    (message,) = refused("--job.config_file", path)
    assert message.startswith(f"{path}{place} not TOML: "), message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "cannot read" in refused("--job.config_file", tmp_path / "none.toml")[0]
    assert "cannot read" in refused("--job.config_file", tmp_path)[0]
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9\n")
    assert refused("--job.config_file", tmp_path / "latin.toml")[0].endswith("not UTF-8 at byte 5")


def test_the_mark_that_windows_editors_put_first_is_no_content(tmp_path: Path) -> None:
    path = job(tmp_path, "\ufeff[training]\nsteps = 3\nstepz = 4\n")
    assert refused("--job.config_file", path) == [
        f"{path}:3: training.stepz = 4: unknown key; did you mean training.steps?"
    ]
    path.write_text("\ufeffjob.description = 'one'\r\n", encoding="utf-8")
    assert load_config(["--job.config_file", str(path)]).job.description == "one"
    path.write_text('\ufeff{"a": 1}', encoding="utf-8")
    assert read_json(path) == read_json_as(dict[str, int], path) == {"a": 1}


PATHS = sorted(
    key for key, annotation in FIELDS.items() if load.is_path(annotation) and key.rpartition(".")[0] not in ARRAYS
)
DATA = ("training.dataset_path", "validation.dataset_path", "validation.text_path")
"""Paths that may also be URLs of stores."""
NEEDED = [
    *("--distill.alpha", "0.5"),
    "--validation.enable",
    "--lora.rank",
    "4",
    "--training.dataset_format",
    "chat",
    "--training.dataset_path",
    "x",
]
"""What some paths need: adapters, chats, validations."""


def test_every_key_of_a_path_is_known_as_one() -> None:
    ends = ("path", "folder", "file", "csv", "cache", "chat.template")
    named = {key for key in FIELDS if key.endswith(ends) and key.rpartition(".")[0] not in ARRAYS}
    inside = {"checkpoint.folder", "metrics.save_tb_folder"}
    inside |= {f"profiling.save_{what}_folder" for what in ("traces", "memory_snapshot")}
    assert {*PATHS} == named - inside


@pytest.mark.parametrize("key", PATHS)
def test_a_path_is_one_of_this_machine(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").write_text("")
    table, _, name = key.rpartition(".")
    config: Any = load_config([*NEEDED, f"--{key}", "~/x"])
    assert functools.reduce(getattr, [*table.split("."), name], config) == f"{tmp_path}/x"
    for path, reason in {
        "ftp://bucket/x": "expected a URL that begins with s3://" if key in DATA else "a URL; expected a path of this",
        "~nobody-of-this-name/x": "no home folder of this user",
        "$HOME/x": "variables are not expanded here",
        "/data/${USER}_runs/x": "variables are not expanded here",
    }.items():
        (message,) = refused(f"--{key}", path)
        assert message.startswith(f'command line: {key} = "{path}": {reason}')


def test_a_folder_may_have_any_name_if_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("$a", "~b", "c:d"):
        (tmp_path / name).mkdir()
        assert load_config(["--job.dump_folder", f"./{name}/new"]).job.dump_folder == f"./{name}/new"


def test_paths_of_run_json_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer's may start at the repository, the cache's always does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    config = load_config(NEEDED + [word for key in PATHS for word in (f"--{key}", "own") if key != "job.config_file"])
    tables = absolute_tables(config)
    found = {key: functools.reduce(dict.__getitem__, key.split("."), tables) for key in PATHS}
    right = dict.fromkeys(PATHS, str(tmp_path / "own"))
    assert found == right | {"job.config_file": None, "training.dataset_cache": str(ROOT / "own")}
    assert tables["checkpoint"]["folder"] == "checkpoint"
    assert tables["metrics"] == to_dict(config)["metrics"]
    default = absolute_tables(load_config([]))
    assert default["model"]["hf_assets_path"] == str(ROOT / "assets/tokenizer")
    assert default["job"]["dump_folder"] == str(tmp_path / "outputs")
    assert default["parallelism"]["pipeline_parallel_schedule_csv"] == ""


@pytest.mark.parametrize("path", ["s3://bucket/x", "~nobody-of-this-name/x", "$HOME/x"])
def test_a_path_of_a_command_is_one_of_this_machine(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=path_argument)
    assert parser.parse_args(["~"]).folder == Path.home()
    with pytest.raises(SystemExit):
        parser.parse_args([path])
    assert "error: argument folder: " in (said := capsys.readouterr().err)
    assert "invalid" not in said


def test_overrides(tmp_path: Path) -> None:
    path = job(tmp_path, "[training]\nsteps = 1\nseq_len = 64\n")
    words = (
        "--training.steps 400 --training.steps=300 --checkpoint.enable --metrics.no_color_printing --optimizer.lr 1e-3"
    )
    lists = ["--checkpoint.exclude-from-loading", '["optimizer"]', "--job.description", "42", "--optimizer.lr", "1e-3"]
    config = load_config([*words.split(), *lists, "--job.config_file", str(path)])
    assert (config.training.steps, config.training.seq_len) == (300, 64)
    assert config.checkpoint.enable
    assert not config.metrics.color_printing
    assert config.optimizer.lr == 1e-3
    assert config.checkpoint.exclude_from_loading == ["optimizer"]
    assert config.job.description == "42"
    assert config.origins["training.steps"] == "command line"
    assert config.origins["training.seq_len"] == f"{path}:3"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("training.steps 3", "expected --table.key value"),
        ("--steps 3", "expected --table.key value"),
        ("recipes/llama8b.toml", "did you mean --job.config_file recipes/llama8b.toml?"),
        ("--training.steps", "a value is missing"),
        ("--training.steps --checkpoint.enable", "a value is missing"),
        ("--training.steps ten", "expected an integer"),
        ("--training.steps 1.5", "expected an integer"),
        ("--training.stepz 3", "did you mean training.steps?"),
        ("--checkpoint.enable maybe", "expected true or false"),
    ],
)
def test_wrong_overrides(words: str, reason: str) -> None:
    (message,) = refused(*words.split())
    assert message.startswith("command line: ")
    assert reason in message


def test_a_job_file_that_is_not_there_is_told_with_the_nearest() -> None:
    path = ROOT / "recipes"
    (message,) = refused("--job.config_file", str(path / "llama70.toml"))
    assert message.endswith(f"No such file or directory; did you mean {path / 'llama70b.toml'}?")


def test_every_key_says_what_it_takes() -> None:
    assert {key if key in OURS else key.rpartition(".")[0] for key in FIELDS} == set(OURS)
    assert all(describe_type(annotation) for annotation in FIELDS.values())


@pytest.mark.parametrize(
    "key",
    [
        "checkpoint.folder",
        "metrics.save_tb_folder",
        "profiling.save_traces_folder",
        "profiling.save_memory_snapshot_folder",
    ],
)
def test_a_folder_does_not_leave_the_dump_folder(key: str, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    dump.mkdir()
    (dump / "link").symlink_to(tmp_path)
    for folder in ("../..", "..", "a/../..", ".", "/tmp", "link", "link/inside"):
        (message,) = refused("--job.dump_folder", dump, f"--{key}", folder)
        assert message == f'command line: {key} = "{folder}": must be a folder inside job.dump_folder = {dump}'
    load_config(["--job.dump_folder", str(dump), f"--{key}", "inside/deeper"])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_recipe_loads_and_travels_as_json(path: Path) -> None:
    config = load_config(["--job.config_file", str(path)])
    assert config.training.global_batch_size != -1, "a recipe trains the same at every number of ranks"
    assert from_json(to_json(config)) == config


def test_every_key_is_read_somewhere() -> None:
    """A setting is honoured or refused: each name is an attribute that some code takes."""
    folders = [(ROOT / "components").rglob("*.py"), (ROOT / "parallelize").glob("*.py"), (ROOT / "models").glob("*.py")]
    files = [ROOT / "train.py", *itertools.chain(*folders)]
    code = "\n".join(file.read_text() for file in files if file.name not in ("tables.py", "names.py"))
    code += "\n".join(re.findall(r"self\.\w+", (ROOT / "components/config/tables.py").read_text()))
    unread = [key for key in OURS if not re.search(rf"\.{key.rpartition('.')[2]}\b|\"{key.rpartition('.')[2]}\"", code)]
    assert not unread


def test_a_repository_from_which_python_cannot_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "ROOT", Path("/a:b"))
    with pytest.raises(ConfigError, match=r"^/a:b: Python cannot import from a path with a colon"):
        load.python_path()
