"""Turns a TOML file and `--table.key value` overrides into a checked JobConfig or a ConfigError with all mistakes."""

import dataclasses
import difflib
import functools
import json
import os
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic

from components.config import names
from components.config.bounds import INSIDE, PATH, PATH_OR_URL, PathError, Size, is_folder, is_url, local_path
from components.config.contradictions import CONTRADICTIONS
from components.config.keys import (
    ARRAYS,
    FIELDS,
    NAMES,
    OPEN,
    TABLES,
    ConfigError,
    describe_type,
    plain,
    show_key,
    table_of,
)
from components.config.optimizer import LRScheduler
from components.config.read import COMMAND_LINE, Given, read_file, read_overrides
from components.config.rule import check_rules
from components.config.tables import OF_TOKENIZER, JobConfig, Training

ROOT = Path(__file__).resolve().parents[2]
"""The repository's root, to which paths of bundled assets are relative."""


def python_path() -> str:
    """PYTHONPATH for subprocesses that run a module of this repository: ROOT, then the user's PYTHONPATH.

    Raises ConfigError if ROOT has a colon. run_train.sh prints the same message.
    """
    if os.pathsep in str(ROOT):
        reason = "Python cannot import from a path with a colon; move the repository to another folder"
        raise ConfigError(f"{ROOT}: {reason}")
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def load_config(argv: list[str]) -> JobConfig:
    """Reads `--job.config_file FILE` and the overrides in argv. The last setting of a key wins.

    Raises ConfigError with every mistake in the file and on the command line, and the place of each mistake.
    """
    overrides = list(read_overrides(argv))
    files = [given for given in overrides if given.key == "job.config_file"]
    given = [*(read_file(Path(_checked(files[-1].key, files[-1].value, files[-1]))) if files else ()), *overrides]
    asked = {setting.key: setting.value for setting in given}
    mistakes: list[str] = []
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in given:
        try:
            key, value = _known(setting, asked)
            if key is not None:
                values[key], origins[key] = _checked(key, value, setting), setting.origin
        except ConfigError as error:
            mistakes += error.messages
        if len(mistakes) >= _MOST_MISTAKES:  # an unknown key is slow to report: it is compared with every known name
            raise ConfigError([*mistakes, "and perhaps more"])
    model = values.get("model.name"), values.get("model.flavor")
    if model in names.RENAMED_MODELS:
        values["model.name"], values["model.flavor"] = names.RENAMED_MODELS[model]
    if is_folder(values.get("model.flavor", "")):
        try:
            _take_folder(values, origins)
        except PathError as error:
            mistakes.append([each for each in given if each.key == "model.flavor"][-1].mistake(str(error)))
    total = values.get("lr_scheduler.total_steps") or values.get("training.steps", Training.steps)
    values.setdefault("lr_scheduler.warmup_steps", min(LRScheduler.warmup_steps, total))
    if mistakes:  # before contradictions are checked, because a default would stand for an invalid value
        raise ConfigError(mistakes)
    config = _build(JobConfig, values, origins=origins)
    check_rules(CONTRADICTIONS, config)
    return config


