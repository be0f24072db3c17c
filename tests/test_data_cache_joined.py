"""Datasets of several caches: the tokens of one cache, and no file is tokenized twice."""

import dataclasses
import itertools
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.config import ConfigError
from components.data import DataSpec, PackedSequences, cache, prepare, tokens
from components.data.tokens import JoinedTokens, Segment
from tests.caches import WORDS, cache_of, caches_in, prepared, spec_of
from tests.limits import finish, wait_until
from tests.processes import ended
from tests.test_data_cache_build import start_prepare


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Files of some thousand bytes, two of them alike, one without text."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt").write_text(f"{number % 7} {WORDS * (20 * number % 77)}")
    (folder / "3 empty.jsonl").write_text('{"text": ""}\n')
    return folder


def small(monkeypatch: pytest.MonkeyPatch, size: int = 5000) -> None:
    monkeypatch.setattr(DataSpec, "cache_bytes", size)
    monkeypatch.setattr(cache, "_MOST_GROUPS", 100)


def same(one: PackedSequences, other: PackedSequences) -> bool:
    numbers = np.arange(len(one))
    return len(one) == len(other) and all(
        (mine == theirs).all() for mine, theirs in zip(one.get(numbers), other.get(numbers), strict=True)
    )


def test_several_caches_are_the_stream_of_one(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = prepared(spec_of(data, data.parent / "one"))
    small(monkeypatch)
    several = prepare(spec_of(data, data.parent / "several"), 1)
    assert len(caches_in(data.parent / "several")) > 3
    assert several.key == one.key, "a checkpoint goes on, however the data are divided"
    parts: list[tuple[Any, ...]] = [("all",), ("train", 0.1), ("validation", 0.1)]
    for part, seq_len in [*itertools.product(parts, (7, 100)), (parts[0], 900)]:
        mine, theirs = (PackedSequences(each, seq_len, *part) for each in (several, one))
        assert same(mine, theirs)
        assert same(pickle.loads(pickle.dumps(mine)), theirs), "in a loader worker"


@pytest.mark.parametrize("few", [0, 1000])
def test_any_division_is_the_whole(few: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both searches are taken: one for all tokens, and one for each row."""
    monkeypatch.setattr(tokens, "_FEW", few)
    rng = np.random.default_rng(0)
    ends = np.sort(rng.choice(np.arange(1, 5003), 400, replace=False)).tolist()
    whole = cache_of(tmp_path / "whole", np.arange(5003), [*ends, 5003])
    cuts = sorted(rng.choice(401, 30, replace=False).tolist())
    documents = list(zip([0, *cuts], [*cuts, 401], strict=True))
    of = [0, *ends, 5003]
    segments = [Segment(whole.folder, of[low], of[high] - of[low], low, high - low) for low, high in documents]
    joined = JoinedTokens("k", segments, 9999)
    assert joined.num_tokens == 5003
    for seq_len in (3, 50, 1700):
        assert same(PackedSequences(joined, seq_len), PackedSequences(whole, seq_len))
    held = [PackedSequences(each, 41, "train", 0.07) for each in (joined, whole)]
    assert same(*held)
    # As if files that were added later came first.
    backwards = segments[::-1]
    numbers = np.concatenate([np.arange(each.first_token, each.first_token + each.tokens) for each in backwards])
    lengths = np.diff(of)
    own = [lengths[each.first_document : each.first_document + each.documents] for each in backwards]
    other = cache_of(tmp_path / "backwards", numbers, np.cumsum(np.concatenate(own)).tolist())
    assert same(PackedSequences(JoinedTokens("k", backwards, 9999), 50), PackedSequences(other, 50))


def test_a_file_that_is_added_is_tokenized_alone(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small(monkeypatch)
    spec = spec_of(data, data.parent / "cache")
    prepare(spec, 1)
    before = {folder: (folder / "index.json").stat().st_mtime_ns for folder in caches_in(spec.cache_folder)}
    (data / "2 more.txt").write_text("and one more" + WORDS)
    (data / "5.txt").rename(data / "9.txt")
    capsys.readouterr()
    longer = prepare(spec, 1)
    assert capsys.readouterr().out.startswith(f"tokenized 1 of 10 files of {data}: ")
    assert len(caches_in(spec.cache_folder)) == len(before) + 1
    assert {folder: (folder / "index.json").stat().st_mtime_ns for folder in before} == before
    monkeypatch.undo()
    assert same(PackedSequences(longer, 64), PackedSequences(prepare(spec_of(data, data.parent / "again"), 1), 64))


def test_files_that_are_left_out_need_no_cache_of_their_own(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_of(data, data.parent / "cache")
    prepare(spec, 1)
    capsys.readouterr()
    fewer = dataclasses.replace(spec, path=str(data / "[4-6].txt"))
    found = prepare(fewer, 1)
    assert not capsys.readouterr().out
    alone = prepared(dataclasses.replace(fewer, cache_folder=data.parent / "alone"))
    assert same(PackedSequences(found, 64), PackedSequences(alone, 64))
    capsys.readouterr()
    prepare(dataclasses.replace(fewer, separator="none"), 1)
    assert capsys.readouterr().out.startswith("tokenized"), "other settings are other tokens"


def test_a_cache_of_files_without_text_is_no_dataset(data: Path) -> None:
    (data / "3 empty.jsonl").unlink()
    spec, added = spec_of(data, data.parent / "cache"), data / "empty.jsonl"
    prepare(spec, 1)
    added.write_text('{"text": ""}\n')
    prepare(spec, 1)
    with pytest.raises(ConfigError, match=f"^data {added}: no text in it$"):
        prepare(dataclasses.replace(spec, path=str(added)), 1)


def test_a_killed_process_loses_no_whole_cache_and_two_share_the_work(data: Path) -> None:
    for number in range(6):
        (data / f"{number}.txt").write_text(f"{number} {WORDS * 40_000}")
    folder = data.parent / "cache"
    process = start_prepare(data, folder, 3 << 20)
    with ended(process):
        wait_until(lambda: len(caches_in(folder)) >= 2)
        process.kill()
    left = {each: (each / "index.json").stat().st_mtime_ns for each in caches_in(folder)}
    for each in folder.glob(".staging-*"):
        shutil.rmtree(each)
    first = start_prepare(data, folder, 3 << 20)
    with ended(first):
        wait_until(lambda: any(folder.glob(".staging-*/tokens.bin")))
        first.send_signal(signal.SIGSTOP)
        second = start_prepare(data, folder, 3 << 20)
        with ended(second):
            wait_until(lambda: len(caches_in(folder)) >= 5)
            first.send_signal(signal.SIGCONT)
            printed = [finish(process)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert len(caches_in(folder)) == 6
    assert sum(text.count("tokenized") for text in printed) + len(left) == 6, "no cache was made twice"
    assert "tokenized" in printed[1], "the second one did not wait for the first"
    assert {each: (each / "index.json").stat().st_mtime_ns for each in left} == left


def test_a_cache_that_is_being_made_is_none(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    spec = spec_of(data, data.parent / "cache")
    prepare(spec, 1)
    files = sorted(data.iterdir())[:2]
    for folder in caches_in(spec.cache_folder):
        folder.rename(folder.with_name(f".staging-{folder.name}"))
    assert not cache.is_made(dataclasses.replace(spec, path=str(data)), files)


def test_a_damaged_cache_among_several_is_told_where_it_is_read(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    spec = spec_of(data, data.parent / "cache")
    prepare(spec, 1)
    folder = max(caches_in(spec.cache_folder), key=lambda each: (each / "tokens.bin").stat().st_size)
    content = bytearray((folder / "tokens.bin").read_bytes())
    content[10] ^= 1
    (folder / "tokens.bin").write_bytes(content)
    sequences = PackedSequences(prepare(spec, 1), 50)
    with pytest.raises(ConfigError, match=f"{folder.name}/tokens.bin: block 0 is damaged: remove {folder}"):
        sequences.get(np.arange(len(sequences)))
