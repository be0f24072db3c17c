"""Finds the files of a path, and reads their documents and records."""

import glob
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from components.config import ROOT, ConfigError
from components.config.files import inside, real_path, refuse_pointer
from components.data.formats import (
    COMPRESSED,
    BadRecord,
    Record,
    arrow_rows,
    csv_rows,
    ending,
    json_lines,
    json_records,
    parquet_rows,
    pieces,
)

T = TypeVar("T")

REGISTERED = {"kjv": ROOT / "assets" / "kjv"}
"""Bundled datasets by the name in training.dataset."""
HUB = {"c4": "allenai/c4:en"}
"""Short names of datasets of the Hugging Face hub."""
SURROGATE = re.compile("[\ud800-\udfff]")
Document = str | Iterator[str]
"""A text, or its pieces in order: a text file may be larger than memory."""
Reader = Callable[[Path, str], Iterator[Document | BadRecord]]
"""(file, text_field) -> documents of the file."""


_FIRST = {".txt", ".text", ".jsonl", ".ndjson", ".parquet"}
"""Endings that are read in any folder. Others are read where none of these is, and notes where nothing else is."""
_NOTES = {f"{kind}{compressed}" for kind in (".md", ".markdown") for compressed in ("", *COMPRESSED)}


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
    plain = ", ".join(sorted(end for end in endings if end.count(".") == 1))
    compressed = f", also compressed ({', '.join(COMPRESSED)})" if any(end.count(".") > 1 for end in endings) else ""
    known = plain + compressed
    try:
        if given.is_file():
            found = [given]
            if ending(given) not in endings:
                reason = f'ending "{ending(given)}" is not one of {known}: {_remedies(found, endings)}'
                raise ConfigError(f"data {path}: {reason}")
        elif given.is_dir():
            found = list(walk(given))
        else:
            found = [file for file in _matches(str(given)) if file.is_file()]
            if not found and not glob.has_magic(str(given)):
                raise ConfigError(f"data {path}: no such file or folder")
        readable = [file for file in found if ending(file) in endings and (file == given or is_data(file))]
        full = chosen([file for file in readable if file.stat().st_size], endings)
        others = unread(found, full, endings=endings)
    except OSError as error:
        raise ConfigError(f"data {path}: {error}") from None
    if not full:
        what = "only empty files" if readable else f"no file that ends in {known}"
        raise ConfigError(f"data {path}: {what}" + (f"; {others}" if others else ""))
    if given.is_dir():
        check_inside(given, full)
    for file in full[:100]:  # a clone without `git lfs` has only pointers; others are found where a file is first read
        refuse_pointer(file)
    return full, others


def chosen(files: list[Path], endings: Collection[str]) -> list[Path]:
    """The sorted files that are read: those of _FIRST if there are any, and only one of a file and its compressions."""
    first = _FIRST if ".txt" in endings else _FIRST | {".json"}  # .json is always read for chats
    for kinds in (first, {*endings} - _NOTES):
        files = [file for file in files if ending(file) in kinds] or files
    kept: dict[Path, Path] = {}
    for file in sorted(files, key=lambda file: file.parts):
        kept.setdefault(file.with_suffix("") if file.suffix.lower() in COMPRESSED else file, file)
    return [*kept.values()]


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


def unread(
    found: Iterable[Path], read: Iterable[Path], remedy: str = "", endings: Collection[str] = ()
) -> Unread | None:
    """Files that were found, look like data and are not read; None if there are none.

    endings: the endings of data files, for remedies; default: none.
    """
    read = set(read)
    others = [file for file in sorted(set(found) - read) if is_data(file)]
    if not others:
        return None
    sizes = {real_path(file): file.stat().st_size for file in read}
    left = {file: size for file in others if (size := file.stat().st_size) and real_path(file) not in sizes}
    if not left:
        return None
    return Unread([*left], sum(left.values()), sum(sizes.values()), remedy or _remedies(left, endings))


def unread_sizes(sizes: dict[str, int], read: Collection[str], endings: Collection[str]) -> Unread | None:
    """As unread, for files that are not on this machine: sizes by name, and the names of those that are read."""
    left = {Path(name): size for name, size in sorted(sizes.items()) if size and name not in read}
    left = {file: size for file, size in left.items() if is_data(file)}
    read_bytes = sum(sizes[name] for name in read)
    return Unread([*left], sum(left.values()), read_bytes, _remedies(left, endings)) if left else None


_REMEDIES = {
    "decompress {}": ".gz .tgz .zst .bz2 .xz .lz4 .zip .7z .rar .tar",
    "convert {} to .jsonl or .parquet": ".orc .avro .h5 .hdf5 .xls .xlsx",
    'read {} with training.dataset_format = "tokens"': ".bin .npy",
    "save {} as .txt": ".rst .htm .html .xml .tex .pdf .epub .doc .docx .odt .rtf",
}
"""Remedy -> endings of data without a reader."""
_REMEDY = {end: remedy for remedy, endings in _REMEDIES.items() for end in endings.split()}
_NO_DATA = re.compile(
    r"(config|generation_config|dataset_infos?|dataset_dict|state|vocab|added_tokens|special_tokens_map|tokenizer.*|"
    r".*\.index)\.json|([A-Z_-]+|README[^.]*|SHA\d*SUMS?|MD5SUMS?)(\.(md|markdown|rst|html?))?|Makefile|Dockerfile"
)
"""Names of files that describe data or belong to a model: README.md, LICENSE, tokenizer.json."""


