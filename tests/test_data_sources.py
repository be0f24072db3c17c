"""Sources: the files of a path, their documents, what is wrong with a record, and what the job file says of them."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from components.config import ROOT, ConfigError, Training, load_config
from components.data import DataSpec, data_spec, formats, prepare
from components.data.__main__ import prepare_all
from components.data.datasets import open_datasets
from components.data.datasets import spec_of as dataset_spec
from components.data.sources import BadRecord, find_files, read_documents, unread_files
from tests.caches import caches_in, documents_of, prepared, spec_of


def test_a_path_may_be_a_file_a_folder_or_a_glob(tmp_path: Path) -> None:
    folder = tmp_path / "my data [1]"
    for name in ("b.txt", "a.text", "sub/deep/c.jsonl", ".hidden.txt", ".git/x.txt", "notes.md", "empty.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("" if name == "empty.txt" else "text")
    names = ["a.text", "b.txt", "sub/deep/c.jsonl"]
    assert find_files(str(folder)) == [folder / name for name in names]
    assert find_files(str(folder / "b.txt")) == [folder / "b.txt"]
    assert find_files(f"{tmp_path}/my data*/*.t*xt") == [folder / "a.text", folder / "b.txt"]
    assert (
        find_files(f"{folder}/*.t*xt") == find_files(f"{folder}/**/[ab].t*xt") == [folder / name for name in names[:2]]
    )
    assert find_files(f"{tmp_path}/**/*.*") == [folder / name for name in names]
    assert find_files(f"{tmp_path}/**/sub/**/*.jsonl") == find_files(f"{tmp_path}/**/sub/**") == [folder / names[2]]
    assert find_files(f"{tmp_path}/**/my*/**/?.t*xt") == [folder / name for name in names[:2]]


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    (tmp_path / "data" / "inside").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "far.txt").write_text("far")
    (tmp_path / "data" / "near.txt").write_text("near")
    for link, target in [("up", ".."), ("inside/self", "."), ("inside/back", ".."), ("away", "../elsewhere")]:
        (tmp_path / "data" / link).symlink_to(target)
    (tmp_path / "elsewhere" / "home").symlink_to("../data")
    (tmp_path / "data" / "loop.txt").symlink_to("loop.txt")
    folder = tmp_path / "data"
    reached = [folder / name for name in ("away/far.txt", "near.txt", "up/elsewhere/far.txt")]
    assert find_files(f"{folder}/**/*.txt") == reached
    assert find_files(f"{folder}/**/elsewhere/*") == reached[2:]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.txt", "no such file or folder"),
        ("~nobody-of-this-name/x.txt", "no such file or folder"),
        ("nul\0byte", "no such file or folder"),
        ("mi*ing", r"no file that ends in \.arrow, \.csv, .*, \.txt, also compressed \(\.gz, "),
        ("only_empty", "only empty files"),
        ("nothing", "no file that ends in"),
        ("book.pdf", r'ending ".pdf" is not one of \.arrow, .*\): save .pdf as .txt'),
        ("n" * 300, "File name too long"),
    ],
)
def test_a_path_without_data_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "only_empty").mkdir()
    (tmp_path / "only_empty" / "a.txt").touch()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "book.pdf").write_text("%PDF")
    with pytest.raises(ConfigError, match=message):
        prepare(spec_of(path, tmp_path / "cache"))


def test_a_field_of_files_that_have_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("In the beginning")
    words = ["--training.dataset_path", str(tmp_path), "--training.dataset_text_field", "body"]
    with pytest.raises(ConfigError, match=r'training\.dataset_text_field = "body": .* has texts without fields'):
        prepare_all(load_config(words))
    (tmp_path / "b.jsonl").write_text('{"body": "God created the heaven"}\n')
    assert dataset_spec(load_config(words)).text_field == "body"
    source = ["--training.mixture[1].name", "a", "--training.mixture[1].dataset_path", str(tmp_path / "a.txt")]
    with pytest.raises(ConfigError, match=r"training\.mixture\[1\]\.dataset_text_field = .*: leave it out"):
        dataset_spec(load_config([*source, "--training.mixture[1].dataset_text_field", "body"]), source=1)


def test_data_beside_that_fill_no_sequence_are_refused_by_their_key(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("In the beginning")
    said = r' = ".*a\.txt": \d tokens do not fill one sequence of 512'
    words = ["--validation.enable", "--training.seq_len", "512"]
    with pytest.raises(ConfigError, match=r"validation\.text_path" + said):
        prepare_all(load_config([*words, "--validation.text_path", str(tmp_path / "a.txt")]))
    for name in ("text", "dataset"):
        with pytest.raises(ConfigError, match=rf'validation\.{name}_path = "nowhere": data nowhere: no such file'):
            prepare_all(load_config([*words, f"--validation.{name}_path", "nowhere"]))
    with pytest.raises(ConfigError, match=r"validation\.dataset_path" + said):
        open_datasets(load_config([*words, "--validation.dataset_path", str(tmp_path / "a.txt")]), 4096)


def test_data_that_are_not_read_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside texts, files of other formats and shards look like data; what describes data does not."""
    unread = {"b.jsonl.GZ": 300, "d.json": 20, "e.csv": 10, "f/notes.md": 7, "f/wiki.001": 3, "f/wiki_00": 5}
    others = ["README.md", "LICENSE", "tokenizer.json", "config.json", "a.py", "model.safetensors", ".hidden.csv"]
    (tmp_path / "f").mkdir()
    for name, size in {**unread, **dict.fromkeys(others, 9999), "g.csv": 0, "a.txt": 345, "B.JSONL": 40}.items():
        (tmp_path / name).write_text("x" * size)
    (tmp_path / "c.Ndjson").write_text('{"text": "c"}\n')
    assert [file.name for file in find_files(str(tmp_path))] == ["B.JSONL", "a.txt", "c.Ndjson"]
    assert find_files(f"{tmp_path}/B.JSONL") == [tmp_path / "B.JSONL"]
    left = unread_files(str(tmp_path))
    assert left
    assert [str(file.relative_to(tmp_path)) for file in left.files] == list(unread)
    assert (left.size_bytes, left.read_bytes, left.is_most) == (345, 399, False)
    assert str(left).startswith(f"not read: 6 files, 345 bytes ({tmp_path}/b.jsonl.GZ, {tmp_path}/d.json, ")
    assert str(left).endswith(
        ", ...): name .csv, .json, .jsonl.gz, .md by a glob, for it is not read beside .txt, .jsonl, .parquet or a "
        "copy of itself; let .001, wiki_00 end in .txt or .jsonl"
    )
    assert unread_files(f"{tmp_path}/*.*")
    assert not unread_files(f"{tmp_path}/*.txt"), "a glob says what is meant"
    (tmp_path / "h.avro").write_text("x" * 10)
    with pytest.raises(ConfigError, match=r"no file that ends in .*; not read: 1 file, 10 bytes \(.*h.avro\): convert"):
        find_files(f"{tmp_path}/*.avro")
    (tmp_path / "h.avro").unlink()
    assert [file.name for file in find_files(f"{tmp_path}/*.csv")] == ["e.csv"]
    (tmp_path / "B.JSONL").write_text('{"text": "b"}\n')
    words = ["--training.dataset_cache", str(tmp_path / ".cache"), "--training.dataset_path", str(tmp_path)]
    prepare_all(load_config([*words, "--validation.enable", "--validation.dataset_path", str(tmp_path / "c.Ndjson")]))
    assert capsys.readouterr().err.count("warning: data not read: 6 files, 345 bytes") == 1


