"""Documents from text, JSONL and parquet files."""

import glob
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from components.config import ROOT, ConfigError
from components.config.files import inside, real_path, refuse_pointer

REGISTERED = {"kjv": ROOT / "assets" / "kjv"}
"""Bundled datasets by the name in training.dataset."""
HUB = {"c4": "allenai/c4:en"}
"""Short names of datasets of the Hugging Face hub."""
SURROGATE = re.compile("[\ud800-\udfff]")
_PIECE = 1 << 20
"""Characters of a text file that are read at once."""
_LONGEST_LINE = 1 << 30
"""Maximum bytes of a JSONL line. A longer line is not a record, but may be a JSON list written in one line."""
_ROWS = 256
"""Rows of a parquet file that are decoded at once."""


@dataclass(frozen=True)
class BadRecord:
    """An unreadable record; reason is "file:line: reason"."""

    reason: str


Document = str | Iterator[str]
"""A text, or its pieces in order: a text file may be larger than memory."""
Reader = Callable[[Path, str], Iterator[Document | BadRecord]]
"""(file, text_field) -> documents of the file."""


def ending(file: Path) -> str:
    """The ending that decides how a file is read: ".txt" of "BOOK.TXT"."""
    return file.suffix.lower()


def find_files(path: str, endings: Collection[str] = ()) -> list[Path]:
    """The sorted data files of a path: a file, a folder with its subfolders, or a glob. Skips empty and hidden files.

    endings: the endings of data files, in small letters; default: the endings of READERS.

    Raises ConfigError if there are no data files, or if the path is a file with an unknown ending.
    """
    return _find(path, endings)[0]


def unread_files(path: str, endings: Collection[str] = ()) -> "Unread | None":
    """Files of a path that look like data, but are not among find_files. Raises ConfigError as find_files does."""
    return _find(path, endings)[1]


def _find(path: str, endings: Collection[str]) -> tuple[list[Path], "Unread | None"]:
    given, endings = Path(path), endings or READERS
    known = ", ".join(sorted(endings))
    try:
        if given.is_file():
            found = [given]
            if ending(given) not in endings:
                reason = f'ending "{given.suffix}" is not one of {known}: {_remedies(found)}'
                raise ConfigError(f"training data {path}: {reason}")
        elif given.is_dir():
            found = list(walk(given))
            check_inside(given, [file for file in found if ending(file) in endings])
        else:
            found = [file for file in _matches(str(given)) if file.is_file()]
            if not found and not glob.has_magic(str(given)):
                raise ConfigError(f"training data {path}: no such file or folder")
        readable = [file for file in found if ending(file) in endings]
        full = sorted((file for file in readable if file.stat().st_size), key=lambda file: file.parts)
        others = unread(found, full)
    except OSError as error:
        raise ConfigError(f"training data {path}: {error}") from None
    if not full:
        what = "only empty files" if readable else f"no file that ends in {known}"
        raise ConfigError(f"training data {path}: {what}" + (f"; {others}" if others else ""))
    for file in full[:100]:  # a clone without `git lfs` has only pointers; others are found where a file is first read
        refuse_pointer(file)
    return full, others


@dataclass(frozen=True)
class Unread:
    """Files that look like data and are not read; str() tells their number, size, examples and what to do."""

    files: list[Path]
    size_bytes: int
    read_bytes: int
    """Size of the files that are read."""
    remedy: str

    @property
    def is_most(self) -> bool:
        """Whether the files that are not read have more bytes than those that are."""
        return self.size_bytes > self.read_bytes

    def __str__(self) -> str:
        examples = ", ".join(map(str, self.files[:3])) + ", ..." * (len(self.files) > 3)
        count = f"{len(self.files):,} file{'s' * (len(self.files) > 1)}, {self.size_bytes:,} bytes"
        return f"not read: {count} ({examples}): {self.remedy}"


def unread(found: Iterable[Path], read: Iterable[Path], remedy: str = "") -> Unread | None:
    """Files that were found, look like data and are not read; None if there are none."""
    read = set(read)
    others = [file for file in sorted(set(found) - read) if _is_data(file)]
    if not others:
        return None
    sizes = {real_path(file): file.stat().st_size for file in read}
    left = {file: size for file in others if (size := file.stat().st_size) and real_path(file) not in sizes}
    if not left:
        return None
    return Unread([*left], sum(left.values()), sum(sizes.values()), remedy or _remedies(left))


_REMEDIES = {
    "decompress {}": ".gz .tgz .zst .bz2 .xz .lz4 .zip .7z .rar .tar",
    "write {} as .jsonl, one object a line": ".json",
    "convert {} to .jsonl or .parquet": ".csv .tsv .arrow .feather .orc .avro .h5 .hdf5 .xls .xlsx",
    "save {} as .txt": ".md .markdown .rst .htm .html .xml .tex .pdf .epub .doc .docx .odt .rtf",
}
"""Remedy -> endings of data without a reader."""
_REMEDY = {end: remedy for remedy, endings in _REMEDIES.items() for end in endings.split()}
_NO_DATA = re.compile(
    r"(config|generation_config|dataset_infos?|dataset_dict|state|vocab|added_tokens|special_tokens_map|tokenizer.*|"
    r".*\.index)\.json|([A-Z_-]+|SHA\d*SUMS?|MD5SUMS?)(\.(md|rst|html?))?|Makefile|Dockerfile"
)
"""Names of files that describe data or belong to a model: README.md, LICENSE, tokenizer.json."""


def _is_data(file: Path) -> bool:
    """Whether a file looks like data. A shard of data may have no ending, or a number as its ending."""
    end = ending(file)
    is_shard = not end or end[1:].isdigit()
    return not _NO_DATA.fullmatch(file.name) and (is_shard or end in READERS or end in _REMEDY)


