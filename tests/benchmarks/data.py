"""Data of any size: tokenizing files on one core and on two, a file that is added, many files, and a huge index.

python -m tests.benchmarks.data [--megabytes 1000] [--files 100000]
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from components.config import ROOT
from components.data import DataSpec, PackedSequences, prepare
from components.data.mixture import Mixture, Shares
from components.data.tokens import JoinedTokens, Segment, TokenCache
from tests.caches import cache_of

OF_SEGMENT, SEGMENTS, DOCUMENT = 10**9, 2000, 1000
"""Tokens of a simulated segment, segments of a source, and tokens of a document."""


def seconds(task: Callable[..., object], *given: object) -> float:
    started = time.perf_counter()
    task(*given)
    return time.perf_counter() - started


def resident() -> float:
    """The most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def spec_of(folder: Path, cache: str) -> DataSpec:
    return DataSpec(str(folder / "data"), "text", False, "assets/tokenizer", folder / cache)


def tokenizing(folder: Path, megabytes: int, count: int = 1000) -> None:
    """Files of the bundled text, each with another beginning."""
    text = "".join(file.read_text() for file in sorted((ROOT / "assets" / "kjv").glob("*.txt")))
    (folder / "data").mkdir()
    size = megabytes * 10**6 // count
    for number in range(count):
        begin = number * 997 % len(text)
        piece = text[begin:] + text * (size // len(text) + 1)
        (folder / "data" / f"{number:04}.txt").write_text(piece[:size])
    took = {workers: seconds(prepare, spec_of(folder, f"cache{workers}"), workers) for workers in (1, 2)}
    print(f"{megabytes} MB in {count:,} files: {took[1]:.1f} s on one core, {took[2]:.1f} s on two", end=" ")
    print(f"({took[1] / took[2]:.2f} x)")
    (folder / "data" / "0500 added.txt").write_text(text[:100_000])
    added = seconds(prepare, spec_of(folder, "cache2"), 2)
    print(f"one file of 100 kB added: {added:.1f} s; nothing new: ", end="")
    print(f"{seconds(prepare, spec_of(folder, 'cache2'), 2):.2f} s")


def many_files(folder: Path, count: int) -> None:
    for number in range(count):
        own = folder / "data" / f"{number // 1000:03}"
        own.mkdir(parents=True, exist_ok=True)
        (own / f"{number}.txt").write_text(f"{number} In the beginning God created the heaven and the earth.")
    first = seconds(prepare, spec_of(folder, "cache"), 2)
    again = seconds(prepare, spec_of(folder, "cache"), 2)
    print(f"{count:,} files: tokenized in {first:.1f} s, opened again in {again:.1f} s")


def huge_index(folder: Path) -> None:
    """Two sources whose segments are one file: 4 x 10^12 tokens in 4 x 10^9 documents, and 10^12 sequences."""
    part = cache_of(folder / "part", np.zeros(1))
    with (part.folder / "tokens.bin").open("wb") as tokens:
        tokens.truncate(4 * OF_SEGMENT)  # sparse
    np.arange(DOCUMENT, OF_SEGMENT + 1, DOCUMENT).tofile(part.folder / "documents.bin")
    index = part.folder / "index.json"
    counts = f'"tokens": {OF_SEGMENT}, "documents": {OF_SEGMENT // DOCUMENT}'
    index.write_text(f'{{"key": "k", "dtype": "uint32", "vocab_size": 1024, {counts}}}')
    before, started = resident(), time.perf_counter()
    segment = Segment(part.folder, 0, OF_SEGMENT, 0, OF_SEGMENT // DOCUMENT, TokenCache)
    sources = {name: PackedSequences(JoinedTokens(name, [segment] * SEGMENTS, 1024), 4) for name in ("web", "math")}
    mixture = Mixture(sources, [Shares(0, ("math", "web"), (3, 7)), Shares(10**11, ("math", "web"), (6, 4))], 4)
    mixture.at(np.arange(1), 0)
    start = time.perf_counter() - started
    found, read = [], []
    for step in range(50):
        positions = 10**12 - 512 * (step + 1) + np.arange(512)
        found.append(seconds(mixture.at, positions, 0))
        read.append(seconds(mixture.get, mixture.at(positions, 0)[:8]))
    print(
        f"{len(mixture):,} sequences of {mixture.num_tokens // DOCUMENT:,} documents: start {start:.2f} s, "
        f"512 positions {1e3 * np.median(found):.1f} ms, 8 sequences of pages that are not in memory "
        f"{1e3 * np.median(read):.1f} ms, {resident() - before:.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--files", type=int, default=100_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, number) for number in ("1", "2", "3")]
        for folder in folders:
            folder.mkdir()
        huge_index(folders[0])
        many_files(folders[1], given.files)
        tokenizing(folders[2], given.megabytes)


if __name__ == "__main__":
    main()