def texts(file: Path, field: str = "text") -> list[str]:
    return ["".join(text) for text in read_documents(file, field) if not isinstance(text, BadRecord)]


def reasons(file: Path, field: str = "text") -> list[str]:
    return [document.reason for document in read_documents(file, field) if isinstance(document, BadRecord)]


def test_text_is_utf8_without_its_mark_and_with_one_kind_of_line_end(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffone\r\ntwo\rthree\n".encode())
    assert texts(file) == ["one\ntwo\rthree\n"]
    file.write_bytes(b"0123456789\xff")
    assert reasons(file) == [f"{file}: not UTF-8 at byte 10"]
    file.write_bytes("\ufeffab".encode() + b"\xff")
    assert reasons(file) == [f"{file}: not UTF-8 at byte 5"]
    file.write_text("text", encoding="utf-16")
    assert reasons(file) == [f"{file}: not UTF-8 at byte 0"]


@pytest.mark.parametrize("piece", [1, 2, 3, 1 << 20])
def test_a_text_read_in_pieces_is_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(formats, "_PIECE", piece)
    file = tmp_path / "a.txt"
    for text in ("\ufeff\ufeffa\r\r\nb\r\n\r\nnaïve 日本 😀\r", "\r\n", "\ufeff", "\r" * 9, "\n\r" * 9):
        file.write_bytes(text.encode())
        assert texts(file) == [text.removeprefix("\ufeff").replace("\r\n", "\n")]
    file.write_bytes("é".encode() * 30_000 + b"\xf0\x9f")
    assert reasons(file) == [f"{file}: not UTF-8 at byte 60000"]


def test_a_line_that_is_no_record_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_LONGEST_LINE", 30)
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n[' + "1, " * 100 + '1]\n{"text": "two"}\n' + "[" * 99)
    one, long, two, last = read_documents(file, "text")
    assert (one, two) == ("one", "two")
    assert long == BadRecord(f"{file}:2: a line of more than 30 bytes: one object a line")
    assert isinstance(last, BadRecord)
    assert last.reason.startswith(f"{file}:4: ")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "not JSON: "),
        (b'{"text": "\xff"}', "not UTF-8 at byte 10 of the line"),
        (b'{"other": "x"}', 'no text in field "text" (training.dataset_text_field)'),
        (b'{"text": 3}', 'no text in field "text"'),
        (b'{"text": null}', 'no text in field "text"'),
        (b'["text"]', 'no text in field "text"'),
        (b'{"text": "\\ud83d"}', "not Unicode: half of a surrogate pair"),
        (b"[" * 100_000, "not JSON: maximum recursion depth exceeded"),
    ],
)
def test_a_bad_line_is_told_by_its_number(tmp_path: Path, line: bytes, reason: str) -> None:
    file = tmp_path / "lines.jsonl"
    good = [json.dumps({"text": f"text {number}"}).encode() for number in range(1, 21)]
    file.write_bytes(b"\r\n".join([*good[:15], b"", line, *good[16:]]))
    found = list(read_documents(file, "text"))
    assert len(found) == 20
    (bad,) = (document for document in found if isinstance(document, BadRecord))
    assert bad.reason.startswith(f"{file}:17: {reason}")
    with pytest.raises(ConfigError, match=r"lines\.jsonl:17: .*To skip such records, training.dataset_errors"):
        prepare(spec_of(file, tmp_path / "cache"), 1)
    assert not caches_in(tmp_path / "cache")


