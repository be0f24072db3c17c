"""Documents from text, JSONL and parquet files."""

import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from components.config import ROOT, ConfigError
from components.config.files import inside

REGISTERED = {"kjv": ROOT / "assets" / "kjv"}
"""Bundled datasets by the name in training.dataset."""
HUB = {"c4": "allenai/c4:en"}
"""Short names of datasets of the Hugging Face hub."""
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class BadRecord:
    """An unreadable record; reason is "file:line: reason"."""

    reason: str


Reader = Callable[[Path, str], Iterator[str | BadRecord]]
"""(file, text_field) -> documents of the file."""


def find_files(path: str) -> list[Path]:
    """The sorted data files of a path: a file, a folder with its subfolders, or a glob. Skips empty and hidden files.

    Raises ConfigError if there are no data files, or if the path is a file with an unknown ending.
    """
    given = Path(path)
    known = ", ".join(sorted(READERS))
    if given.is_file():
        if given.suffix not in READERS:
            raise ConfigError(f'training data {path}: ending "{given.suffix}" is not one of {known}')
        found = [given]
    elif given.is_dir():
        found = [file for file in walk(given) if file.suffix in READERS]
        check_inside(given, found)
    else:
        found = [file for file in _matches(str(given)) if file.is_file() and file.suffix in READERS]
        if not found and not glob.has_magic(str(given)):
            raise ConfigError(f"training data {path}: no such file or folder")
    full = sorted(file for file in found if file.stat().st_size)
    if not full:
        what = "only empty files" if found else f"no file that ends in {known}"
        raise ConfigError(f"training data {path}: {what}")
    return full


def check_inside(folder: Path, files: Iterable[Path]) -> None:
    """Raises ConfigError if a file is a link that leaves the folder, because the folder may come from a stranger."""
    if away := [file for file in files if not inside(folder, file)]:
        reason = "which is outside of the folder; name it in training.dataset_path itself, by a glob too, or copy it"
        raise ConfigError(f"training data {folder}: {away[0]} leads to {os.path.realpath(away[0])}, {reason}")


def walk(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yields the files of a folder and its subfolders, except hidden ones. Follows links, except to a parent folder."""
    real = folder.resolve()
    if real in above:
        return
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.name.startswith("."):
            yield from walk(entry, above | {real})
        elif entry.is_file() and not entry.name.startswith("."):
            yield entry


def _matches(pattern: str) -> Iterator[Path]:
    """Yields the matches of a glob. walk resolves **, because the ** of Python's glob follows circular links."""
    parts = Path(pattern).parts
    if "**" not in parts:
        yield from map(Path, glob.glob(pattern))
        return
    first = parts.index("**")
    tail = (*parts[first:], "*") if parts[-1] == "**" else parts[first:]
    for folder in glob.glob(str(Path(*parts[:first]))):
        yield from (file for file in walk(Path(folder)) if _covers(tail, file.relative_to(folder).parts))


def _covers(pattern: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """Whether the pattern matches the path, compared part by part; ** matches any number of folders."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_covers(pattern[1:], parts[skipped:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _covers(pattern[1:], parts[1:])


def read_documents(file: Path, text_field: str) -> Iterator[str | BadRecord]:
    """Yields the documents of a file in order. A document is a text file, a JSONL line or a parquet row."""
    return READERS[file.suffix](file, text_field)


def _read_text(file: Path, text_field: str) -> Iterator[str | BadRecord]:
    try:
        yield file.read_bytes().decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        yield BadRecord(f"{file}: not UTF-8 at byte {error.start}")


def _read_jsonl(file: Path, text_field: str) -> Iterator[str | BadRecord]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except UnicodeDecodeError as error:
                yield BadRecord(f"{file}:{number}: not UTF-8 at byte {error.start} of the line")
            except (ValueError, RecursionError) as error:
                yield BadRecord(f"{file}:{number}: not JSON: {error}")
            else:
                text = record.get(text_field) if isinstance(record, dict) else None
                if not isinstance(text, str):
                    yield BadRecord(f'{file}:{number}: no text in field "{text_field}" (training.dataset_text_field)')
                elif _SURROGATE.search(text):
                    yield BadRecord(f"{file}:{number}: not Unicode: half of a surrogate pair")
                else:
                    yield text


def _read_parquet(file: Path, text_field: str) -> Iterator[str | BadRecord]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(file)
        if text_field not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            yield BadRecord(f'{file}: no column "{text_field}" (training.dataset_text_field); it has {names}')
            return
        for group in table.iter_batches(columns=[text_field]):
            for value in group.column(0):
                number += 1
                try:
                    text = value.as_py()
                except UnicodeDecodeError as error:
                    yield BadRecord(f"{file}: row {number}: not UTF-8 at byte {error.start} of the text")
                    continue
                yield text if isinstance(text, str) else BadRecord(f"{file}: row {number}: no text in {text_field}")
    except (pyarrow.ArrowException, OSError) as error:
        yield BadRecord(f"{file}: cannot be read as parquet after row {number}: {str(error).splitlines()[0]}")


READERS: dict[str, Reader] = {
    ".txt": _read_text,
    ".text": _read_text,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
"""Readers by file ending."""
