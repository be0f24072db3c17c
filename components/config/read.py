"""Reads settings, each with its place, from a TOML job file and from `--table.key value` overrides."""

import dataclasses
import errno
import os
import re
import stat
import typing
from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tomli

from components.config.keys import ARRAYS, FIELDS, OPEN, ConfigError, describe_type, plain, show, show_key
from components.config.names import RENAMED

COMMAND_LINE = "command line"
"""Origin of a setting from the command line."""


@dataclasses.dataclass
class Given:
    """One `table.key = value` as the user wrote it; origin is its place."""

    key: str
    value: Any
    origin: str

    def mistake(self, reason: str) -> str:
        return f"{self.origin}: {show_key(self.key)} = {show(self.value)}: {reason}"


def read_regular(path: Path, most_bytes: int = 1 << 30) -> bytes:
    """The content of a user's file.

    Raises OSError also if the file is too large, or is no regular file, because reading a pipe may never end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, str(error)) from None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes >> 20} MiB", str(path))
    return content


def read_file(path: Path) -> Iterator[Given]:
    """Yields the settings of a job file. Raises ConfigError if it cannot be read."""
    try:
        text = read_regular(path, _MOST_BYTES).decode("utf-8").removeprefix("\ufeff")  # as Windows editors save
        settings = list(_flatten(tomli.loads(text)))
    except OSError as error:
        near = get_close_matches(path.name, [file.name for file in path.parent.glob("*.toml")], 1)
        meant = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"{path}: cannot read the job file: {error.strerror}{meant}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None
    except tomli.TOMLDecodeError as error:
        place = re.search(r"\(at (?:line (\d+), column (\d+)|end of document)\)", str(error))
        lines = text.splitlines() or [""]
        line, column = place.groups() if place and place[1] else (len(lines), len(lines[-1]) + 1)
        raise ConfigError(f"{path}:{line}:{column}: not TOML: {str(error).partition(' (at')[0]}") from None
    except ValueError:
        raise ConfigError(f"{path}: {_LONG_INTEGER}") from None
    except RecursionError:
        raise ConfigError(f"{path}: tables or lists are nested too deeply") from None
    lines_of = _lines_of_keys(text)
    for key, value in settings:
        line = lines_of.get(key) or lines_of.get(key.rpartition(".")[0])
        yield Given(key, value, f"{path}:{line}" if line else str(path))


def _flatten(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        is_array = f"{prefix}{name}" in ARRAYS
        if is_array and isinstance(value, list) and all(each and isinstance(each, dict) for each in value):
            for number, each in enumerate(value, 1):
                yield from _flatten(each, f"{prefix}{name}[{number}].")
        elif isinstance(value, dict) and not is_array and plain(f"{prefix}{name}") not in FIELDS.keys() - OPEN:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _lines_of_keys(text: str) -> dict[str, int]:
    """Line number of each table and key. tomli does not provide lines, but job files are simple enough to scan."""
    lines: dict[str, int] = {}
    counts = Counter[str]()
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[(\[?)([^\[\]]+)\]", line):
            table = re.sub(r"[\s\"']", "", header[2])
            if header[1]:
                counts[table] += 1
                table = f"{table}[{counts[table]}]"
            lines.setdefault(table, number)
        elif "=" in line and re.fullmatch(r"[\w.-]+", name := re.sub(r"[\s\"']", "", line.partition("=")[0])):
            lines.setdefault(f"{table}.{name}" if table else name, number)
    return lines


def read_overrides(argv: list[str]) -> Iterator[Given]:
    """Yields the settings of the command line; - and _ in keys are the same. Raises ConfigError.

    --table.key value, --table.key=value   the value
    --table.flag                           true
    --table.no_flag                        false
    """
    words = list(argv)
    if foreign := [word for word in words if not _is_unicode(word)]:
        raise ConfigError(f"command line: {show_key(foreign[0])}: not UTF-8")
    while words:
        word = words.pop(0)
        option, equals, raw = word.partition("=")
        if not option.startswith("--") or "." not in option:
            near = f"; did you mean --job.config_file {word}?" if Path(word).suffix == ".toml" else ""
            raise ConfigError(f"command line: {show_key(word)}: expected --table.key value{near}")
        key = option[2:].replace("-", "_")
        if not equals:
            alone = not words or re.match(r"--[a-z]", words[0])
            raw = "true" if alone else words.pop(0)
            table, _, last = key.rpartition(".")
            positive = f"{table}.{last.removeprefix('no_')}"
            if alone and last.startswith("no_") and FIELDS.get(positive) is bool:
                key, raw = positive, "false"
            elif alone and key in FIELDS and FIELDS[key] is not bool:
                raise ConfigError(f"command line: {show_key(option)}: a value is missing: {describe_type(FIELDS[key])}")
        yield Given(key, _from_string(key, raw), COMMAND_LINE)


def _is_unicode(word: str) -> bool:
    """Whether every byte of the word was decodable. Words with undecodable bytes can be neither printed nor saved."""
    return not any("\ud800" <= character <= "\udfff" for character in word)


def _from_string(key: str, raw: str) -> Any:
    """Parses a word of the command line as a TOML value; a word that is not TOML is a string."""
    if _takes_string(FIELDS.get(plain(RENAMED.get(key, (key, ""))[0]))):
        return raw
    try:
        return tomli.loads(f"value = {raw.lower() if raw in ('True', 'False') else raw}")["value"]
    except tomli.TOMLDecodeError:
        return raw
    except ValueError:
        raise ConfigError(f"command line: {show_key(key)}: {_LONG_INTEGER}") from None
    except RecursionError:
        raise ConfigError(f"command line: {show_key(key)}: lists are nested too deeply") from None


_LONG_INTEGER = "an integer has too many digits"
_MOST_BYTES = 1 << 20


def _takes_string(annotation: Any) -> bool:
    if typing.get_origin(annotation) in (list, dict):
        return False
    return annotation is str or any(_takes_string(member) for member in typing.get_args(annotation))
