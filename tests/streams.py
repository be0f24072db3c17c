"""Streams for tests: verses as the hub has files, a writer that is gone at the end, the sequences that are right."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from components.config import ROOT, load_config
from components.data import PackedSequences, TokenCache, prepare
from components.data.packed import StreamedSequences
from components.data.stream import StreamCache, StreamSpec, start_writer, stream_spec
from tests.caches import read, spec_of

VERSES = [
    line for line in (ROOT / "assets/kjv/01-genesis.txt").read_text(encoding="utf-8").splitlines() if line.strip()
]
SEQ_LEN = 8


def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
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


def verses_and_cache(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PackedSequences]:
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
    names, cache = ("tokens.bin", "documents.bin"), sequences.cache
    assert isinstance(cache, TokenCache)
    return all((of.folder / name).read_bytes() == (cache.folder / name).read_bytes() for name in names)