def test_skipped_records_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"body": f"text {number}"}) for number in range(1, 21)]
    lines[16] = "no json"
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    cache = prepared(spec_of(tmp_path, tmp_path / ".cache", field="body", skip=True), 1)
    assert documents_of(cache) == [f"text {number}" for number in range(1, 21) if number != 17]
    assert "2 records skipped" in capsys.readouterr().out
    assert len(json.loads((cache.folder / "index.json").read_text())["skipped_records"]) == 2


def test_parquet_is_read_and_what_is_wrong_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    texts = [f"row {number} " * 50 for number in range(1000)]
    table = pyarrow.table({"text": texts, "id": range(1000), "holes": ["a", None] * 500})
    pyarrow.parquet.write_table(table, file, row_group_size=100)
    assert list(read_documents(file, "text")) == texts
    assert reasons(file, "body") == [f'{file}: no column "body" (training.dataset_text_field); it has text, id, holes']
    assert reasons(file, "holes")[0] == f'{file}: row 2: no text in field "holes" (training.dataset_text_field)'
    assert len(reasons(file, "id")) == 1000
    whole = file.read_bytes()
    for size in (3, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"rows\.parquet: cannot be read as parquet after row 0"):
            prepare(spec_of(file, tmp_path / "cache"), 1)
    file.write_bytes(whole[:200] + b"\xff" * 300 + whole[500:])
    assert reasons(file)[0].startswith(f"{file}: cannot be read as parquet after row")
    invalid = pyarrow.array([b"good", b"ab\xff", b"again"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": invalid}), file)
    first, bad, last = read_documents(file, "text")
    assert (first, last) == ("good", "again")
    assert bad == BadRecord(f"{file}: row 2: not UTF-8 at byte 2 of the text")


def test_a_spec_is_what_the_job_file_says() -> None:
    training = load_config(["--training.dataset_errors", "skip", "--training.dataset_text_field", "body"]).training
    assert data_spec(training, "t") == DataSpec(str(ROOT / "assets/kjv"), "body", True, "t", ROOT / ".cache/tokens")
    assert data_spec(training, "t", "here").path == "here"
    assert data_spec(Training(dataset_separator="</s>"), "t").separator == "</s>"
    with pytest.raises(ConfigError, match=r'training\.dataset = "kvj": not one of kjv, c4, .*; or set dataset_path'):
        data_spec(Training(dataset="kvj"), "t")