def is_data(file: Path) -> bool:
    """Whether a file looks like data. A shard of data may have no ending, or a number as its ending."""
    end = ending(file)
    is_shard = not end or end[1:].isdigit()
    return not _NO_DATA.fullmatch(file.name) and (is_shard or end in READERS or file.suffix.lower() in _REMEDY)


def _remedies(files: Iterable[Path], endings: Collection[str]) -> str:
    """Remedies for files that are not read."""
    found: dict[str, set[str]] = {}
    for file in files:
        if ending(file) in endings:
            remedy = "name {} by a glob, for it is not read beside .txt, .jsonl, .parquet or a copy of itself"
        elif ending(file) in READERS:
            as_text = 'read {} with training.dataset_format = "text"'
            remedy = "write {} as .jsonl, one object a line" if ".jsonl" in endings else as_text
        else:
            remedy = _REMEDY.get(file.suffix.lower(), "let {} end in .txt or .jsonl")
        found.setdefault(remedy, set()).add(ending(file) or file.name)
    return "; ".join(remedy.format(", ".join(sorted(ends)[:4])) for remedy, ends in found.items())


def check_inside(folder: Path, files: Iterable[Path]) -> None:
    """Raises ConfigError if a file is a link that leaves the folder, because the folder may come from a stranger."""
    # A file that is no link lies where its folder does.
    parents: dict[Path, bool] = {}
    for file in files:
        if file.parent not in parents:
            parents[file.parent] = inside(folder, file.parent)
    if away := [file for file in files if not (inside(folder, file) if file.is_symlink() else parents[file.parent])]:
        reason = "which is outside of the folder; name it in training.dataset_path itself, by a glob too, or copy it"
        raise ConfigError(f"data {folder}: {away[0]} leads to {os.path.realpath(away[0])}, {reason}")


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
    there = next((n for n in range(len(parts), 0, -1) if Path(*parts[:n]).exists()), 0)  # a name may have [brackets]
    literal = [glob.escape(part) for part in parts[:there]]
    if "**" not in parts:
        yield from map(Path, glob.glob(str(Path(*literal, *parts[there:]))))
        return
    first = parts.index("**")
    tail = (*parts[first:], "*") if parts[-1] == "**" else parts[first:]
    for folder in glob.glob(str(Path(*literal, *parts[there:first]))):
        yield from (file for file in walk(Path(folder)) if covers(tail, file.relative_to(folder).parts))


def covers(pattern: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """Whether the pattern matches the path, compared part by part; ** matches any number of folders."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(covers(pattern[1:], parts[skipped:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and covers(pattern[1:], parts[1:])


def read_documents(file: Path, text_field: str) -> Iterator[Document | BadRecord]:
    """Yields the documents of a file in order. A document is a text file, or a record's text."""
    try:
        yield from READERS[ending(file)](file, text_field)
    except ConfigError as error:
        yield BadRecord(str(error))


def has_fields(file: Path) -> bool:
    """Whether the texts of a data file are fields of its records."""
    return READERS[ending(file)] is not _read_text


def read_records(file: Path) -> Iterator[Record]:
    """Yields (place, record or BadRecord) of a file in order."""
    try:
        yield from RECORDS[ending(file)](file, "")
    except ConfigError as error:
        yield str(file), BadRecord(str(error))


def _read_text(file: Path, text_field: str) -> Iterator[Document | BadRecord]:
    for _ in pieces(file):  # reads to the end first, because a file with an invalid byte has no document
        pass
    yield pieces(file)


def _read_field(file: Path, text_field: str) -> Iterator[Document | BadRecord]:
    for place, record in RECORDS[ending(file)](file, text_field):
        if isinstance(record, BadRecord):
            yield record
            continue
        text = _value(record, text_field)
        if not isinstance(text, str):
            reason = ", but a list: join its texts" * isinstance(text, list)
            yield BadRecord(f'{place}: no text in field "{text_field}" (training.dataset_text_field){reason}')
        elif SURROGATE.search(text):
            yield BadRecord(f"{place}: not Unicode: half of a surrogate pair")
        else:
            yield text


def _value(record: Any, field: str) -> Any:
    """The value of a field; "meta.text" is the field text of the object meta, unless a field has this name."""
    if not isinstance(record, dict):
        return None
    head, dot, tail = field.partition(".")
    return _value(record.get(head), tail) if dot and field not in record else record.get(field)


_BINARY = (".parquet", ".arrow", ".feather")
"""Formats with a compression of their own."""


def is_compressed(file: Path) -> bool:
    """Whether a data file may have fewer bytes than its text."""
    return ending(file) in _BINARY or file.suffix.lower() in COMPRESSED


def _with_compressed(readers: dict[str, T]) -> dict[str, T]:
    """Readers by ending, with those of compressed files."""
    plain = {end: reader for end, reader in readers.items() if end not in _BINARY}
    return readers | {end + last: reader for end, reader in plain.items() for last in COMPRESSED}


RECORDS: dict[str, Callable[[Path, str], Iterator[Record]]] = _with_compressed(
    {
        ".jsonl": json_lines,
        ".ndjson": json_lines,
        ".json": json_records,
        ".csv": partial(csv_rows, delimiter=","),
        ".tsv": partial(csv_rows, delimiter="\t"),
        ".parquet": parquet_rows,
        ".arrow": arrow_rows,
        ".feather": arrow_rows,
    }
)
"""Readers of records by file ending, in small letters."""
_TEXTS: dict[str, Reader] = dict.fromkeys((".txt", ".text", ".md", ".markdown"), _read_text)
READERS: dict[str, Reader] = _with_compressed(_TEXTS) | dict.fromkeys(RECORDS, _read_field)
"""The same for documents."""
