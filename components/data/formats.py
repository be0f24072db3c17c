"""Reads records and texts of each format, decompressed on the way, in bounded memory.

A reader of records takes (file, column) and yields (place, record or BadRecord). If `column` is not empty, the reader
may leave out other columns, and raises ConfigError if the file names its columns and `column` is not among them.
"""

import bz2
import csv
import io
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from components.config import ConfigError
from components.config.keys import short

COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".lz4": "lz4", ".bz2": "bz2", ".xz": "xz"}
"""Ending of a compressed file -> codec."""
_BLOCK = 1 << 16
"""Bytes that are decompressed at once."""
_MOST_TIMES, _HARMLESS = 200, 1 << 28
"""A file may decompress to 256 MiB, or to this many times its size. Text reaches 10 times; a bomb reaches 1,000."""
_DICTIONARY = 1 << 28
"""Memory in bytes that an .xz file may ask for; `xz -9` asks for 65 MiB."""
_PIECE = 1 << 20
"""Characters of a text file that are read at once."""
_LONGEST_LINE = 1 << 30
"""Maximum bytes of a line of JSON, and characters of an element of a JSON list."""
_LONGEST_ROW = 1 << 26
"""Maximum bytes of a CSV row. The csv module needs up to eight bytes of memory for each."""
_ROWS = 256
"""Rows of a parquet file that are decoded at once."""
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class BadRecord:
    """An unreadable record; reason is "file:line: reason"."""

    reason: str


Record = tuple[str, Any]
"""(place, record or BadRecord)"""


def ending(file: Path) -> str:
    """The ending that decides how a file is read: ".txt" of "BOOK.TXT", ".jsonl.gz" of "BOOK.JSONL.GZ"."""
    last = file.suffix.lower()
    return Path(file.stem).suffix.lower() + last if last in COMPRESSED else last


def opened(file: Path) -> io.BufferedReader:
    """The content of a file, decompressed if it is compressed.

    A read raises ConfigError if the file is torn or corrupt, has bytes after its last member, or is a bomb.
    """
    return io.BufferedReader(_Decompressed(file), _BLOCK) if file.suffix.lower() in COMPRESSED else file.open("rb")


class _Decompressed(io.RawIOBase):
    def __init__(self, file: Path) -> None:
        import pyarrow

        self._file, self._source, self._size, self._held = file, file.open("rb"), 0, b""
        self._bytes = file.stat().st_size
        self._faults = OSError, EOFError, lzma.LZMAError, pyarrow.ArrowException
        codec = COMPRESSED[file.suffix.lower()]
        if codec in ("bz2", "xz"):
            self._pieces = _members(self._source, _BZ2_OR_XZ[codec])
        else:
            self._pieces = iter(partial(pyarrow.CompressedInputStream(self._source, codec).read, _BLOCK), b"")

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def readinto(self, buffer: Any) -> int:
        try:
            while not self._held:
                self._held = next(self._pieces)
        except StopIteration:
            return 0
        except self._faults as error:
            raise ConfigError(f"{self._file}: cannot be decompressed after byte {self._size:,}: {error}") from None
        size = min(len(buffer), len(self._held))
        buffer[:size], self._held = self._held[:size], self._held[size:]
        self._size += size
        if self._size > max(_HARMLESS, _MOST_TIMES * self._bytes):
            reason = f"decompresses to more than {_MOST_TIMES} times its {self._bytes:,} bytes"
            raise ConfigError(f"{self._file}: {reason}: if it is no bomb, decompress it yourself")
        return size

    def close(self) -> None:
        self._source.close()
        super().close()


_BZ2_OR_XZ: dict[str, Callable[[], Any]] = {
    "bz2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, _DICTIONARY),
}


def _members(source: BinaryIO, new: Callable[[], Any]) -> Iterator[bytes]:
    """Yields the content of all members. bz2.open and lzma.open end silently where a later member is damaged."""
    decompressor, given = None, b""
    while given := given or source.read(_BLOCK):
        decompressor = decompressor or new()
        yield decompressor.decompress(given, _BLOCK)
        while not decompressor.eof and not decompressor.needs_input:
            yield decompressor.decompress(b"", _BLOCK)
        given = b""
        if decompressor.eof:
            given, decompressor = decompressor.unused_data.lstrip(b"\0"), None  # xz may pad members with zeros
    if decompressor:
        raise EOFError("it is cut short")


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


