"""Streams: tokens made ahead of training are those of the cache, in one order, whatever reads them or ends them."""

import gzip
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from components.config import ROOT, ConfigError, DataLoader, load_config
from components.data import PackedSequences, prepare
from components.data.loader import Order, build_loader
from components.data.packed import StreamedSequences
from components.data.stream import (
    StreamCache,
    StreamSpec,
    check_stream,
    is_stream,
    read_progress,
    read_wanted,
    start_writer,
    stream_documents,
    stream_spec,
)
from components.data.writer import begin, write
from tests.caches import documents_of, read, spec_of
from tests.processes import ended, processes_of, start, wait_until

VERSES = [
    line for line in (ROOT / "assets/kjv/01-genesis.txt").read_text(encoding="utf-8").splitlines() if line.strip()
]
SEQ_LEN = 8


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.getbasetemp() / "hf"))


def save_parquet(folder: Path, texts: list, files: int = 3) -> Path:
    """A folder as on the hub: train-00000-of-00003.parquet and so on, in row groups of 50."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(np.array_split(np.arange(len(texts)), files)):
        table = pyarrow.table({"id": part, "text": pyarrow.array([texts[index] for index in part], pyarrow.string())})
        pyarrow.parquet.write_table(table, folder / f"train-{number:05}-of-{files:05}.parquet", row_group_size=50)
    return folder


def spec(data: Path, cache: Path, *more: str) -> StreamSpec:
    path = ["--training.dataset_path", str(data), "--training.dataset_streaming"]
    return stream_spec(load_config([*path, "--training.dataset_cache", str(cache), *more]))


@contextmanager
def streamed(of: StreamSpec, ahead_tokens: int = 1 << 20, seq_len: int = SEQ_LEN) -> Iterator[StreamedSequences]:
    """Its sequences, with a writer that is gone at the end."""
    writer = start_writer(of, ahead_tokens)
    try:
        yield StreamedSequences(StreamCache(of, writer), seq_len)
    finally:
        writer.kill()
        writer.wait()
        for pipe in (writer.stdin, writer.stdout):
            assert pipe
            pipe.close()


def expected(data: Path, cache: Path) -> PackedSequences:
    """The sequences of the same folder, tokenized before."""
    return PackedSequences(prepare(spec_of(data, cache), 1), SEQ_LEN)


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PackedSequences]:
    """1,500 verses as parquet, one of them empty; and the sequences that are right."""
    folder = tmp_path_factory.mktemp("books")
    texts = [*VERSES[:700], "", *VERSES[700:1500]]
    return folder / "data", expected(save_parquet(folder / "data", texts), folder / "cache")


def in_order(sequences: PackedSequences, consumed: int, steps: int) -> list[list[str]]:
    """What read gives for sequences in their own order."""

    class InOrder(PackedSequences):
        def at(self, positions: np.ndarray, seed: int) -> np.ndarray:
            return positions % self.num_sequences

    return read(InOrder(sequences.cache, SEQ_LEN), steps, 1, consumed)


def same_files(of: StreamSpec, sequences: PackedSequences) -> bool:
    names = ("tokens.bin", "documents.bin")
    return all((of.folder / name).read_bytes() == (sequences.cache.folder / name).read_bytes() for name in names)


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
        found, places = zip(*stream_documents(of, {}))
        assert list(found) == documents
        for number in range(0, len(documents), 9):
            place = json.loads(json.dumps(places[number]))
            assert [document for document, _ in stream_documents(of, place)] == documents[number + 1 :]


# The writer


def kill(sequences: StreamedSequences) -> None:
    writer = sequences.cache.writer
    assert writer
    writer.kill()


def test_a_writer_waits_for_readers_and_another_goes_on_where_it_was_killed(
    books: tuple[Path, PackedSequences], tmp_path: Path
) -> None:
    data, right = books
    of = spec(data, tmp_path)
    longest = max(len(text) for text in VERSES)

    def ahead() -> int:
        return read_progress(of.folder)["tokens"] - read_wanted(of.folder)

    with streamed(of, ahead_tokens=2000) as sequences:
        assert read(sequences, 3, 1) == in_order(right, 0, 3)
        wait_until(lambda: ahead() >= 2000, 60)
        time.sleep(0.5)
        assert 2000 <= ahead() < 2000 + longest
        # Another job's waits until it can take over.
        with streamed(of, ahead_tokens=2000) as others:
            kill(sequences)
            assert read(others, 40, 2, 36) == in_order(right, 36, 40)
            assert read(sequences, 3, 1, 36) == in_order(right, 36, 3), "who read before goes on too"
            kill(others)
            killed = read_progress(of.folder)
            assert 0 < killed["tokens"] < len(right.cache.tokens)
            started = time.monotonic()
            with pytest.raises(RuntimeError, match=r"the process that tokenizes .* is gone: killed, or out of memory"):
                others.get(np.array([len(right) - 1]))
            assert time.monotonic() - started < 20
    # What it had not published, and what it met with, is forgotten.
    for name in ("tokens.bin", "documents.bin"):
        with (of.folder / name).open("ab") as file:
            file.write(b"\xff" * 1001)
    (of.folder / "progress.json").write_text(json.dumps(killed | {"error": "network gone", "is_mistake": False}))
    with streamed(of) as sequences:
        assert read(sequences, 2, 1, len(right) - 5) == in_order(right, len(right) - 5, 2)
    assert same_files(of, right)
    # Files that lost something since are made again.
    assert begin(of)["tokens"] == len(right.cache.tokens)
    os.truncate(of.folder / "documents.bin", 10)
    assert begin(of)["tokens"] == 0
    (of.folder / "progress.json").write_text(json.dumps(killed))
    (of.folder / "tokens.bin").unlink()
    assert begin(of)["tokens"] == 0


def test_a_full_disk_is_told(books: tuple[Path, PackedSequences], tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    of = spec(books[0], tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        writer = start_writer(of)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(RuntimeError, match=r"tokenizing .* ahead failed: OSError: .*File too large"):
        StreamedSequences(StreamCache(of, writer), SEQ_LEN).get(np.array([4000]))
    writer.communicate()


def test_a_record_without_text_stops_the_run_or_is_counted(tmp_path: Path) -> None:
    texts: list = [*VERSES[:120], None, *VERSES[120:200], None]
    data = save_parquet(tmp_path / "data", texts)
    of, skipping = spec(data, tmp_path), spec(data, tmp_path, "--training.dataset_errors", "skip")
    of.folder.mkdir()
    skipping.folder.mkdir()
    with pytest.raises(ConfigError, match=r'record 121: no text in field "text".*dataset_errors = "skip"'):
        write(of, begin(of), 1 << 20)
    write(skipping, begin(skipping), 1 << 20)
    cache = StreamCache(skipping)
    cache.reach(1)
    assert documents_of(cache) == VERSES[:200]  # type: ignore[arg-type]
    assert read_progress(skipping.folder)["skipped_records"] == 2
    with pytest.raises(ConfigError, match="do not fill one sequence of 100000"):
        StreamedSequences(cache, 100_000).get(np.array([0]))


def test_what_cannot_be_decoded_reaches_the_rank_as_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"text": text}) for text in VERSES[:50]]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join([*lines, '{"text": bad', *lines]))
    with streamed(spec(tmp_path / "data", tmp_path)) as sequences:
        batches = build_loader(Order(sequences, 0, 1, 1), config=DataLoader(num_workers=1))
        with pytest.raises(ConfigError) as caught:
            next(islice(batches, 4000, None))
    assert str(caught.value).startswith(f"training data {tmp_path / 'data'}: cannot be read after record ")
    assert len(str(caught.value).splitlines()) == 1


PARENT = """
import signal, sys, time
from pathlib import Path
from components.config import load_config
from components.data.stream import start_writer, stream_spec
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: None)
writer = start_writer(stream_spec(load_config(sys.argv[1:])), 100)
print("started", flush=True)
while True:
    time.sleep(1)
"""


def test_a_writer_outlives_signals_to_the_group_but_not_its_parent(
    books: tuple[Path, PackedSequences], tmp_path: Path
) -> None:
    arguments = ["--training.dataset_path", str(books[0]), "--training.dataset_streaming"]
    process = start("-c", PARENT, *arguments, "--training.dataset_cache", str(tmp_path))
    with ended(process):
        assert process.stdout
        process.stdout.readline()
        (folder,) = tmp_path.glob("stream-*")
        wait_until(lambda: read_progress(folder)["tokens"] > 0, 60)
        before = processes_of(process.pid)
        assert len(before) >= 4  # this, the writer, a worker, what multiprocessing starts
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.killpg(process.pid, number)
        time.sleep(0.3)
        assert processes_of(process.pid) == before
        process.kill()
        wait_until(lambda: not processes_of(process.pid))


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


FIELD = ["--training.dataset_text_field", "id"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (FIELD, 'record 1: no text in field "id"'),
        (["--training.dataset_text_field", "body"], "dataset_path = .*Column name .'body'. not in the dataset"),
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
