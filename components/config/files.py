"""Files: JSON, hashes, durability, reads that a store may fail once, and JSON that others wrote."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from components.config.keys import ConfigError, short
from components.config.read import read_regular

T = TypeVar("T")
Kind = TypeVar("Kind")

WAITS_SECONDS = [0.1, 0.3, 1.0]
"""Between two tries of a read: a shared store that fails over answers within a second or not for minutes."""


def patiently(path: Path, read: Callable[[], T]) -> T:
    """The result of `read`, retried after each of WAITS_SECONDS. Raises the last OSError, which names path."""
    for seconds in WAITS_SECONDS:
        try:
            return read()
        except OSError:
            time.sleep(seconds)
    try:
        return read()
    except OSError as error:
        # That of opening a file names it, that of reading one does not.
        raise OSError(error.errno, error.strerror, str(error.filename or path)) from error


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def read_json_if_whole(path: Path) -> dict[str, Any]:
    """The object in a file; empty if the file is not there, or is not whole JSON."""
    try:
        found = read_json(path)
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_json_as(kind: type[Kind], path: Path) -> Kind:
    """The JSON of a file that others wrote, as a dataclass; keys that it does not have are ignored.

    Raises ConfigError of one line if the file cannot be read, is not JSON, or holds something else.
    """
    try:
        return pydantic.TypeAdapter(kind).validate_json(read_regular(path), strict=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = "".join(f"{part}: " for part in first["loc"] if isinstance(part, str))
        place = "not JSON: " if first["type"] == "json_invalid" else place
        raise ConfigError(f"{path}: {short(place + first['msg'])}") from None


def inside(folder: Path, file: Path) -> bool:
    """Whether a file lies in a folder, links followed. The hub's cache keeps the files of a snapshot beside it."""
    home, found = (Path(os.path.realpath(path)) for path in (folder, file))
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    return any(found.is_relative_to(each) for each in homes)


def replace(path: Path, text: str) -> None:
    """Write a file in one step: readers see the old text or the new, never a part of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def digest(path: Path) -> list:
    """Size in bytes, and a hash, of a file."""
    with path.open("rb") as file:
        return [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, hashlib.blake2b).hexdigest()]


def sample(path: Path) -> str:
    """A hash of a file's size and of 16 blocks of 64 KiB, evenly spread: all of a file of up to 1 MiB."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        found = hashlib.blake2b(str(size).encode(), digest_size=16)
        for number in range(_BLOCKS):
            file.seek(max(0, size - _BLOCK) * number // (_BLOCKS - 1) if size > _BLOCKS * _BLOCK else number * _BLOCK)
            found.update(file.read(_BLOCK))
    return found.hexdigest()


_BLOCK, _BLOCKS = 1 << 16, 16


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's names, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
