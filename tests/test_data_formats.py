"""Formats: each has the documents of its JSONL twin, and what is torn, corrupt or no text is one sentence each."""

import bz2
import csv
import gzip
import io
import json
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import pytest

from components.config import ConfigError
from components.data import formats
from components.data.cache import _contents, _key
from components.data.sources import COMPRESSED, READERS, RECORDS, BadRecord, find_files, read_records, unread_files
from tests.caches import spec_of
from tests.test_data_sources import reasons, texts

TEXTS = ["one", 'she said "no", twice\n\tand\r\nleft', "", "naïve 日本 😀\u2028", '"', "x" * 200_000, "'a;b'", "last"]
ROWS = [{"text": text, "id": str(number), "meta.x": "dotted"} for number, text in enumerate(TEXTS)]
NESTED = [{"meta": {"text": text, "of": {"x.y": text}}} for text in TEXTS]


def packed(last: str, content: bytes) -> bytes:
    """Content in two members, or in two frames."""
    half = len(content) // 2
    whole: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    pack = whole.get(last, lambda part: _arrow_packed(last, part))
    return pack(content[:half]) + pack(content[half:])


def _arrow_packed(last: str, content: bytes) -> bytes:
    found = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(found, COMPRESSED[last]) as stream:
        stream.write(content)
    return found.getvalue().to_pybytes()


