"""Job files of torchtitan v0.2, as its users write them: each loads unchanged, or what has no meaning here is named."""

import dataclasses
import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.config import ROOT, ConfigError, JobConfig, load_config, to_dict
from components.config.names import RENAMED, RENAMED_VALUES, UNAVAILABLE_VALUES
from models import MODELS
from parallelize.mesh import resolve_degrees
from parallelize.rules import check_device, check_layout
from tests.limits import run

FOLDER = ROOT / "tests/titan_v02"

LEFT_OUT = {"job.config_file"}
"""Keys that are in none of the files."""

UNSET = {
    "job.save_config_file",
    "parallelism.module_fqns_per_model_part",
    "training.dataset_path",
    "validation.dataset_path",
    "validation.dataloader.prefetch_factor",
}
"""Keys that are unset by default, and so in all of the files."""


@dataclasses.dataclass(frozen=True)
class Brought:
    """What a file has to do here."""

    ranks: int
    refused: frozenset[str] = frozenset()
    """Its keys that have no meaning here, at the values that it gives them."""


FILES = {
    "llama3_debug": Brought(2),
    "llama3_8b": Brought(8, frozenset({"checkpoint.async_mode", "validation.dataset"})),
    "llama3_8b_long": Brought(64, frozenset({"comm.trace_buf_size"})),
    "llama3_70b": Brought(256),
    "llama3_405b": Brought(
        512,
        frozenset(
            {
                "quantize.linear.float8.enable_fsdp_float8_all_gather",
                "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
            }
        ),
    ),
    "qwen3_debug": Brought(
        8,
        frozenset(
            {
                "job.custom_config_module",
                "fault_tolerance.enable",
                "fault_tolerance.replica_id",
                "fault_tolerance.group_size",
                "fault_tolerance.semi_sync_method",
                "experimental.custom_import",
            }
        ),
    ),
    "qwen3_0.6b": Brought(4),
    "qwen3_8b": Brought(8),
    "qwen3_32b": Brought(16),
    "deepseek_v3_debug": Brought(4),
    "deepseek_v3_16b": Brought(8),
    "deepseek_v3_671b": Brought(
        512,
        frozenset({"model.converters", "quantize.grouped_mm.float8.fqns"}),
    ),
}


def keys(tables: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tables.items():
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def given(name: str) -> dict[str, Any]:
    return dict(keys(tomllib.loads((FOLDER / f"{name}.toml").read_text())))


def messages(path: Path) -> list[str]:
    try:
        load_config(["--job.config_file", str(path)])
    except ConfigError as error:
        return error.messages
    return []


def without_refused(name: str, folder: Path) -> Path:
    """The file without the lines that the error names."""
    lines = (FOLDER / f"{name}.toml").read_text().splitlines()
    places = [re.match(r".+?:(\d+): ", message) for message in messages(FOLDER / f"{name}.toml")]
    wrong = {int(place[1]) for place in places if place}
    path = folder / "job.toml"
    path.write_text("\n".join("" if number in wrong else line for number, line in enumerate(lines, 1)))
    return path


def test_every_file_is_expected_and_together_they_have_every_key() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(FILES)
    known = tomllib.loads((ROOT / "tests/titan_v02_keys.toml").read_text())
    wanted = {*known.pop("unset"), *dict(keys(known))}
    assert {key for name in FILES for key in given(name)} == wanted - LEFT_OUT - UNSET


@pytest.mark.parametrize("name", FILES)
def test_what_has_no_meaning_here_is_named_all_at_once(name: str) -> None:
    path = FOLDER / f"{name}.toml"
    lines, named = path.read_text().splitlines(), []
    for message in messages(path):
        found = re.fullmatch(rf"{re.escape(str(path))}:(\d+): (\S+) = (.+?): (.+)", message)
        assert found, message
        number, key, _, reason = found.groups()
        assert lines[int(number) - 1].startswith(f"{key.rpartition('.')[2]} ="), message
        assert len(reason) > 20, message
        assert "unknown" not in reason, message
        named.append(key)
    assert sorted(named) == sorted(FILES[name].refused)


@pytest.mark.parametrize("name", FILES)
def test_the_rest_is_the_job_that_was_meant(name: str, tmp_path: Path) -> None:
    """Every value arrives, and the layout is one for the ranks that the file is for."""
    config = load_config(["--job.config_file", str(without_refused(name, tmp_path))])
    ours = dict(keys(to_dict(config)))
    for key, value in given(name).items():
        renamed, change = RENAMED.get(key, (key, "same"))
        if renamed in ours and key not in FILES[name].refused:
            expected = not value if change == "negate" else RENAMED_VALUES.get((renamed, str(value)), value)
            assert ours[renamed] == expected, key
    check_layout(config, resolve_degrees(config, FILES[name].ranks))
    check_device(config, (9, 0))


def test_every_flavor_is_known() -> None:
    flavors = {"llama3": ["debugmodel", "8B", "70B", "405B"]}
    flavors["qwen3"] = ["debugmodel", "0.6B", "1.7B", "4B", "8B", "14B", "32B"]
    flavors["qwen3"] += ["debugmodel_moe", "30B-A3B", "235B-A22B"]
    flavors["deepseek_v3"] = ["debugmodel", "16B", "236B", "671B"]
    flavors["gpt_oss"] = ["debugmodel", "20b", "120b"]
    for name, sizes in flavors.items():
        for flavor in sizes:
            model = load_config(["--model.name", name, "--model.flavor", flavor]).model
            assert model.flavor in MODELS[model.name][1]


@pytest.mark.parametrize(("key", "value"), UNAVAILABLE_VALUES)
def test_a_value_that_is_not_here_is_refused_with_the_reason(key: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([f"--{key}", value])
    assert caught.value.messages == [f'command line: {key} = "{value}": {UNAVAILABLE_VALUES[key, value]}']


@pytest.mark.parametrize(
    ("off", "on"),
    [
        ("--validation.dataset c4_validation", "--validation.enable"),
        ("--validation.dataloader.num_workers 2", "--validation.enable"),
        ("--fault_tolerance.group_size 2", "--fault_tolerance.enable"),
        (
            "--quantize.linear.float8.enable_fsdp_float8_all_gather",
            '--model.converters ["quantize.linear.float8"]',
        ),
        ("--quantize.linear.mx.recipe_name mxfp8", '--model.converters ["quantize.linear.float8"]'),
    ],
)
def test_a_table_that_is_off_asks_for_nothing_and_one_that_is_on_does(off: str, on: str) -> None:
    default = {**to_dict(load_config([])), "job": None}
    assert {**to_dict(load_config(off.split())), "job": None} == default
    with pytest.raises(ConfigError, match=off.split()[0].removeprefix("--")):
        load_config([*off.split(), *on.split()])
    if "last_save" in on:
        load_config([*off.split(), "--checkpoint.enable"])


def test_float8_that_is_not_asked_for_may_say_so() -> None:
    assert load_config(["--quantize.linear.float8.emulate", "false"]).quantize == JobConfig().quantize


@pytest.mark.torchrun
def test_a_debug_file_trains_as_it_is(tmp_path: Path) -> None:
    command: list[str | Path] = [ROOT / "run_train.sh", "--job.config_file", FOLDER / "llama3_debug.toml"]
    environment = os.environ | {"NGPU": "2", "CUDA_VISIBLE_DEVICES": ""}
    done = run([*command, "--job.dump_folder", tmp_path], env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["loss"] < rows[0]["loss"] < 9
    assert "\033[" not in done.stdout
