"""Streams: tokens made ahead of training are those of the cache, in one order; what can be streamed; a run."""

import gzip
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from components.config import ROOT, ConfigError, load_config
from components.data import PackedSequences
from components.data.order import check_data_order, data_order
from components.data.packed import StreamedSequences
from components.data.sources import BadRecord, read_documents
from components.data.stream import (
    StreamCache,
    StreamSpec,
    _one_line,
    check_stream,
    is_stream,
    read_progress,
    stream_documents,
    stream_spec,
)
from components.data.tokenizer import load_tokenizer
from tests.caches import read
from tests.limits import wait_until
from tests.streams import (
    SEQ_LEN,
    VERSES,
    in_order,
    own_home,
    same_files,
    save_parquet,
    spec,
    streamed,
    verses_and_cache,
)

_own_home = pytest.fixture(autouse=True)(own_home)
books = pytest.fixture(scope="module")(verses_and_cache)


# The same as the cache, for every reader


def test_ranks_and_workers_read_a_growing_stream_in_the_order_of_the_dataset(
    books: tuple[Path, PackedSequences], tmp_path: Path
) -> None:
    data, right = books
    of = spec(data, tmp_path)
    with streamed(of, ahead_tokens=300) as sequences:
        assert read(sequences, 2, 1, num_workers=2) == in_order(right, 0, 2)
        assert not read_progress(of.folder)["is_whole"]
        # In the middle, and at the end of the dataset, where it begins again.
        wrap = len(right) // 12
        for ranks in (1, 2, 4):
            assert read(sequences, 3, ranks, 12 * wrap // 2) == in_order(right, 12 * wrap // 2, 3)
            assert read(sequences, 4, ranks, 12 * (wrap - 1)) == in_order(right, 12 * (wrap - 1), 4)
        assert read(sequences, 2, 2, 12 * (5 * wrap)) == in_order(right, 12 * 5 * wrap, 2)
        tokens, ids = sequences.get(np.arange(len(right)))
    for found, wanted in zip((tokens, ids), right.get(np.arange(len(right)))):
        assert np.array_equal(found, wanted)
    assert same_files(of, right)
    # All of it is there: nobody has to write any more.
    assert read(StreamedSequences(StreamCache(of), SEQ_LEN), 2, 1, 2400) == in_order(right, 2400, 2)


def test_a_window_of_a_stream_is_permuted_as_a_function_of_the_position(
    books: tuple[Path, PackedSequences], tmp_path: Path
) -> None:
    data, right = books
    with streamed(spec(data, tmp_path), ahead_tokens=300) as growing:
        sequences = StreamedSequences(growing.cache, SEQ_LEN, window=30)
        found = sequences.at(np.arange(90), 5)
        assert read(sequences, 2, 1) == read(sequences, 2, 2) != in_order(right, 0, 2)
        assert read(sequences, 2, 1, 24, num_workers=1) == read(sequences, 4, 1)[2:]
        assert not read_progress(sequences.cache.folder)["is_whole"]
    windows = found.reshape(3, 30)
    assert (np.sort(windows) == np.arange(90).reshape(3, 30)).all()
    assert len({tuple(window) for window in (windows - 30 * np.arange(3)[:, None]).tolist()}) == 3
    assert (sequences.at(np.arange(40, 70), 5) == found[40:70]).all()
    assert (sequences.at(np.arange(30), 6) != found[:30]).any(), "the seed"
    path = ["--training.dataset_path", str(data), "--training.dataset_streaming"]
    jobs = {size: load_config([*path, "--training.dataset_shuffle_window", str(size)]) for size in (0, 30)}
    runs = {size: {"data_order": data_order("k", None, job), "global_batch_size": 8} for size, job in jobs.items()}
    for was, now in ((0, 30), (30, 0)):
        with pytest.raises(ConfigError, match=f"training.dataset_shuffle_window was {was}, is {now}"):
            check_data_order(runs[was], runs[now], 8)
    check_data_order(runs[30], runs[30], 8)


def documents_from(of: StreamSpec, place: dict) -> Iterator[tuple[str | BadRecord, dict]]:
    """stream_documents, with texts in one piece."""
    for found, after in stream_documents(of, place):
        yield (found if isinstance(found, BadRecord) else "".join(found)), after


def test_documents_are_those_of_the_files_and_go_on_from_any_place(tmp_path: Path) -> None:
    texts = [text for text in VERSES[:130] if text]
    parquet = save_parquet(tmp_path / "parquet", texts)
    (tmp_path / "jsonl").mkdir()
    for number in range(2):
        lines = [json.dumps({"text": text}) for text in texts[number::2]]
        with gzip.open(tmp_path / "jsonl" / f"c4-train.{number:05}-of-00002.json.gz", "wt") as file:
            file.write("\n".join(lines))
    (tmp_path / "text").mkdir()
    for name in ("b.txt", "a.txt"):
        (tmp_path / "text" / name).write_text("\n".join(texts) + name)
    right = {
        parquet: texts,
        tmp_path / "jsonl": texts[::2] + texts[1::2],
        tmp_path / "text": ["\n".join(texts) + name for name in ("a.txt", "b.txt")],
    }
    for folder, documents in right.items():
        of = spec(folder, tmp_path)
        found, places = zip(*documents_from(of, {}))
        assert list(found) == documents
        for number in range(0, len(documents), 9):
            place = json.loads(json.dumps(places[number]))
            assert [document for document, _ in documents_from(of, place)] == documents[number + 1 :]


# What is streamed


def test_the_key_is_the_data_and_the_cache_is_of_one_copy(tmp_path: Path) -> None:
    data = save_parquet(tmp_path / "data", VERSES[:100])
    first = spec(data, tmp_path)
    copy = Path(shutil.copytree(data, tmp_path / "copy"))
    (file, *_) = sorted(copy.iterdir())
    os.utime(file, ns=(0, 0))
    assert spec(copy, tmp_path).key == first.key
    assert spec(copy, tmp_path).folder != first.folder
    others = [spec(data, tmp_path, "--training.dataset_errors", "skip"), spec(data, tmp_path, *FIELD)]
    save_parquet(copy, VERSES[:101])
    others.append(spec(copy, tmp_path))
    assert len({first.key, *(other.key for other in others)}) == 4


def test_a_resume_on_files_that_changed_at_equal_size_is_refused(tmp_path: Path) -> None:
    """Of a small file and of a large one; what was saved before contents were hashed still resumes."""
    config = load_config(["--training.seq_len", "8"])
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("In the beginning God")
    with (data / "b.txt").open("wb") as file:
        file.truncate(3 << 20)
    first = spec(data, tmp_path)
    saved = {"data_order": data_order(first.key, first.content, config), "global_batch_size": 4}
    for name, at in (("a.txt", 3), ("b.txt", 0), ("b.txt", (3 << 20) - 1), ("b.txt", ((3 << 20) - (1 << 16)) // 3)):
        times = (data / name).stat()
        with (data / name).open("r+b") as file:
            file.seek(at)
            file.write(b"T")
        os.utime(data / name, ns=(times.st_atime_ns, times.st_mtime_ns))
        changed = spec(data, tmp_path)
        assert (changed.key, changed.folder != first.folder) == (first.key, True)
        now = {"data_order": data_order(changed.key, changed.content, config), "global_batch_size": 4}
        with pytest.raises(ConfigError, match="content of the stream's files was"):
            check_data_order(saved, now, 4)
        older = {"data_order": data_order(first.key, None, config), "global_batch_size": 4}
        check_data_order(older, now, 4)
        saved = now


def test_an_end_that_is_published_after_the_last_token_is_seen(tmp_path: Path) -> None:
    """One document: the writer knows only later that there is no other."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("\ufeff" + "\n".join(VERSES[:40]))
    with streamed(spec(tmp_path / "data", tmp_path / "cache"), ahead_tokens=10_000) as sequences:
        sequences.get(np.array([0]))
        cache = sequences.cache
        wait_until(lambda: read_progress(cache.folder)["is_whole"])
        cache.is_whole = False  # as mapped just before
        count = (len(cache.tokens) - 1) // SEQ_LEN
        again, _ = sequences.get(np.array([count]))
        assert np.array_equal(again, sequences.get(np.array([0]))[0])
    tokens = load_tokenizer(cache.spec.tokenizer_path).encode("\n".join(VERSES[:40]))
    assert cache.tokens[1:-1].tolist() == tokens


def test_files_of_a_second_kind_are_not_left_out_silently(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("two")
    with pytest.raises(ConfigError, match=r"json files of the split train, and would leave out .*sub/b\.txt: rename"):
        next(stream_documents(spec(tmp_path, tmp_path / "cache"), {}))


JSONL = '{"text": "one"}\n'


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (
            ["train.jsonl", "test.jsonl", "other.jsonl"],
            r"of the split train, and would leave out .*/other\.jsonl: rename",
        ),
        (["a.jsonl", "B.JSONL"], r"B\.JSONL: a stream reads only \.jsonl, \.ndjson, \.parquet, \.txt: rename"),
        (["test.jsonl"], 'the split "train" is read; it has only test'),
        (["a.jsonl.zst"], r"a\.jsonl\.zst: needs the package zstandard: .* -m pip install zstandard, or decompress it"),
        (["a.jsonl", "a.jsonl.tar.gz"], "cannot be read: NotImplementedError: "),
        (["a.jsonl.gz"], "cannot be read: BadGzipFile: "),
    ],
)
def test_files_that_cannot_be_streamed_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], told: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in files:
        (tmp_path / name).write_text(JSONL)
    with pytest.raises(ConfigError, match=told) as caught:
        next(stream_documents(spec(tmp_path, tmp_path / ".cache"), {}))
    assert len(str(caught.value).splitlines()) == 1


def test_data_beside_those_of_a_stream_are_told(tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl", "train.csv"):
        (tmp_path / name).write_text(JSONL if name != "train.csv" else "text\none\n")
    (tmp_path / "more_train.ndjson").write_text(JSONL)
    words = ["--training.dataset_path", str(tmp_path), "--training.dataset_streaming", "--validation.no_enable"]
    left = check_stream(load_config([*words, "--training.dataset_cache", str(tmp_path / ".cache")]))
    assert left
    assert ([file.name for file in left.files], left.size_bytes) == (["test.jsonl", "train.csv"], 25)
    assert left.read_bytes == 2 * len(JSONL)
    assert ": a stream reads json files of the split train; rename or move" in str(left)


def write_rows(file: Path, rows: list[dict]) -> None:
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


NULLS: dict[str, Any] = {"text": None}


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"text": "one", "id": 1}, {"text": "two", "id": "x"}),
        ({"text": "one", "id": {"a": 1}}, {"text": "two", "id": [1]}),
        ({"id": "x", "text": "one"}, {"other": None, "text": "two"}),
        ({"text": "one"}, NULLS),
        (NULLS, {"text": "two"}),
        ({"text": "one"}, {"text": 3}),
    ],
    ids=json.dumps,
)
def test_files_of_a_stream_differ_in_columns(tmp_path: Path, ending: str, first: dict, second: dict) -> None:
    """A stream yields what is read without it."""
    files = [tmp_path / f"{number}{ending}" for number in range(2)]
    for file, row in zip(files, (first, second)):
        write_rows(file, [row])
    expected = [row["text"] if isinstance(row["text"], str) else BadRecord for row in (first, second)]
    for found in (
        [document for file in files for document in read_documents(file, "text")],
        [document for document, _ in stream_documents(spec(tmp_path, tmp_path / ".cache"), {})],
    ):
        assert [BadRecord if isinstance(document, BadRecord) else document for document in found] == expected


def test_types_in_one_file_and_categories(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": "one"}])
    write_rows(tmp_path / "b.jsonl", [{"text": "two"}, {"text": 3}, {"text": None}])
    found = [document for document, _ in stream_documents(spec(tmp_path, tmp_path / ".cache"), {})]
    assert found[:2] == ["one", "two"]
    assert [isinstance(document, BadRecord) for document in found] == [False, False, True, True]
    categories = pyarrow.array(["one", "two", "one"]).dictionary_encode()
    (tmp_path / "parquet").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": categories, "of": categories}), tmp_path / "parquet/a.parquet")
    of = spec(tmp_path / "parquet", tmp_path / ".cache")
    assert [document for document, _ in stream_documents(of, {})] == ["one", "two", "one"]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_file_without_the_column_is_told_when_it_is_met(tmp_path: Path, ending: str) -> None:
    write_rows(tmp_path / f"a{ending}", [{"text": "one"}])
    write_rows(tmp_path / f"b{ending}", [{"body": "two", "id": 1}])
    documents = stream_documents(spec(tmp_path, tmp_path / ".cache"), {})
    assert next(documents)[0] == "one"
    with pytest.raises(ConfigError, match=r'a file has no "text" \(training.dataset_text_field\); it has body[^_]*id'):
        next(documents)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (KeyError("x"), False),
        (RecursionError("deep\n\nand deeper"), False),
        (FileNotFoundError(2, "No such file"), False),
        (OSError(5, "Input/output error"), True),
        (ConnectionError("Server Disconnected"), True),
        (TimeoutError(), True),
    ],
)
def test_an_error_of_the_library_is_one_line_and_one_that_may_be_over_passes(
    books: tuple[Path, PackedSequences], tmp_path: Path, error: Exception, passes: bool
) -> None:
    with pytest.raises(type(error) if passes else ConfigError) as caught, _one_line(spec(books[0], tmp_path), 7):
        raise error
    if not passes:
        (line,) = str(caught.value).splitlines()
        assert line.startswith(f"data {books[0]}: cannot be read after record 7: {type(error).__name__}: ")


FIELD = ["--training.dataset_text_field", "id"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (FIELD, 'record 1: no text in field "id"'),
        (
            ["--training.dataset_text_field", "body"],
            "dataset_path = .*a file has no .body.*it has id: int64, text: string",
        ),
        (["--validation.enable"], "validation.enable = true: training data is streamed.*set validation.dataset_path"),
        (["--validation.enable", "--validation.held_out_fraction", "0.1"], "validation.held_out_fraction = 0.1: train"),
        (["--training.dataset_cache", "/proc/cache"], 'dataset_cache = "/proc/cache": cannot make /proc/cache/stream-'),
        (["--training.dataset_path", "README.md"], 'dataset_path = "README.md": not a folder'),
        (["--training.dataset_path", "assets/figures"], "dataset_path = "),
    ],
)
def test_what_cannot_be_streamed_is_told_in_one_line(
    books: tuple[Path, PackedSequences], tmp_path: Path, arguments: list[str], told: str
) -> None:
    given = ["--training.dataset_path", str(books[0]), "--training.dataset_streaming"]
    config = load_config([*given, "--training.dataset_cache", str(tmp_path), *arguments])
    with pytest.raises(ConfigError, match=told) as caught:
        check_stream(config)
    assert str(caught.value).startswith("command line: ")
    assert len(str(caught.value).splitlines()) == 1


def test_what_is_streamed(tmp_path: Path) -> None:
    def asked(*arguments: str) -> bool:
        return is_stream(load_config(list(arguments)).training)

    assert not asked()
    assert not asked("--training.dataset", "c4", "--training.dataset_path", "here")
    assert asked("--training.dataset_path", "here", "--training.dataset_streaming")
    job = tmp_path / "torchtitan.toml"
    job.write_text('[training]\ndataset = "c4"\nseq_len = 8192\n[validation]\nenable = false\n')
    assert asked("--job.config_file", str(job))
    assert asked("--training.dataset", "org/name:config")
    with pytest.raises(ConfigError, match=r"dataset_streaming = false: .*always streamed"):
        stream_spec(load_config(["--training.dataset", "c4", "--training.no_dataset_streaming"]))
    with pytest.raises(ConfigError, match=r'training\.dataset = "a/b/c": expected "org/name"'):
        stream_spec(load_config(["--training.dataset", "a/b/c"]))


# A run


def test_a_run_and_its_resume_without_the_cache(books: tuple[Path, PackedSequences], tmp_path: Path) -> None:
    """Six steps on two ranks; then the last three again, from the checkpoint, with the tokens made anew."""
    command = ["./run_train.sh", "--job.dump_folder", str(tmp_path), "--training.dataset_path", str(books[0])]
    command += ["--training.dataset_streaming", "--validation.no_enable", "--training.seq_len", "32"]
    command += ["--training.steps", "6", "--checkpoint.interval", "3", "--lr_scheduler.warmup_steps", "2"]
    command += ["--metrics.log_freq", "1", "--training.dataset_cache"]
    losses = []
    for number in range(2):
        environment = {**os.environ, "NGPU": "2", "PYTHON": sys.executable}
        done = subprocess.run(
            [*command, str(tmp_path / f"cache{number}")], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        losses.append({row["step"]: row["loss"] for row in rows if "loss" in row})
        shutil.rmtree(tmp_path / "checkpoint" / "step-6")
    assert "continuing after step 3, at sequence 24" in done.stdout
    assert list(losses[0]) == [1, 2, 3, 4, 5, 6]
    assert losses[0] == losses[1]