def pieces(file: Path) -> Iterator[str]:
    """Yields a text file in pieces, as text_pieces."""
    with io.TextIOWrapper(opened(file), "utf-8", newline="") as text:
        yield from text_pieces(text, str(file))


def json_lines(file: Path, column: str) -> Iterator[Record]:
    """Yields each line that is not blank."""
    with opened(file) as lines:
        for number, line in enumerate(iter(partial(lines.readline, _LONGEST_LINE), b""), 1):
            place = f"{file}:{number}"
            if not line.strip():
                continue
            if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
                _skip_line(lines, _LONGEST_LINE)
                yield place, BadRecord(f"{place}: a line of more than {_LONGEST_LINE:,} bytes: one object a line")
                continue
            try:
                yield place, json.loads(line)
            except UnicodeDecodeError as error:
                yield place, BadRecord(f"{place}: not UTF-8 at byte {error.start} of the line")
            except (ValueError, RecursionError) as error:
                yield place, BadRecord(f"{place}: not JSON: {error}")


def _skip_line(lines: BinaryIO, most: int) -> None:
    while (line := lines.readline(most)) and not line.endswith(b"\n"):
        pass


def json_records(file: Path, column: str) -> Iterator[Record]:
    """Yields the elements of a JSON list; of a file that does not begin with "[", the lines."""
    with opened(file) as content:
        head = content.peek()[:_BLOCK]
        if not head.lstrip(b"\xef\xbb\xbf\xff\xfe\0 \t\r\n").startswith(b"["):
            yield from json_lines(file, column)
            return
        number = 0
        try:
            text = io.TextIOWrapper(content, json.detect_encoding(head), "surrogatepass")
            for number, element in enumerate(_elements(text), 1):
                yield f"{file}: element {number}", element
        except (ValueError, RecursionError) as error:
            place = f"{file}: element {number + 1}"
            yield place, BadRecord(f"{place}: not JSON: {getattr(error, 'msg', error)}; one object a line is .jsonl")


def _elements(text: TextIO) -> Iterator[Any]:
    """Yields the elements of a JSON list, of which one piece is in memory. Raises ValueError or RecursionError."""
    decoder, held, at, before, size = json.JSONDecoder(), "", 0, "[", _PIECE
    while True:
        try:
            mark = _after_space(held, at)
            if held[mark] == "]" and before == ",":
                break
            if held[mark] != before:
                raise ValueError(f'"{before}" or the end of the list is expected')
            start = _after_space(held, mark + 1)
            if held[start] == "]" and before == "[":
                mark = start
                break
            element, end = decoder.raw_decode(held, start)
            held[end]  # if it is in the next piece, a number may go on there
        except (IndexError, ValueError) as error:
            piece = text.read(size) if len(held) - at < _LONGEST_LINE else ""
            if not piece:
                raise ValueError("the list has no end") if isinstance(error, IndexError) else error from None
            held, at, size = held[at:] + piece, 0, 2 * size
            continue
        yield element
        at, before, size = end, ",", _PIECE
    if held[mark + 1 :].strip() or any(piece.strip() for piece in iter(partial(text.read, _PIECE), "")):
        raise ValueError("there is more after the end of the list")


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def csv_rows(file: Path, column: str, delimiter: str) -> Iterator[Record]:
    """Yields each row as {name: text}, with the names in the first row."""
    number = used = 0  # lines of the file, bytes of the row
    names: list[str] = []

    def line() -> str:
        nonlocal number, used
        found = lines.readline(_LONGEST_ROW)
        number, used = number + bool(found), used + len(found)
        if used >= _LONGEST_ROW:
            if not found.endswith(b"\n"):
                _skip_line(lines, _LONGEST_ROW)
            raise csv.Error(f"a row of more than {_LONGEST_ROW:,} bytes, or a quote without its end")
        text = found.decode("utf-8-sig" if number == 1 else "utf-8")
        if "\0" in text:
            raise csv.Error("a NUL byte")
        return text

    def next_row() -> list[str] | None:
        limit = csv.field_size_limit(_LONGEST_ROW)  # of all readers of this process
        try:
            return next(rows, None)
        finally:
            csv.field_size_limit(limit)

    with opened(file) as lines:
        rows = csv.reader(iter(line, ""), delimiter=delimiter, strict=True)
        while True:
            used, place = 0, f"{file}:{number + 1}"
            try:
                row = next_row()
            except UnicodeDecodeError as error:
                row, reason = [], f"not UTF-8 at byte {error.start} of line {number}"
            except csv.Error as error:
                row, reason = [], f"not CSV: {error} (line {number})"
            else:
                reason = f"{len(row or names)} fields, but the first row has {len(names)}"
                if row is None:
                    return
                if not row:  # a blank line
                    continue
                if not names:
                    names = row
                    _check_names(place, column, names)
                    if column and column not in names:
                        raise _no_column(file, column, names)
                    continue
                if len(row) == len(names):
                    yield place, dict(zip(names, row))
                    continue
            if not names:
                raise ConfigError(f"{place}: {reason}")
            yield place, BadRecord(f"{place}: {reason}")


