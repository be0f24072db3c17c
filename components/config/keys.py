"""Every key of a job file with its type, and how messages show types, values and keys."""

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

from components.config.bounds import redacted
from components.config.names import RENAMED, UNAVAILABLE
from components.config.tables import JobConfig


class ConfigError(Exception):
    """A user's mistake, which is shown without a traceback, and without credentials of URLs; exit code 2."""

    def __init__(self, messages: str | list[str]) -> None:
        self.messages = [
            short(redacted(message), 2000) for message in ([messages] if isinstance(messages, str) else messages)
        ]
        super().__init__("\n".join(self.messages))


def describe_type(annotation: Any) -> str:
    """The accepted values of a type in words: "an integer of 1 or more", '"fused" or "foreach"'."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        bounds = [
            _BOUNDS[name].format(getattr(bound, name))
            for bound in arguments[1:]
            for name in _BOUNDS
            if hasattr(bound, name)
        ]
        return " ".join([describe_type(arguments[0]), " and ".join(bounds)]).strip()
    if origin is typing.Literal:
        return " or ".join(show(value) for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe_type(part) for part in arguments if part is not type(None))
    if origin in (list, tuple):
        return f"a list of {describe_type(arguments[0])}"
    if origin is dict:
        return f"a table of names, each with {describe_type(arguments[1])}"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[annotation]


_BOUNDS = {"ge": "of {} or more", "gt": "above {}", "le": "of {} or less", "lt": "below {}", "min_length": "not empty"}


def show(value: Any) -> str:
    """A value in TOML notation on one line, shortened if it is long."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
        return f"({len(value)} tables)"
    if isinstance(value, str):
        return short(f'"{value}"' if value.isprintable() else json.dumps(value))
    try:
        return "unset" if value is None else short(str(value))
    except (ValueError, RecursionError):  # Python writes no integer of more than 4,300 digits
        return "..."


def show_key(key: str) -> str:
    """A key or a table's name for a message: escaped if it is not printable, shortened if it is long."""
    return short(key if key.isprintable() else json.dumps(key))


def short(text: str, most: int = 200) -> str:
    """The text, cut after `most` characters; a cut text ends with its full length."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def table_of(annotation: Any) -> Any:
    """The dataclass of a table, or of each table of an array; None for other types."""
    (*_, inner) = typing.get_args(annotation) if typing.get_origin(annotation) is list else (annotation,)
    return inner if dataclasses.is_dataclass(inner) else None


def plain(key: str) -> str:
    """A key without indexes of arrays, 1 to 999: training.mixture.name of training.mixture[2].name."""
    return re.sub(r"\[[1-9]\d{0,2}\]", "", key)


def _arrays(table: Any = JobConfig, prefix: str = "") -> Iterator[str]:
    hints = typing.get_type_hints(table, include_extras=True)
    for field in dataclasses.fields(table):
        if typing.get_origin(hints[field.name]) is list and table_of(hints[field.name]):
            yield f"{prefix}{field.name}"
        elif dataclasses.is_dataclass(hints[field.name]):
            yield from _arrays(hints[field.name], f"{prefix}{field.name}.")


def _fields(table: Any = JobConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields ("table.key", annotated type) for every key of every table, also of arrays of tables, without index."""
    hints = typing.get_type_hints(table, include_extras=True)
    for field in dataclasses.fields(table):
        if nested := table_of(hints[field.name]):
            yield from _fields(nested, f"{prefix}{field.name}.")
        elif prefix:
            yield f"{prefix}{field.name}", hints[field.name]


FIELDS = dict(_fields())
ARRAYS = {*_arrays()}
"""Arrays of tables, whose keys have an index: training.mixture[1].name."""
OPEN = {"model.sizes"}
"""Tables whose keys are known only to the model's family, which checks them."""
NAMES = [*FIELDS, *UNAVAILABLE, *RENAMED]
TABLES = sorted({name.rpartition(".")[0] for name in NAMES} | {"quantize", "quantize.linear", "quantize.grouped_mm"})
