"""Job files: every mistake is refused, with its place and what is right; nothing that was given is ignored."""

import difflib
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.config import ROOT, ConfigError, JobConfig, load_config, to_dict
from components.config.keys import FIELDS, describe_type

RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))


def _keys(tables: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tables.items():
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


OURS = dict(_keys(to_dict(JobConfig())))
_TITAN = tomllib.loads((ROOT / "tests/titan_v02_keys.toml").read_text(encoding="utf-8"))
TITAN_UNSET: list[str] = _TITAN.pop("unset")
TITAN = dict(_keys(_TITAN))
KEYS = sorted({*OURS, *TITAN, *TITAN_UNSET})


def job(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(*words: object) -> list[str]:
    """The messages for this command line."""
    with pytest.raises(ConfigError) as caught:
        load_config([str(word) for word in words])
    return caught.value.messages


def as_toml(value: Any) -> str:
    return json.dumps(value)


# Unknown keys


def misspellings(word: str) -> Iterator[str]:
    """One letter dropped, doubled, swapped with the next or replaced: at the start, in the middle, at the end."""
    for at in (0, len(word) // 2, len(word) - 1):
        yield word[:at] + word[at + 1 :]
        yield word[: at + 1] + word[at:]
        yield word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :]
        yield word[:at] + ("x" if word[at] != "x" else "y") + word[at + 1 :]


def suggestions(folder: Path, typos: dict[str, str]) -> tuple[int, list[str]]:
    """How many of these misspelt keys are refused, and the messages that don't name the right one."""
    path = job(folder, "\n".join(f"{key} = 1" for key in typos))
    messages = {}
    for message in refused("--job.config_file", path):
        place, _, rest = message.partition(": ")
        typo, _, reason = rest.partition(" = 1: ")
        assert place.startswith(f"{path}:"), message
        assert reason.startswith("unknown"), message
        messages[typo] = reason
    assert set(messages) == set(typos)
    return len(messages), [
        f"{typo}: {messages[typo]}" for typo, right in typos.items() if f"did you mean {right}?" not in messages[typo]
    ]


def report(capsys: pytest.CaptureFixture[str], what: str, count: int, wrong: list[str]) -> None:
    with capsys.disabled():
        print(f"\n{what}: {count} refused of {count}, {1 - len(wrong) / count:.2%} with the right suggestion")


def test_every_misspelt_key_is_refused_with_the_right_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typos = {
        f"{table}.{typo}": key
        for key in KEYS
        for table, _, last in [key.rpartition(".")]
        for typo in misspellings(last)
        if typo and typo != last and f"{table}.{typo}" not in KEYS
    }
    count, wrong = suggestions(tmp_path, typos)
    report(capsys, "misspelt keys", count, wrong)
    assert count > 1500
    assert len(wrong) <= 0.05 * count, wrong


def test_every_misspelt_table_is_refused_with_the_right_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typos = {
        f"{typo}.{last}": key
        for key in KEYS
        for table, _, last in [key.rpartition(".")]
        for typo in misspellings(table)
        # ".." and a first or last dot are not TOML.
        if typo != table and "" not in typo.split(".") and f"{typo}.{last}" not in KEYS
    }
    count, wrong = suggestions(tmp_path, typos)
    report(capsys, "misspelt tables", count, wrong)
    assert count > 1500
    assert len(wrong) <= 0.05 * count, wrong


SHARD = "parallelism.data_parallel_shard_degree"
REPLICATE = "parallelism.data_parallel_replicate_degree"
RESHARD = "parallelism.fsdp_reshard_after_forward"
TENSOR, CONTEXT, PIPELINE = (f"parallelism.{axis}_parallel_degree" for axis in ("tensor", "context", "pipeline"))

PEERS = [
    # accelerate
    ("dp_replicate_size", 2, [REPLICATE]),
    ("dp_shard_size", 2, [SHARD]),
    ("tp_size", 2, [TENSOR]),
    ("cp_size", 2, [CONTEXT]),
    # axolotl
    ("tensor_parallel_size", 2, [TENSOR]),
    ("context_parallel_size", 2, [CONTEXT]),
    ("sequence_parallel_degree", 2, [CONTEXT]),
    # Fast-LLM
    ("tensor_parallel", 2, [TENSOR]),
    ("pipeline_parallel", 2, [PIPELINE]),
    ("sequence_data_parallel", 2, [CONTEXT]),
    ("sequence_tensor_parallel", True, ["parallelism.sequence_parallel"]),
    ("breadth_first_micro_batches", 4, ["parallelism.pipeline_parallel_schedule"]),
    ("depth_first_micro_batches", 4, ["training.global_batch_size"]),
    ("micro_batch_splits", 2, [CONTEXT]),
    ("zero_stage", 1, [RESHARD, '"never" for stages 1 and 2']),
    ("zero_stage", 2, [RESHARD, '"never" for stages 1 and 2']),
    ("zero_stage", 3, [RESHARD, '"always" for stage 3']),
    # FSDP1
    ("fsdp_sharding_strategy", "FULL_SHARD", [f"{SHARD} = -1", f'{RESHARD} = "always"']),
    ("fsdp_sharding_strategy", "SHARD_GRAD_OP", [f"{SHARD} = -1", f'{RESHARD} = "never"']),
    ("fsdp_sharding_strategy", "NO_SHARD", [f"{SHARD} = 1", REPLICATE]),
    ("fsdp_sharding_strategy", "HYBRID_SHARD", [REPLICATE, f"{SHARD} = -1", f'{RESHARD} = "always"']),
]


@pytest.mark.parametrize("table", ["parallelism.", "training.", "fsdp.", ""])
def test_keys_of_other_systems_are_refused_with_ours(table: str, tmp_path: Path) -> None:
    named = 0
    for key, value, ours in PEERS:
        path = job(tmp_path, f"{table}{key} = {as_toml(value)}")
        (message,) = refused("--job.config_file", path)
        assert message.startswith(f"{path}:1: {table}{key} = {as_toml(value)}: "), message
        named += all(part in message for part in ours)
    assert named >= 0.95 * len(PEERS)


# torchtitan v0.2


def test_every_default_of_torchtitan_is_taken_or_refused_by_name(tmp_path: Path) -> None:
    taken = []
    for key, value in TITAN.items():
        path = job(tmp_path, f"{key} = {as_toml(value)}")
        try:
            load_config(["--job.config_file", str(path)])
            taken.append(key)
        except ConfigError as error:
            (message,) = error.messages
            place, _, reason = message.partition(f"{key} = {value!r}: " if isinstance(value, list) else f"{key} = ")
            assert place == f"{path}:1: ", message
            assert len(reason) > 10, message
            assert "unknown" not in reason, message
            assert "expected" not in reason, f"{message}: a type or bound that torchtitan's own default breaks"
    assert len(taken) >= 0.9 * len(TITAN)


def test_torchtitan_key_that_is_unset_there_is_known_here(tmp_path: Path) -> None:
    for key in TITAN_UNSET:
        path = job(tmp_path, f"fault_tolerance.enable = true\nvalidation.enable = true\n{key} = [[[]]]")
        *_, message = refused("--job.config_file", path)
        assert message.startswith(f"{path}:3: {key} = "), message
        assert "unknown" not in message


def test_torchtitan_spellings_keep_their_meaning(tmp_path: Path) -> None:
    text = '[model]\nname = "llama3"\nflavor = "debugmodel"\n[metrics]\ndisable_color_printing = true\n'
    config = load_config(["--job.config_file", str(job(tmp_path, text))])
    assert (config.model.name, config.model.flavor, config.metrics.color_printing) == ("llama", "debug", False)
    assert not load_config(["--metrics.disable_color_printing"]).metrics.color_printing


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


def test_an_integer_is_a_number_but_no_other_type_is_converted(tmp_path: Path) -> None:
    config = load_config(["--job.config_file", str(job(tmp_path, "[training]\nmax_norm = 2\n"))])
    assert config.training.max_norm == 2.0
    assert isinstance(config.training.max_norm, float)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("--lr_scheduler.total_steps 300 --training.steps 400", "lr_scheduler.total_steps"),
        ("--checkpoint.initial_load_in_hf", "checkpoint.initial_load_in_hf"),
        (
            "--checkpoint.initial_load_in_hf --checkpoint.initial_load_path x --checkpoint.no_initial_load_model_only",
            "checkpoint.initial_load_model_only",
        ),
        ("--checkpoint.last_save_in_hf", "checkpoint.last_save_in_hf"),
        ("--checkpoint.last_save_in_hf --checkpoint.enable --checkpoint.load_only", "checkpoint.last_save_in_hf"),
        ("--checkpoint.export_dtype float16 --checkpoint.enable", "checkpoint.export_dtype"),
        ("--training.dataloader.persistent_workers", "training.dataloader.persistent_workers"),
        ("--training.dataloader.prefetch_factor 2", "training.dataloader.prefetch_factor"),
        ("--training.global_batch_size 12 --training.local_batch_size 8", "training.global_batch_size"),
        ("--debug.deterministic_warn_only", "debug.deterministic_warn_only"),
        ("--profiling.profile_freq 3", "profiling.profile_freq"),
        (
            "--parallelism.context_parallel_method ulysses --parallelism.context_parallel_rotate_method alltoall",
            "parallelism.context_parallel_rotate_method",
        ),
        (
            "--activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option 0",
            "activation_checkpoint.selective_ac_option",
        ),
        ("--quantize.linear.float8.emulate", "quantize.linear.float8.emulate"),
        ("--quantize.linear.float8.recipe_name rowwise", "quantize.linear.float8.recipe_name"),
        (
            "--validation.held_out_fraction 0.1 --validation.dataset_path other.txt",
            "validation.held_out_fraction",
        ),
    ],
)
def test_keys_that_cannot_be_meant_together(words: str, key: str) -> None:
    (message,) = refused(*words.split())
    assert f": {key} = " in message


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