def _csv(rows: list[dict], delimiter: str) -> bytes:
    found = io.StringIO(newline="")
    writer = csv.DictWriter(found, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return found.getvalue().encode("utf-8-sig")


def _table(rows: list[dict], write: Callable[[Any, Any], None]) -> bytes:
    found = pyarrow.BufferOutputStream()
    write(pyarrow.Table.from_pylist(rows), found)
    return found.getvalue().to_pybytes()


def _stream(table: Any, sink: Any) -> None:
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


WRITTEN: dict[str, Callable[[list[dict]], bytes]] = {
    ".jsonl": lambda rows: "".join(json.dumps(row) + "\n" for row in rows).encode(),
    ".ndjson": lambda rows: "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode(),
    ".json": lambda rows: json.dumps(rows, indent=1).encode(),
    ".csv": lambda rows: _csv(rows, ","),
    ".tsv": lambda rows: _csv(rows, "\t"),
    ".parquet": lambda rows: _table(rows, pyarrow.parquet.write_table),
    ".arrow": lambda rows: _table(rows, _stream),
    ".feather": lambda rows: _table(rows, lambda table, sink: pyarrow.feather.write_feather(table, sink, chunksize=3)),
}


@pytest.mark.parametrize("end", RECORDS)
def test_a_format_has_the_documents_of_its_jsonl_twin(end: str, tmp_path: Path) -> None:
    """Also with an ending in capital letters, and with a space in the name."""
    kind, dot, last = end[1:].partition(".")
    given: dict[str, list[dict]] = {"a b": ROWS, "NESTED": NESTED}
    for name, rows in given.items():
        if rows is NESTED and kind in ("csv", "tsv"):
            continue
        content = WRITTEN[f".{kind}"](rows)
        file = tmp_path / (name + (end.upper() if name == "NESTED" else end))
        file.write_bytes(packed(dot + last, content) if last else content)
        assert find_files(str(file)) == [file]
        assert [record for _, record in read_records(file)] == rows
        if rows is ROWS:
            assert texts(file) == TEXTS
            assert {*texts(file, "meta.x")} == {"dotted"}, "a field of this very name"
        else:
            assert texts(file, "meta.text") == texts(file, "meta.of.x.y") == TEXTS
            (first, *_) = reasons(file, "meta.no")
            assert 'no text in field "meta.no"' in first or 'no column "meta.no"' in first


@pytest.mark.parametrize("end", [*(".txt" + last for last in COMPRESSED), ".md", ".MARKDOWN", ".Text.GZ"])
def test_a_text_is_a_document(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_PIECE", 7)
    text, last = "\ufeffone\r\nnaïve 日本 😀\r\n" * 999, Path(end).suffix.lower()
    file = tmp_path / f"book{end}"
    file.write_bytes(packed(last, text.encode()) if last in COMPRESSED else text.encode())
    assert texts(file) == [text.removeprefix("\ufeff").replace("\r\n", "\n")]
    file.write_bytes(packed(last, b"0123456789\xff") if last in COMPRESSED else b"0123456789\xff")
    assert reasons(file) == [f"{file}: not UTF-8 at byte 10"]


@pytest.mark.parametrize("last", COMPRESSED)
def test_a_compressed_file_is_read_to_its_end_or_refused(last: str, tmp_path: Path) -> None:
    lines = [f"line {number} {number**7}" for number in range(20_000)]
    content = "".join(json.dumps({"text": line}) + "\n" for line in lines).encode()
    whole, file = packed(last, content), tmp_path / f"a.jsonl{last}"
    cut = {
        "a torn head": whole[:3],
        "torn": whole[: len(whole) // 3],
        "torn in the second member": whole[: len(whole) * 3 // 4],
        "one byte short": whole[:-1],
        "no such file": content,
        "more after the end": whole + b"more after the end",
        "a byte after the end": whole + b"m",
        "another member with a damaged head": whole + b"\x01\x02" + whole[2:],
    }
    for name, given in cut.items():
        file.write_bytes(given)
        (reason,) = reasons(file)
        assert reason.startswith(f"{file}: cannot be decompressed after byte "), name
        assert len(reason.splitlines()) == 1
        read = texts(file)
        assert read == lines[: len(read)]
    file.write_bytes(packed(last, b""))
    assert texts(file) == reasons(file) == []


def test_a_bomb_is_refused_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_HARMLESS", 1 << 20)
    for last in COMPRESSED:
        content = packed(last, b" " * (32 << 20))
        for kind in (".txt", ".jsonl", ".json"):
            file = tmp_path / ("bomb" + kind + last)
            file.write_bytes(content)
            tracemalloc.start()
            (reason,) = reasons(file)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert f"{file}: decompresses to more than 200 times its {len(content):,} bytes" in reason
            assert peak < (24 << 20) + 2 * 200 * len(content)
    monkeypatch.setattr(formats, "_DICTIONARY", 1 << 20)
    file = tmp_path / "a.txt.xz"
    file.write_bytes(lzma.compress(b"text", preset=9))
    (reason,) = reasons(file)
    assert reason.startswith(f"{file}: cannot be decompressed after byte 0: ")


CSV = {
    "a torn quote": (b'text,id\ngood,1\n"torn,2\nnever,3\n', "3: not CSV: unexpected end of data (line 4)", 1),
    "more after a quote": (b'text,id\ngood,1\n"a"b,2\ngood,3\n', "3: not CSV: ',' expected after '\"'", 2),
    "fewer fields": (b"text,id\ngood,1\nbad\n\ngood,2\n", "3: 1 fields, but the first row has 2", 2),
    "more fields": (b"text,id\n\ngood,1\na,b,c\r\ngood,2", "4: 3 fields, but the first row has 2", 2),
    "NUL": (b"text\ngood\nb\0d\ngood\n", "3: not CSV: a NUL byte (line 3)", 2),
    "latin-1": (b"text\ngood\ncaf\xe9\ngood\n", "3: not UTF-8 at byte 3 of line 3", 2),
    "utf-16": ("text\nbad\n".encode("utf-16"), "1: not UTF-8 at byte 0 of line 1", 0),
    "utf-16 without a mark": ("text\nbad\n".encode("utf-16-le"), "1: not CSV: a NUL byte (line 1)", 0),
    "a huge field": (b"text,id\ngood,1\n" + b"x" * 2000 + b",2\ngood,3\n", "3: not CSV: a row of more than 1,000 ", 2),
    "a huge line": (b"text,id\ngood,1\n" + b"x,2," * 2000 + b"\ngood,3\n", "3: not CSV: a row of more than 1,000 ", 2),
    "an open quote": (b'text\n"' + b"x\n" * 499 + b"good\n", "2: not CSV: a row of more than 1,000 bytes, or a qu", 0),
    "no end": (b"text,id\ngood,1\n" + b"x" * 9000, "3: not CSV: a row of more than 1,000 bytes", 1),
    "the column twice": (b"text,text\na,b\n", '1: two columns have the name "text"', 0),
}


@pytest.mark.parametrize("case", CSV)
def test_a_bad_row_is_told_by_its_line(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_LONGEST_ROW", 1000)
    (content, reason, good), file = CSV[case], tmp_path / "a.csv"
    file.write_bytes(content)
    (found,) = reasons(file)
    assert found.startswith(f"{file}:{reason}")
    assert texts(file) == ["good"] * good
    file.write_bytes(b"a,b\n1,2\n")
    assert reasons(file) == [f'{file}: no column "text" (training.dataset_text_field); it has a, b']
    file.write_bytes(b"text\n")
    assert texts(file) == reasons(file) == []


JSON = {
    b'[{"text": "one"}, {"text": "two"': ["one"],
    b'[{"text": "one"} {"text": "two"}]': ["one"],
    b'[{"text": "one"}, {"text": "two"},]': ["one", "two"],
    b'[{"text": "one"}] {"text": "two"}': ["one"],
    b'[{"text": "one"}, {"text": "t\xff"}]': [],
    b'[{"text": "one"},' + b"[" * 100_000: ["one"],
    b"[": [],
    b"\0" * 9: [],
    b'{"text": "one"}\n[{"text": "two"}]\n': ["one"],
    b'{"text": "one"}\n{"text": ["a", "b"]}\n': ["one"],
    b'[{"text": "one"}, {"text": ["a", "b"]}, {"text": "two"}]': ["one", "two"],
}


@pytest.mark.parametrize("content", JSON, ids=lambda content: repr(content[:60]))
def test_a_bad_list_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    (reason,) = reasons(file)
    assert reason.startswith(str(file))
    assert len(reason.splitlines()) == 1
    assert texts(file) == JSON[content]
    assert b'["a"' not in content or reason.endswith("but a list: join its texts")


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_a_list_read_in_pieces_is_the_list(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_PIECE", size)
    file = tmp_path / "a.json"
    for found in ([], [12345, -1.5e10, "a,]", [], {}], [{"text": "é]" * 99}] * 3, [1]):
        for encoding in ("utf-8", "utf-8-sig", "utf-16"):
            file.write_text(f" {json.dumps(found, ensure_ascii=False, indent=1)} \n", encoding)
            assert [record for _, record in read_records(file)] == found
    monkeypatch.setattr(formats, "_LONGEST_LINE", 100)
    file.write_text('[{"text": "one"}, {"text": "' + "x" * 1000 + '"}, {"text": "two"}]')
    assert (texts(file), len(reasons(file))) == (["one"], 1)


@pytest.mark.parametrize("end", [".arrow", ".feather"])
def test_a_damaged_arrow_file_is_one_sentence(end: str, tmp_path: Path) -> None:
    file, rows = tmp_path / f"a{end}", [{"text": f"row {number} " * 9, "id": number} for number in range(9)]
    whole = WRITTEN[end](rows)
    file.write_bytes(whole)
    assert reasons(file, "body") == [f'{file}: no column "body" (training.dataset_text_field); it has text, id']
    assert len(reasons(file, "id")) == 9
    cut = [whole[:at] for at in range(1, len(whole), 16)]
    for given in (b"x", b"\0" * 99, b"ARROW1" + b"\0" * 99, whole[8:] * (end == ".feather") or b"x", *cut):
        file.write_bytes(given)
        (reason,) = reasons(file)
        assert reason.startswith(f"{file}: cannot be read as Arrow after row ")
        assert len(reason.splitlines()) == 1
    for at in range(0, len(whole), 5):  # no damage may end the process
        file.write_bytes(whole[:at] + b"\xff" * 4 + whole[at + 4 :])
        assert len(texts(file)) <= 9
    invalid = pyarrow.array([b"good", b"ab\xff"]).view(pyarrow.string())
    twice = pyarrow.table([pyarrow.array(["a"])] * 2, names=["text", "text"])
    for table in (pyarrow.table({"text": invalid}), twice):
        with pyarrow.OSFile(str(file), "wb") as sink:
            _stream(table, sink)
        assert len(reasons(file)) == 1
        assert not texts(file)


def test_other_formats_are_read_where_no_texts_are(tmp_path: Path) -> None:
    """A path that was readable before these formats had readers has the same files, and so the same cache."""
    others = ["a.json", "b.csv", "c.jsonl.gz", "notes.md"]
    unread = ["README.md", "README_zh.md", "dataset_info.json", "config.json", "LICENSE", "a.json.xz", "b.csv.gz"]
    for name in [*others, *unread]:
        (tmp_path / name).write_text("x")

    def found(endings: Any = READERS) -> list[str]:
        return [file.name for file in find_files(str(tmp_path), endings)]

    assert found() == [file.name for file in find_files(f"{tmp_path}/*")] == others[:3], "notes come last"
    assert [file.name for file in find_files(f"{tmp_path}/*.md")] == ["notes.md"]
    assert found(RECORDS) == ["a.json"], "chats were read from .json"
    left = unread_files(str(tmp_path))
    assert left
    assert [file.name for file in left.files] == ["a.json.xz", "b.csv.gz", "notes.md"], "copies and notes"
    (tmp_path / "0.jsonl").write_text("x")
    assert found() == ["0.jsonl"]
    assert found(RECORDS) == ["0.jsonl", "a.json"]
    assert [file.name for file in find_files(str(tmp_path / "README.md"))] == ["README.md"], "a file that is named"
    (tmp_path / "p.parquet.gz").write_text("x")
    with pytest.raises(ConfigError, match=r'ending "\.parquet\.gz" is not one of .*: decompress \.parquet\.gz'):
        find_files(str(tmp_path / "p.parquet.gz"))


def test_keys_of_caches_stay(tmp_path: Path) -> None:
    """Otherwise all data would be tokenized again, and no run could be resumed."""
    (tmp_path / "a.txt").write_text("In the beginning\n")
    (tmp_path / "b.jsonl").write_text('{"text": "God created"}\n')
    (tmp_path / "notes.md").write_text("beside them")
    keys = {"a.txt": "e916e9fb69d49a1ee57f592a", "b.jsonl": "7ae5e6f9e000cbc106c4d3a6", "": "d3a3abf408a1e37daa6af481"}
    for name, key in keys.items():
        spec = spec_of(tmp_path / name, tmp_path / ".cache")
        assert _key(spec, _contents(spec, find_files(spec.path, spec.endings))) == key


def test_bad_records_of_chats_are_told_as_those_of_texts(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"prompt,completion\nhello,hi\n") + b"more after it")
    ((_, bad),) = read_records(tmp_path / "a.csv.gz")
    assert isinstance(bad, BadRecord)


def test_long_fields_are_read_and_other_readers_of_csv_keep_their_limit(tmp_path: Path) -> None:
    """The csv module has one limit of a field for the whole process."""
    (tmp_path / "a.csv").write_text(f"text\n{'a' * 200_000}\nb\n")
    limit = csv.field_size_limit()
    records = read_records(tmp_path / "a.csv")
    assert len(next(records)[1]["text"]) == 200_000
    assert csv.field_size_limit() == limit
    assert [record for _, record in records] == [{"text": "b"}]
