"""The writer of a stream: it waits for readers, another goes on where it was killed, and what it meets is told."""

import json
import os
import resource
import signal
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from components.config import ConfigError, DataLoader
from components.data import PackedSequences
from components.data.loader import GlobalOrder, build_loader
from components.data.packed import StreamedSequences
from components.data.stream import StreamCache, read_progress, read_wanted, start_writer
from components.data.writer import begin, write
from tests.caches import documents_of, read
from tests.limits import limited, wait_until
from tests.processes import ended, processes_of, small_disk, start
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
        wait_until(lambda: ahead() >= 2000)
        time.sleep(0.5)
        assert 2000 <= ahead() < 2000 + longest
        # Another job's waits until it can take over.
        with streamed(of, ahead_tokens=2000) as others:
            kill(sequences)
            assert read(others, 40, 2, 36) == in_order(right, 36, 40)
            assert read(sequences, 3, 1, 36) == in_order(right, 36, 3), "who read before goes on too"
            kill(others)
            killed = read_progress(of.folder)
            assert 0 < killed["tokens"] < right.cache.num_tokens
            gone = r"the process that tokenizes .* is gone: killed, or out of memory"
            with limited("a reader without its writer", 60), pytest.raises(RuntimeError, match=gone):
                others.get(np.array([len(right) - 1]))
    # What it had not published, and what it met with, is forgotten.
    for name in ("tokens.bin", "documents.bin"):
        with (of.folder / name).open("ab") as file:
            file.write(b"\xff" * 1001)
    (of.folder / "progress.json").write_text(json.dumps(killed | {"error": "network gone", "is_mistake": False}))
    with streamed(of) as sequences:
        assert read(sequences, 2, 1, len(right) - 5) == in_order(right, len(right) - 5, 2)
    assert same_files(of, right)
    # Files that lost something since are made again.
    assert begin(of)["tokens"] == right.cache.num_tokens
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


def test_a_disk_without_a_free_byte_is_told(books: tuple[Path, PackedSequences], tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "40k") as disk:
        of = spec(books[0], disk)
        writer = start_writer(of)
        with pytest.raises(RuntimeError, match=r"tokenizing .* ahead failed: OSError: .*No space left on device"):
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
    data = tmp_path.joinpath(*["a long name" * 20] * 4)  # the message stands after a traceback of the worker
    data.mkdir(parents=True)
    lines = [json.dumps({"text": text}) for text in VERSES[:50]]
    (data / "train.jsonl").write_text("\n".join([*lines, '{"text": bad', *lines]))
    with streamed(spec(data, tmp_path)) as sequences:
        batches = build_loader(GlobalOrder(sequences, 0, 1, 1), config=DataLoader(num_workers=1))
        with pytest.raises(ConfigError) as caught:
            next(islice(batches, 4000, None))
    assert str(caught.value).startswith(f"data {data}: cannot be read: ArrowInvalid: ")
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
        wait_until(lambda: read_progress(folder)["tokens"] > 0)
        before = processes_of(process.pid)
        assert len(before) >= 4  # this, the writer, a worker, what multiprocessing starts
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.killpg(process.pid, number)
        time.sleep(0.3)
        assert processes_of(process.pid) == before
        process.kill()
        wait_until(lambda: not processes_of(process.pid))
