"""File helpers: retried reads, JSON (also of unknown origin), atomic and durable writes, and hashes."""

import codecs
import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from components.config.keys import ConfigError, short
from components.config.read import read_regular

T = TypeVar("T")
Kind = TypeVar("Kind")

WAITS_SECONDS = [0.1, 0.3, 1.0]
"""Pauses between attempts to read. A shared store that fails over answers within a second or not for minutes."""


def patiently(path: Path, read: Callable[[], T]) -> T:
    """Returns the result of read, which is retried after each pause of WAITS_SECONDS if it raises OSError.

    Raises the last OSError. If that error has no file name, its file name is set to path.
    """
    for seconds in WAITS_SECONDS:
        try:
            return read()
        except OSError:
            time.sleep(seconds)
    try:
        return read()
    except OSError as error:
        # An error of opening a file contains the file name; an error of reading does not.
        raise OSError(error.errno, error.strerror, str(error.filename or path)) from error


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8-sig"))


def read_json_if_whole(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty dict if the file is missing, incomplete, or holds no JSON object."""
    try:
        found = read_json(path)
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_json_as(kind: type[Kind], path: Path) -> Kind:
    """Parses a JSON file of unknown origin as the dataclass `kind`; keys that `kind` lacks are ignored.

    Raises ConfigError of one line if the file cannot be read, is not JSON, or does not match `kind`.
    """
    try:
        refuse_pointer(path, content := read_regular(path))
        return pydantic.TypeAdapter(kind).validate_json(content.removeprefix(codecs.BOM_UTF8), strict=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = "".join(f"{part}: " for part in first["loc"] if isinstance(part, str))
        place = "not JSON: " if first["type"] == "json_invalid" else place
        raise ConfigError(f"{path}: {short(place + first['msg'])}") from None


def refuse_pointer(path: Path, content: bytes = b"") -> None:
    """Raises ConfigError if the file is a pointer of Git LFS, which a clone without `git lfs` leaves in its place.

    content: the bytes already read from the file; if there are none, a file below 1 KiB is read here.
    """
    with contextlib.suppress(OSError):  # a later read of the file reports the error
        if not content and path.is_file() and path.stat().st_size < 1024:
            content = read_regular(path)
    if content.startswith(b"version https://git-lfs.github.com/spec/"):
        raise ConfigError(f"{path}: a Git LFS pointer, not the file itself: run `git lfs pull` in {path.parent}")


def real_path(file: Path) -> str:
    """The path of a file after links are resolved. Resolves the links of each folder once in a process."""
    return os.path.realpath(file) if file.is_symlink() else os.path.join(_real_folder(file.parent), file.name)


@lru_cache
def _real_folder(folder: Path) -> str:
    return os.path.realpath(folder)


def inside(folder: Path, file: Path) -> bool:
    """Whether a file lies in a folder after links are resolved.

    A snapshot folder of the hub's cache also includes ../../blobs, because its files are links into that folder.
    """
    home, found = (Path(os.path.realpath(path)) for path in (folder, file))
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    return any(found.is_relative_to(each) for each in homes)


def replace(path: Path, text: str) -> None:
    """Writes a file atomically: readers see either the old text or the new text."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def write_page(path: Path, text: str) -> None:
    """Writes an HTML page, which replaces nothing but a page. Raises OSError."""
    if path.exists() and path.read_bytes()[:9].lower() != text[:9].lower().encode():
        raise FileExistsError(errno.EEXIST, "a file that is no page; name another one", str(path))
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def make_staging(path: Path) -> Path:
    """Makes an empty folder beside `path`; publish renames it to `path`. Removes what a killed writer left.

    If that writer had already moved the old folder away from `path`, the old folder is first moved back.
    """
    staging, replaced = staging_of(path), replaced_of(path)
    if replaced.exists() and not path.exists():
        replaced.rename(path)
    for left in (staging, replaced):
        shutil.rmtree(left, ignore_errors=True)
    staging.mkdir(parents=True)
    return staging


def staging_of(path: Path) -> Path:
    return path.with_name(f"{STAGING}{path.name}")


def replaced_of(path: Path) -> Path:
    return path.with_name(f"{REPLACED}{path.name}")


def publish(staging: Path, path: Path) -> Path:
    """Makes a written folder durable and renames it to `path`. Returns the path to which an older folder was moved."""
    for each in (*staging.iterdir(), staging):
        sync(each)
    replaced = replaced_of(path)
    if path.exists():
        path.rename(replaced)
    staging.rename(path)
    sync(path.parent)
    return replaced


STAGING, REPLACED = ".staging-", ".replaced-"
"""Prefixes of the names of folders that are being written, and of folders that are being replaced."""


def writable(folder: Path) -> bool:
    """Whether files can be made in a folder; for a missing folder, whether the folder can be made."""
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    return there.is_dir() and os.access(there, os.R_OK | os.W_OK | os.X_OK)


def digest(path: Path) -> list:
    """[size in bytes, BLAKE2b hash] of a file."""
    with path.open("rb") as file:
        return [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, hashlib.blake2b).hexdigest()]


def sample(path: Path) -> str:
    """Hash of a file's size and of 16 evenly spaced blocks of 64 KiB. A file of up to 1 MiB is hashed completely."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        found = hashlib.blake2b(str(size).encode(), digest_size=16)
        for number in range(_BLOCKS):
            file.seek(max(0, size - _BLOCK) * number // (_BLOCKS - 1) if size > _BLOCKS * _BLOCK else number * _BLOCK)
            found.update(file.read(_BLOCK))
    return found.hexdigest()


_BLOCK, _BLOCKS = 1 << 16, 16


def sync(path: Path) -> None:
    """Flushes a file's content or a folder's entries to disk, so that they survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def grouped(sized: Iterable[tuple[T, float]], most: float) -> Iterator[list[T]]:
    """Consecutive items, given with their sizes, in groups of at most this size; a larger item is a group."""
    group, size = list[T](), 0.0
    for item, own in sized:
        if group and size + own > most:
            yield group
            group, size = [], 0.0
        group.append(item)
        size += own
    if group:
        yield group