def _check_names(place: str, column: str, names: list[str]) -> None:
    """Raises ConfigError if `column`, or if it is empty any column, is not the only one with its name."""
    if twice := [name for name in ([column] if column else names) if names.count(name) > 1]:
        raise ConfigError(f'{place}: two columns have the name "{short(twice[0])}"')


def _no_column(file: Path, column: str, names: Iterable[str]) -> ConfigError:
    has = short(", ".join(names))
    return ConfigError(f'{file}: no column "{column}" (training.dataset_text_field); it has {has}')


def parquet_rows(file: Path, column: str) -> Iterator[Record]:
    """Yields each row as a dict, with this column or all."""
    import pyarrow.parquet

    def batches() -> Iterator[Any]:
        with pyarrow.parquet.ParquetFile(file) as table:
            _check_column(file, column, table.schema_arrow)
            yield from table.iter_batches(_ROWS, columns=[column] if column else None)

    return _table_rows(file, "parquet", batches())


STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
"""The last bytes of an IPC stream of Arrow."""


def arrow_rows(file: Path, column: str) -> Iterator[Record]:
    """Yields each row of an IPC file or IPC stream as a dict, with this column or all."""
    import pyarrow.ipc

    def batches() -> Iterator[Any]:
        with pyarrow.memory_map(str(file)) as content:
            is_file = content.read(6) == b"ARROW1"
            content.seek(content.size() - 8)
            if not is_file and content.read() != STREAM_END:
                raise ValueError("an IPC stream without its end")  # a tear between two batches shows in nothing else
            content.seek(0)
            open_it = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
            names = _check_column(file, column, open_it(content).schema)
            content.seek(0)
            fields = [names.index(column if column in names else column.partition(".")[0])] if column else None
            reader = open_it(content, options=pyarrow.ipc.IpcReadOptions(included_fields=fields))
            for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
                batch.validate(full=True)  # offsets in a damaged file may lead out of the memory
                yield batch

    return _table_rows(file, "Arrow", batches())


def _check_column(file: Path, column: str, schema: Any) -> list[str]:
    """The names of a table's columns. Raises ConfigError if `column`, such as "text" or "meta.text", is none."""
    names = [each.name for each in schema]
    _check_names(str(file), column, names)
    if column and not _has(schema, column):
        raise _no_column(file, column, names)
    return names


def _has(fields: Iterable[Any], column: str) -> bool:
    import pyarrow

    types = {each.name: each.type for each in fields}
    head, dot, tail = column.partition(".")
    return column in types or bool(dot and pyarrow.types.is_struct(types.get(head)) and _has(types[head], tail))


def _table_rows(file: Path, kind: str, batches: Iterator[Any]) -> Iterator[Record]:
    import pyarrow

    number = 0
    try:
        for batch in batches:
            names = batch.schema.names
            for row in zip(*batch.columns):
                number += 1
                place = f"{file}: row {number}"
                try:
                    record: Any = {name: value.as_py() for name, value in zip(names, row)}
                except UnicodeDecodeError as error:
                    record = BadRecord(f"{place}: not UTF-8 at byte {error.start} of the text")
                yield place, record
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        yield str(file), BadRecord(f"{file}: cannot be read as {kind} after row {number}: {reason}")