def test_every_key_says_what_it_takes() -> None:
    assert set(FIELDS) == set(OURS)
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
def test_every_recipe_loads(path: Path) -> None:
    config = load_config(["--job.config_file", str(path)])
    assert config.training.global_batch_size != -1, "a recipe trains the same at every number of ranks"


# Through the launcher


def launch(words: list[str], folder: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """The launcher's own process, and its seconds."""
    environment = {name: value for name, value in os.environ.items() if name not in ("NGPU", "NNODES", "LOG_RANK")}
    code = (
        "import sys\n"
        "from components.start import main\n"
        "code = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules, 'imported torch to refuse a job'\n"
        "sys.exit(code)\n"
    )
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done, time.perf_counter() - start


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
    assert seconds < 1


def test_help_shows_every_key() -> None:
    done, _ = launch(["--help"], ROOT, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    missing = [key for key in OURS if f"--{key}" not in done.stdout]
    assert not missing, difflib.get_close_matches(missing[0], done.stdout.split())
    assert "origins" not in done.stdout
    for name in ("NGPU", "NNODES", "NODE_RANK", "RDZV_ENDPOINT", "LOG_RANK", "PYTHON", "exit codes"):
        assert name in done.stdout


def test_every_key_is_read_somewhere() -> None:
    """A setting is honoured or refused: each name is an attribute that some code takes."""
    files = [ROOT / "train.py", *(ROOT / "components").rglob("*.py"), *(ROOT / "parallelize").glob("*.py")]
    code = "\n".join(file.read_text() for file in files if file.name not in ("tables.py", "names.py"))
    unread = [key for key in OURS if not re.search(rf"\.{key.rpartition('.')[2]}\b|\"{key.rpartition('.')[2]}\"", code)]
    assert not unread