def _take_folder(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Set what model.flavor, a folder, says of other keys. Raises PathError."""
    folder = local_path(values["model.flavor"])
    if not os.path.exists(folder) and (ROOT / folder).exists():
        folder = str(ROOT / folder)
    values["model.flavor"] = folder
    if origins["model.flavor"] == COMMAND_LINE:  # the job file names another model and its tokenizer
        for key in ("model.name", "model.hf_assets_path"):
            if origins.get(key) != COMMAND_LINE:
                values.pop(key, None)
    values.setdefault("model.name", "")
    values.setdefault("model.hf_assets_path", folder)
    if values.get("checkpoint.initial_load_in_hf"):
        values.setdefault("checkpoint.initial_load_path", folder)


def to_json(config: JobConfig) -> str:
    """A job that is resolved and checked, for from_json in another process."""
    return json.dumps(dataclasses.asdict(config))


def from_json(text: str) -> JobConfig:
    """The job of to_json. Nothing is read or checked again, because the job file may have changed."""
    return _table(JobConfig, json.loads(text))


def _table(table: Any, given: dict[str, Any]) -> Any:
    hints = _type_hints(table)
    values = dict(given)
    for name, value in given.items():
        if nested := table_of(hints[name]):
            is_array = isinstance(value, list)
            values[name] = [_table(nested, each) for each in value] if is_array else _table(nested, value)
    return table(**values)


def by_key(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each key of a job's tables, as "training.steps", with its value."""
    for name, value in tables.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in FIELDS:
            yield from by_key(value, f"{key}.")
        else:
            yield key, value


def to_dict(config: JobConfig) -> dict[str, Any]:
    """The tables as nested dicts, without origins."""
    tables = dataclasses.asdict(config)
    del tables["origins"]
    return tables


def absolute_tables(config: JobConfig) -> dict[str, Any]:
    """The tables of to_dict with absolute paths, valid from any folder. Paths inside dump_folder stay relative."""
    tables = to_dict(config)
    for key, annotation in FIELDS.items():
        *names, last = key.split(".")
        found = functools.reduce(dict.__getitem__, names, tables)
        for table in found if isinstance(found, list) else [found]:
            is_local = table[last] and not is_url(table[last]) and (key, table[last]) != ("chat.template", OF_TOKENIZER)
            if is_path(annotation) and is_local:
                table[last] = str(_absolute(key, table[last]))
    if is_folder(config.model.flavor):
        tables["model"]["flavor"] = str(_absolute("model.hf_assets_path", config.model.flavor))
    return tables


def _absolute(key: str, path: str) -> Path:
    if key == "training.dataset_cache":
        return ROOT / path
    in_repository = key in ("model.hf_assets_path", "chat.template")
    return (here_or_in_repository(path) if in_repository else Path(path)).absolute()


def here_or_in_repository(path: str) -> Path:
    """A relative path starts at the current folder or, if nothing is there, at the repository."""
    given = Path(os.path.expanduser(path))  # ~ is in run.json of older runs
    return given if given.exists() else ROOT / given


def is_path(annotation: Any) -> bool:
    """Whether a key has a path that does not lie in the dump folder."""
    metadata = getattr(annotation, "__metadata__", ())
    if INSIDE in metadata:
        return False
    return bool({PATH, PATH_OR_URL} & {*metadata}) or any(is_path(member) for member in typing.get_args(annotation))


def _known(setting: Given, asked: Mapping[str, Any]) -> tuple[str | None, Any]:
    """(key, value) in this repository's names; key is None if the setting has no effect here.

    Raises ConfigError if the key is unknown, or if its value is not available.
    """
    key, value = setting.key, setting.value
    if key in names.RENAMED:
        key, change = names.RENAMED[key]
        if change == "negate":
            if not isinstance(value, bool):
                raise ConfigError(setting.mistake("expected true or false"))
            value = not value
    if isinstance(value, str):
        if (key, value) in names.UNAVAILABLE_VALUES:
            raise ConfigError(setting.mistake(names.UNAVAILABLE_VALUES[key, value]))
        value = names.RENAMED_VALUES.get((key, value), value)
    if key in names.UNAVAILABLE:
        accepted, reason, only_with = names.UNAVAILABLE[key]
        is_on = all(asked.get(other) for other in only_with)
        if is_on and (value != accepted or type(value) is not type(accepted)):
            raise ConfigError(setting.mistake(reason))
        return None, None
    name = plain(key)
    array, _, last = name.rpartition(".")
    if name in FIELDS and array in ARRAYS:
        if re.fullmatch(rf"{re.escape(array)}\[[1-9]\d{{0,2}}\]\.{re.escape(last)}", key):
            return key, value
        reason = f"[[{array}]] is an array of tables; on the command line, {array}[1].{last}"
        raise ConfigError(setting.mistake(reason))
    if key in FIELDS or key.rpartition(".")[0] in OPEN:
        return key, value
    if key in ARRAYS:
        raise ConfigError(setting.mistake(f"expected tables [[{key}]], each with its keys"))
    raise ConfigError(setting.mistake(_unknown(plain(key), value)))


def _unknown(key: str, value: Any) -> str:
    table, _, last = key.rpartition(".")
    if key in TABLES:
        return f"[{key}] is a table, not a key"
    if last in names.FOREIGN:
        hint = f"unknown key; here it is {names.FOREIGN[last]}"
        equivalent = names.FOREIGN_VALUES.get(value) if isinstance(value, str) else None
        return f"{hint}; {value} is {equivalent}" if equivalent else hint
    # Suggestions, best first: the same last name in the nearest table; the nearest full name; the nearest last name.
    same = [name for name in NAMES if name.rpartition(".")[2] == last]
    near = difflib.get_close_matches(key, same or NAMES, 1, 0.0 if same else 0.75)
    if not near and not table:
        return "unknown key, and in no table"
    if not near and table not in TABLES:
        near_table = difflib.get_close_matches(table, TABLES, 1, 0.6)
        return f"unknown table [{show_key(table)}]" + (f"; did you mean [{near_table[0]}]?" if near_table else "")
    if not near:
        by_last = {name.rpartition(".")[2]: name for name in NAMES}
        near = [by_last[match] for match in difflib.get_close_matches(last, by_last, 1, 0.7)]
    if near:
        return f"unknown key; did you mean {near[0]}?"
    return f"unknown key; [{table}] has " + ", ".join(
        name.rpartition(".")[2] for name in FIELDS if name.rpartition(".")[0] in (table, f"model.{table}")
    )


@functools.cache
def _adapter(key: str) -> pydantic.TypeAdapter:
    """A validator for a key without array indices. Cached, because making one takes longer than checking a value."""
    return pydantic.TypeAdapter(FIELDS.get(key, Size), config=pydantic.ConfigDict(strict=True, allow_inf_nan=False))


def _checked(key: str, value: Any, setting: Given) -> Any:
    """Returns the value. Raises ConfigError if it does not have the key's type or is out of bounds."""
    try:
        return _adapter(plain(key)).validate_python(value)
    except pydantic.ValidationError as error:
        reasons = (str(found["ctx"]["error"]) for found in error.errors() if found["type"] == "value_error")
        expected = f"expected {describe_type(FIELDS.get(plain(key), Size))}"
        raise ConfigError(setting.mistake(next(reasons, expected))) from None


_MOST_MISTAKES = 100
_type_hints = functools.cache(typing.get_type_hints)


def _build_array(table: Any, values: dict[str, Any], key: str) -> list[Any]:
    """The tables of an array. Raises ConfigError if one is left out, or lacks a key that has no default."""
    numbers = {int(found[1]) for name in values if (found := re.match(rf"{re.escape(key)}\[(\d+)\]", name))}
    needed = [field.name for field in dataclasses.fields(table) if _has_no_default(field)]
    lacking = [(number, name) for number in range(1, max(numbers, default=0) + 1) for name in needed]
    missing = [f"{key}[{number}].{name}" for number, name in lacking if f"{key}[{number}].{name}" not in values]
    if missing:
        raise ConfigError([f"{name} is missing: [[{key}]] needs {' and '.join(needed)}" for name in missing[:2]])
    return [_build(table, values, f"{key}[{number}].") for number in sorted(numbers)]


def _has_no_default(field: Any) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _build(table: Any, values: dict[str, Any], prefix: str = "", **more: Any) -> Any:
    """Builds a table and its subtables from checked values; missing keys keep their defaults."""
    hints = _type_hints(table)
    for field in dataclasses.fields(table):
        key = f"{prefix}{field.name}"
        if key in OPEN:
            of_table = {name: value for name, value in values.items() if name.startswith(f"{key}.")}
            more[field.name] = values.get(key, {}) | {name[len(key) + 1 :]: value for name, value in of_table.items()}
        elif key in ARRAYS:
            more[field.name] = _build_array(table_of(hints[field.name]), values, key)
        elif dataclasses.is_dataclass(hints[field.name]):
            more[field.name] = _build(hints[field.name], values, f"{key}.")
        elif key in values:
            more[field.name] = values[key]
    return table(**more)