def _remedies(files: Iterable[Path]) -> str:
    """Remedies for files that have no reader."""
    endings: dict[str, set[str]] = {}
    for file in files:
        remedy = _REMEDY.get(ending(file), "let {} end in .txt or .jsonl")
        endings.setdefault(remedy, set()).add(file.suffix or file.name)
    return "; ".join(remedy.format(", ".join(sorted(ends)[:4])) for remedy, ends in endings.items())


def check_inside(folder: Path, files: Iterable[Path]) -> None:
    """Raises ConfigError if a file is a link that leaves the folder, because the folder may come from a stranger."""
    # A file that is no link lies where its folder does.
    parents: dict[Path, bool] = {}
    for file in files:
        if file.parent not in parents:
            parents[file.parent] = inside(folder, file.parent)
    if away := [file for file in files if not (inside(folder, file) if file.is_symlink() else parents[file.parent])]:
        reason = "which is outside of the folder; name it in training.dataset_path itself, by a glob too, or copy it"
        raise ConfigError(f"training data {folder}: {away[0]} leads to {os.path.realpath(away[0])}, {reason}")


def walk(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yields the files of a folder and its subfolders, except hidden ones. Follows links, except to a parent folder."""
    real = folder.resolve()
    if real in above:
        return
    with os.scandir(folder) as entries:  # pathlib asks the file system about each entry again
        for entry in entries:
            if entry.name.startswith("."):
                continue
            each: os.DirEntry | Path = folder / entry.name if entry.is_symlink() else entry  # an entry fails at a loop
            if each.is_dir():
                yield from walk(folder / entry.name, above | {real})
            elif each.is_file():
                yield folder / entry.name


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


def read_documents(file: Path, text_field: str) -> Iterator[Document | BadRecord]:
    """Yields the documents of a file in order. A document is a text file, a JSONL line or a parquet row."""
    return READERS[ending(file)](file, text_field)


def text_pieces(text: TextIO, name: str) -> Iterator[str]:
    """Yields an open text in pieces, without its byte order mark and with a line feed for each pair \\r\\n.

    Raises ConfigError with this name and the first byte that is not UTF-8.
    """
    held, mark = "", "\ufeff"
    try:
        while piece := text.read(_PIECE):
            joined, mark = held + piece.removeprefix(mark), ""
            held = "\r" if joined.endswith("\r") else ""  # its \n may come with the next piece
            yield joined[: len(joined) - len(held)].replace("\r\n", "\n")
    except UnicodeDecodeError as error:  # error.start counts from the start of the last decoded block
        at = text.buffer.tell() - len(error.object) + error.start
        raise ConfigError(f"{name}: not UTF-8 at byte {at}") from None
    yield held


def _pieces(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8", newline="") as text:
        yield from text_pieces(text, str(file))


def _read_text(file: Path, text_field: str) -> Iterator[Document | BadRecord]:
    try:
        for _ in _pieces(file):  # reads to the end first, because a file with an invalid byte has no document
            pass
    except ConfigError as error:
        yield BadRecord(str(error))
    else:
        yield _pieces(file)


def _read_jsonl(file: Path, text_field: str) -> Iterator[Document | BadRecord]:
    for place, record in _json_lines(file):
        if isinstance(record, BadRecord):
            yield record
            continue
        text = record.get(text_field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            yield BadRecord(f'{place}: no text in field "{text_field}" (training.dataset_text_field)')
        elif SURROGATE.search(text):
            yield BadRecord(f"{place}: not Unicode: half of a surrogate pair")
        else:
            yield text


def _json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Yields (place, value or BadRecord) of each line that is not blank."""
    with file.open("rb") as lines:
        for number, line in enumerate(iter(partial(lines.readline, _LONGEST_LINE), b""), 1):
            place = f"{file}:{number}"
            if not line.strip():
                continue
            if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = lines.readline(_LONGEST_LINE)
                yield place, BadRecord(f"{place}: a line of more than {_LONGEST_LINE:,} bytes: one object a line")
                continue
            try:
                yield place, json.loads(line)
            except UnicodeDecodeError as error:
                yield place, BadRecord(f"{place}: not UTF-8 at byte {error.start} of the line")
            except (ValueError, RecursionError) as error:
                yield place, BadRecord(f"{place}: not JSON: {error}")


def _json_list(file: Path) -> Iterator[tuple[str, Any]]:
    """Yields (place, value or BadRecord) of each element of a JSON list, which is read as a whole."""
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        yield str(file), BadRecord(f"{file}: not JSON: {error}; one object a line is .jsonl")
        return
    if not isinstance(found, list):
        yield str(file), BadRecord(f"{file}: not a JSON list; one object a line is .jsonl")
        return
    yield from ((f"{file}: element {number}", each) for number, each in enumerate(found, 1))


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yields (place, row as a dict or BadRecord)."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        for group in pyarrow.parquet.ParquetFile(file).iter_batches(_ROWS):
            for row in group.to_pylist():
                number += 1
                yield f"{file}: row {number}", row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        yield (
            str(file),
            BadRecord(f"{file}: cannot be read as parquet after row {number}: {str(error).splitlines()[0]}"),
        )


def _read_parquet(file: Path, text_field: str) -> Iterator[Document | BadRecord]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(file)
        if text_field not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            yield BadRecord(f'{file}: no column "{text_field}" (training.dataset_text_field); it has {names}')
            return
        for group in table.iter_batches(_ROWS, columns=[text_field]):
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
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
}
"""Readers by file ending, in small letters."""
RECORDS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_list,
    ".parquet": _parquet_rows,
}
"""The same for records of any shape: each yields (place, record or BadRecord)."""
