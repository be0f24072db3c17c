"""Files: JSON, hashes, durability, and reads that a store may fail once."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

WAITS_SECONDS = [0.1, 0.3, 1.0]
"""Between two tries of a read: a shared store that fails over answers within a second or not for minutes."""


def patiently(path: Path, read: Callable[[], T]) -> T:
    """What read returns, tried again after each of WAITS_SECONDS. Raises the last OSError, which names path."""
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
        return read_json(path)
    except (FileNotFoundError, ValueError):
        return {}


def replace(path: Path, text: str) -> None:
    """Write a file in one step: readers see the old text or the new, never a part of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def digest(path: Path) -> list:
    """Size in bytes, and a hash, of a file."""
    with path.open("rb") as file:
        return [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, hashlib.blake2b).hexdigest()]


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's names, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
