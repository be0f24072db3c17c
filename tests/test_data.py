"""Text to batches: sources, the token cache, packing, the global order, the loader and its processes."""

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from torch import Tensor

from components.config import ROOT, ConfigError, DataLoader, Training, load_config
from components.data import DataSpec, PackedSequences, TokenCache, data_spec, prepare
from components.data.cache import _cut
from components.data.loader import IGNORED, Order, build_loader, validation_batches
from components.data.order import sequence_at
from components.data.sources import BadRecord, find_files, read_documents
from components.data.tokenizer import load_tokenizer
from tests.test_tokenizer import save_json_tokenizer

TOKENIZER = str(ROOT / "assets" / "tokenizer")
WORDS = "In the beginning God created the heaven and the earth. "


def cache_of(folder: Path, tokens: np.ndarray, document_ends: list[int] | None = None) -> TokenCache:
    """A token cache with these tokens, written as prepare writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = np.asarray(document_ends or [len(tokens)], dtype=np.int64)
    tokens.astype(np.uint32).tofile(folder / "tokens.bin")
    ends.tofile(folder / "documents.bin")
    index = {"key": "k", "dtype": "uint32", "vocab_size": 1 << 20, "tokens": len(tokens), "documents": len(ends)}
    (folder / "index.json").write_text(json.dumps(index))
    return TokenCache(folder)


def spec_of(
    path: Path | str, cache: Path, *, field: str = "text", skip: bool = False, tokenizer: str = TOKENIZER
) -> DataSpec:
    return DataSpec(str(path), field, skip, tokenizer, cache)


def documents_of(cache: TokenCache, tokenizer_path: str = TOKENIZER) -> list[str]:
    """The texts in a cache, decoded, without the tokens that stand around them."""
    tokenizer = load_tokenizer(tokenizer_path)
    around = {tokenizer.bos_id, tokenizer.eos_id}
    parts = np.split(np.asarray(cache.tokens), cache.document_ends[:-1])
    return [tokenizer.decode([token for token in part.tolist() if token not in around]) for part in parts]


def caches_in(folder: Path) -> list[Path]:
    return [file.parent for file in folder.glob("*/index.json")]


# The order


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 64, 65, 1000, 4096, 4097, 100_003])
def test_every_epoch_is_a_permutation(size: int) -> None:
    order = sequence_at(np.arange(3 * size), size, seed=7).reshape(3, size)
    for epoch in order:
        assert np.array_equal(np.sort(epoch), np.arange(size))


@pytest.mark.parametrize("size", [17, 1000, 4097])
def test_epochs_and_seeds_differ(size: int) -> None:
    orders = [sequence_at(epoch * size + np.arange(size), size, seed) for seed in (0, 1, 2**63) for epoch in (0, 1, 2)]
    assert len({order.tobytes() for order in orders}) == 9


def test_neighbours_in_the_text_are_apart_in_the_order() -> None:
    order = sequence_at(np.arange(10_000), 10_000, seed=0)
    assert (np.abs(np.diff(order)) == 1).mean() < 0.001
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05


def test_a_position_says_the_same_alone_as_among_others() -> None:
    together = sequence_at(np.arange(300), 100, seed=3)
    assert [int(sequence_at(np.array([position]), 100, seed=3)[0]) for position in range(300)] == together.tolist()


# Packing


@pytest.mark.parametrize("seq_len", [1, 3, 16, 100])
@pytest.mark.parametrize("part", ["all", "train", "validation"])
def test_sequences_overlap_by_one_token(
    tmp_path: Path, seq_len: int, part: Literal["all", "train", "validation"]
) -> None:
    sequences = PackedSequences(cache_of(tmp_path, np.arange(5003)), seq_len, part, 0.05)
    tokens, _ = sequences.get(np.arange(len(sequences)))
    assert tokens.shape == ((sequences.num_tokens - 1) // seq_len, seq_len + 1)
    assert np.array_equal(tokens[1:, 0], tokens[:-1, -1])
    joined = np.append(tokens[:, :-1].ravel(), tokens[-1, -1])
    assert np.array_equal(joined, np.unique(joined)), "each token of the stream once, in order"
    assert sequences.num_tokens - len(joined) < seq_len


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3, 0.9])
@pytest.mark.parametrize("size", [30, 101, 999, 5000, 81_919, 83_968, 86_000, 90_000, 200_001])
def test_held_out_and_trained_on_divide_the_stream(tmp_path: Path, size: int, fraction: float) -> None:
    cache = cache_of(tmp_path, np.arange(size))
    divided = []
    for seq_len in (1, 7):
        parts: list[Literal["train", "validation"]] = ["train", "validation"]
        try:
            train, held_out = (PackedSequences(cache, seq_len, part, fraction) for part in parts)
        except ConfigError:
            assert size * fraction < 20 or size * (1 - fraction) < 20, "enough text for both"
            continue
        assert train.num_tokens + held_out.num_tokens == size
        assert held_out.num_tokens == pytest.approx(size * fraction, rel=0.3, abs=5)
        divided.append((train.num_tokens, held_out.num_tokens))
        # With one token a sequence, nothing is left over at the end.
        if seq_len == 1:
            seen = [np.append(part.get(np.arange(len(part)))[0][:, 0], -1) for part in (train, held_out)]
            seen[0][-1], seen[1][-1] = (part.get(np.array([len(part) - 1]))[0][0, 1] for part in (train, held_out))
            assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(size))
    assert len(set(divided)) <= 1, "how the stream is divided does not depend on seq_len"


def test_a_stream_may_end_inside_a_held_out_block(tmp_path: Path) -> None:
    period, start = 81_920, (81_920 - 4096) // 2
    cache = cache_of(tmp_path, np.arange(10 * period + start + 100))
    held_out = PackedSequences(cache, 99, "validation", 0.05)
    assert held_out.num_tokens == 10 * 4096 + 100
    last, _ = held_out.get(np.array([len(held_out) - 1]))
    assert 10 * period + start < last.max() < len(cache.tokens)
    assert PackedSequences(cache, 1, "train", 0.05).num_tokens == 10 * (period - 4096) + start


def test_document_ids_count_the_documents_begun_in_a_sequence(tmp_path: Path) -> None:
    sequences = PackedSequences(cache_of(tmp_path, np.arange(13), [1, 4, 4, 8, 13]), 4)
    tokens, ids = sequences.get(np.arange(3))
    assert tokens[:, :-1].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert ids.tolist() == [[0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert PackedSequences(sequences.cache, 12).get(np.array([0]))[1][0].tolist() == [0, 1, 1, 1, *[2] * 4, *[3] * 4]


def test_a_new_document_begins_where_two_parts_are_joined(tmp_path: Path) -> None:
    # Held out are 4096 tokens from 18,432 on in each 40,960. One document ends just there, one inside, one far away.
    cache = cache_of(tmp_path, np.arange(409_600), [100, 18_432, 20_000, 409_600])
    sequences = PackedSequences(cache, 60, "train", 0.1)
    tokens, ids = sequences.get(np.arange(len(sequences)))
    begun = np.diff(ids, axis=1)
    joins = np.diff(tokens[:, :-1], axis=1) > 1
    assert joins.sum() >= 8
    assert (begun[joins] == 1).all()
    assert begun.sum() == joins.sum() + 1
    assert (ids[:, 0] == 0).all()


def test_labels_are_tokens_shifted_and_all_are_int64(tmp_path: Path) -> None:
    sequences = PackedSequences(cache_of(tmp_path, np.arange(1000)), 9)
    batch = next(build_loader(Order(sequences, 0, 4, 4)))
    assert list(batch) == ["tokens", "labels", "positions"]
    assert {(tuple(value.shape), str(value.dtype)) for value in batch.values()} == {((4, 9), "torch.int64")}
    assert (batch["labels"] == batch["tokens"] + 1).all()
    assert (batch["positions"] == batch["positions"].new_tensor(range(9))).all()


@pytest.mark.parametrize("seq_len", [1000, 10**9])
def test_too_few_tokens_are_told(tmp_path: Path, seq_len: int) -> None:
    with pytest.raises(ConfigError, match=f"1000 tokens for training do not fill one sequence of {seq_len}"):
        PackedSequences(cache_of(tmp_path, np.arange(1000)), seq_len)
    with pytest.raises(ConfigError, match="tokens for validation do not fill"):
        PackedSequences(cache_of(tmp_path, np.arange(1000)), 100, "validation", 0.05)


@pytest.mark.parametrize(("size", "local", "ranks"), [(1, 1, 1), (7, 2, 3), (12, 2, 3), (13, 4, 4), (5, 8, 2)])
def test_validation_sees_every_sequence_once(tmp_path: Path, size: int, local: int, ranks: int) -> None:
    sequences = PackedSequences(cache_of(tmp_path, np.arange(size * 3 + 1)), 3)
    batches = [list(validation_batches(sequences, local, rank, ranks, size + 99)) for rank in range(ranks)]
    assert len({len(of_rank) for of_rank in batches}) == 1
    rows = [
        (tokens.tolist(), labels.tolist())
        for of_all_ranks in zip(*batches)
        for batch in of_all_ranks
        for tokens, labels in zip(batch["tokens"], batch["labels"])
    ]
    padding = [labels for _, labels in rows[size:]]
    assert [tokens[0] for tokens, _ in rows[:size]] == list(range(0, 3 * size, 3))
    assert all(labels == [token + 1 for token in tokens] for tokens, labels in rows[:size])
    assert padding == [[IGNORED] * 3] * len(padding)
    few = [batch for rank in range(ranks) for batch in validation_batches(sequences, local, rank, ranks, 1)]
    assert sum(int((batch["labels"] != IGNORED).sum()) for batch in few) == 3


# The loader


def digests(batch: dict[str, Tensor]) -> list[str]:
    """A hash of tokens and labels of each sequence."""
    rows = zip(batch["tokens"].numpy(), batch["labels"].numpy())
    return [hashlib.sha1(tokens.tobytes() + labels.tobytes()).hexdigest() for tokens, labels in rows]


def read(
    sequences: PackedSequences, steps: int, ranks: int, consumed: int = 0, local: int = 1, num_workers: int = 0
) -> list[list[str]]:
    """The digests of each step's global batch of 12, in the order of ranks."""
    of_ranks = []
    for rank in range(ranks):
        order = Order(sequences, 5, 12, local, rank, ranks, consumed)
        loader = build_loader(order, config=DataLoader(num_workers=num_workers))
        batches = islice(loader, steps * 12 // (ranks * local))
        of_ranks.append(np.array([digest for batch in batches for digest in digests(batch)]).reshape(steps, -1))
    return np.concatenate(of_ranks, axis=1).tolist()


@pytest.fixture
def sequences(tmp_path: Path) -> PackedSequences:
    """29 sequences: no epoch ends with a step of 12."""
    return PackedSequences(cache_of(tmp_path / "cache", np.arange(29 * 8 + 1)), 8)


@pytest.mark.parametrize(("ranks", "local"), [(1, 12), (1, 4), (2, 3), (3, 2), (4, 1), (4, 3)])
def test_degrees_change_nothing_in_the_order(sequences: PackedSequences, ranks: int, local: int) -> None:
    expected = read(sequences, 8, 1)
    assert read(sequences, 8, ranks, local=local) == expected
    order = [digest for step in expected for digest in step]
    assert len(set(order[:29])) == 29, "ranks are disjoint, and together they are the global batch"
    assert set(order[29:58]) == set(order[:29])


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (1, 3), (2, 1)])
def test_workers_change_nothing_in_the_order(sequences: PackedSequences, ranks: int, workers: int) -> None:
    assert read(sequences, 8, ranks, local=2, num_workers=workers) == read(sequences, 8, 1)


def test_a_resume_at_other_degrees_and_workers_continues_the_order(sequences: PackedSequences) -> None:
    parts = [(2, 0), (3, 0), (1, 2), (4, 0), (1, 0)]
    expected = read(sequences, 10, 1)
    for number, (ranks, workers) in enumerate(parts):
        resumed = read(sequences, 2, ranks, 24 * number, num_workers=workers)
        assert resumed == expected[2 * number : 2 * number + 2]


def test_what_a_worker_is_sent_does_not_grow_with_the_data(tmp_path: Path) -> None:
    sequences = PackedSequences(cache_of(tmp_path, np.arange(1_000_000)), 8)
    sent = pickle.dumps(sequences)
    assert len(sent) < 10_000
    again = pickle.loads(sent)
    assert np.array_equal(again.get(np.array([3, 99_999]))[0], sequences.get(np.array([3, 99_999]))[0])


LOADING = """
import multiprocessing, os, signal, sys, time
from pathlib import Path

from components.config import DataLoader
from components.data import PackedSequences, TokenCache
from components.data.loader import Order, build_loader

if __name__ == "__main__":
    asked = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: asked.append(number))
    sequences = PackedSequences(TokenCache(Path(sys.argv[1])), 8)
    batches = build_loader(Order(sequences, 0, 2, 2), config=DataLoader(num_workers=2))
    next(batches)
    started = time.monotonic()
    ACTION
    print(f"{time.monotonic() - started:.1f}")
"""
SIGNALLED = """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.killpg(0, number)
    time.sleep(0.5)
    for _ in range(500):
        next(batches)
    assert len(asked) == 3
"""
KILLED = """
    (worker, _) = multiprocessing.active_children()
    try:
        worker.kill()
        for _ in range(10_000):
            next(batches)
    except RuntimeError as error:
        assert "DataLoader worker" in str(error), error
        print(f"{time.monotonic() - started:.1f}", flush=True)
        os._exit(0)
    sys.exit("not noticed")
"""


@pytest.mark.parametrize("action", [SIGNALLED, KILLED], ids=["signalled", "killed"])
def test_workers_outlive_signals_to_the_group_and_a_killed_one_is_an_error_soon(
    sequences: PackedSequences, tmp_path: Path, action: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOADING.replace("    ACTION\n", action))
    process = start(str(script), str(sequences.cache.folder))
    with ended(process):
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        assert float(out) < 8, "seconds to read on, or to notice"
        wait_until(lambda: not processes_of(process.pid))


# Sources


def test_a_path_may_be_a_file_a_folder_or_a_glob(tmp_path: Path) -> None:
    folder = tmp_path / "my data [1]"
    for name in ("b.txt", "a.text", "sub/deep/c.jsonl", ".hidden.txt", ".git/x.txt", "notes.md", "empty.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("" if name == "empty.txt" else "text")
    names = ["a.text", "b.txt", "sub/deep/c.jsonl"]
    assert find_files(str(folder)) == [folder / name for name in names]
    assert find_files(str(folder / "b.txt")) == [folder / "b.txt"]
    assert find_files(f"{tmp_path}/my data*/*.t*xt") == [folder / "a.text", folder / "b.txt"]
    assert find_files(f"{tmp_path}/**/*.*") == [folder / name for name in names]


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
    assert find_files(str(folder)) == find_files(f"{folder}/**/*.txt") == reached
    assert find_files(f"{folder}/**/elsewhere/*") == reached[2:]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.txt", "no such file or folder"),
        ("~nobody-of-this-name/x.txt", "no such file or folder"),
        ("nul\0byte", "no such file or folder"),
        ("mi*ing", r"no file that ends in .jsonl, .parquet, .text, .txt"),
        ("only_empty", "only empty files"),
        ("nothing", "no file that ends in"),
        ("book.pdf", r'ending ".pdf" is not one of .jsonl, .parquet, .text, .txt'),
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


def reasons(file: Path, field: str = "text") -> list[str]:
    return [document.reason for document in read_documents(file, field) if isinstance(document, BadRecord)]


def test_text_is_utf8_without_its_mark_and_with_one_kind_of_line_end(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffone\r\ntwo\rthree\n".encode())
    assert list(read_documents(file, "text")) == ["one\ntwo\rthree\n"]
    file.write_bytes(b"0123456789\xff")
    assert reasons(file) == [f"{file}: not UTF-8 at byte 10"]
    file.write_bytes("\ufeffab".encode() + b"\xff")
    assert reasons(file) == [f"{file}: not UTF-8 at byte 5"]
    file.write_text("text", encoding="utf-16")
    assert reasons(file) == [f"{file}: not UTF-8 at byte 0"]


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
    cache = prepare(spec_of(tmp_path, tmp_path / ".cache", field="body", skip=True), 1)
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
    assert reasons(file, "holes")[0] == f"{file}: row 2: no text in holes"
    assert len(reasons(file, "id")) == 1000
    whole = file.read_bytes()
    for size in (3, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"rows\.parquet: cannot be read as parquet after row 0"):
            prepare(spec_of(file, tmp_path / "cache"), 1)
    file.write_bytes(whole[:200] + b"\xff" * 300 + whole[500:])
    assert reasons(file)[0].startswith(f"{file}: cannot be read as parquet after row")
    invalid = pyarrow.array([b"good", b"\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": invalid}), file)
    assert len(reasons(file)) == 1


# The cache

ODD_TEXTS = [
    "a\n",
    " ",
    "<|end_of_text|> is text here, and so is <|begin_of_text|>",
    "naïve 日本語 😀 \u200b\x00 tabs\t\t\n\n\n  end  ",
    "é" * 70_000,
    (WORDS * 4000)[:200_000] + "\n\n",
    "\n" * 66_000 + " " * 66_000,
]


@pytest.mark.parametrize("workers", [1, 2])
def test_no_document_is_lost(tmp_path: Path, workers: int) -> None:
    folder = tmp_path / "with a space"
    folder.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ["", *ODD_TEXTS, ""])
    (folder / "0.jsonl").write_text(lines)
    (folder / "1.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (folder / "2.txt").touch()
    pyarrow.parquet.write_table(pyarrow.table({"text": ODD_TEXTS}), folder / "3.parquet")
    cache = prepare(spec_of(folder, tmp_path / "cache"), workers)
    assert documents_of(cache) == [*ODD_TEXTS, "one\ntwo", *ODD_TEXTS]
    tokenizer = load_tokenizer(TOKENIZER)
    assert (cache.tokens[np.append(0, cache.document_ends[:-1])] == tokenizer.bos_id).all()
    assert (cache.tokens[cache.document_ends - 1] == tokenizer.eos_id).all()
    for special in (tokenizer.bos_id, tokenizer.eos_id):
        assert (np.asarray(cache.tokens) == special).sum() == len(cache.document_ends)


def test_a_cache_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(WORDS * 20_000)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": WORDS * n}) + "\n" for n in range(1, 300)))
    one, two = (prepare(spec_of(tmp_path, tmp_path / f".cache{workers}"), workers) for workers in (1, 2))
    assert one.key == two.key
    for name in ("tokens.bin", "documents.bin"):
        assert (one.folder / name).read_bytes() == (two.folder / name).read_bytes()


def test_a_cache_is_found_again_without_writing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text(WORDS)
    spec = spec_of(tmp_path / "a.txt", tmp_path / "cache")
    first = prepare(spec, 1)
    assert "tokenized" in capsys.readouterr().out
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")}
    second = prepare(spec)
    assert capsys.readouterr().out == ""
    assert second.folder == first.folder
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")} == files
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    assert prepare(spec_of(tmp_path / "b.txt", tmp_path / "cache")).folder == first.folder


def test_what_decides_the_tokens_decides_the_key(tmp_path: Path) -> None:
    data, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    data.write_text('{"text": "one two", "body": "three four"}\n')
    other = save_json_tokenizer(tmp_path / "tokenizer")
    keys = {
        prepare(spec, 1).key
        for spec in (
            spec_of(data, cache),
            spec_of(data, cache, field="body"),
            spec_of(data, cache, skip=True),
            spec_of(data, cache, tokenizer=str(other)),
        )
    }
    (other / "tokenizer_config.json").write_text("{}")
    keys.add(prepare(spec_of(data, cache, tokenizer=str(other)), 1).key)
    assert len(keys) == 5
    # The same size and time of writing: what changed is found all the same.
    before = data.stat()
    data.write_text('{"text": "One two", "body": "three four"}\n')
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = prepare(spec_of(data, cache), 1)
    assert changed.key not in keys
    assert documents_of(changed) == ["One two"]


def test_documents_of_one_token_and_no_token_around_them(tmp_path: Path) -> None:
    tokenizer = save_json_tokenizer(tmp_path / "tokenizer", settings=False)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 100)
    cache = prepare(spec_of(tmp_path / "a.jsonl", tmp_path / "cache", tokenizer=str(tokenizer)), 1)
    assert cache.document_ends.tolist() == list(range(1, 101))
    assert PackedSequences(cache, 9).get(np.array([5]))[1].tolist() == [list(range(9))]


def test_only_empty_documents_are_no_data(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 100)
    with pytest.raises(ConfigError, match="no text in it"):
        prepare(spec_of(tmp_path / "a.jsonl", tmp_path / "cache"), 1)
    (tmp_path / "a.jsonl").write_text("no json\n" * 100)
    with pytest.raises(ConfigError, match=r"(?s)no text in it.*a\.jsonl:1: not JSON"):
        prepare(spec_of(tmp_path / "a.jsonl", tmp_path / "cache", skip=True), 1)
    assert not caches_in(tmp_path / "cache")


def test_huge_lines_take_no_longer_than_others(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "words.txt").write_text((WORDS * 100_000)[: 5 << 20])
    (tmp_path / "letters.txt").write_bytes((rng.integers(0, 26, 5 << 20) + ord("a")).astype(np.uint8).tobytes())
    (tmp_path / "one_letter.txt").write_text("a" * (1 << 20))
    started = time.monotonic()
    cache = prepare(spec_of(tmp_path, tmp_path / ".cache"), 2)
    assert time.monotonic() - started < 20
    letters, one_letter, words = documents_of(cache)
    assert letters == (tmp_path / "letters.txt").read_text()
    assert one_letter == "a" * (1 << 20)
    assert words == (tmp_path / "words.txt").read_text()


def test_a_damaged_cache_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(WORDS)
    spec = spec_of(tmp_path / "a.txt", tmp_path / "cache")
    folder = prepare(spec, 1).folder
    whole = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(whole[:-2])
    with pytest.raises(ConfigError, match=rf"tokens.bin: {len(whole) - 2} bytes, not {len(whole)}: remove"):
        prepare(spec)
    (folder / "tokens.bin").unlink()
    with pytest.raises(ConfigError, match=r"No such file.*tokens\.bin"):
        prepare(spec)
    # Without its index it was never finished.
    (folder / "index.json").unlink()
    assert documents_of(prepare(spec, 1)) == [WORDS]


@pytest.mark.parametrize("place", ["a.txt", "a.txt/cache", "/proc/cache"])
def test_a_cache_folder_that_cannot_be_is_told(tmp_path: Path, place: str) -> None:
    (tmp_path / "a.txt").write_text(WORDS)
    with pytest.raises(ConfigError, match=r"cache in .*"):
        prepare(spec_of(tmp_path / "a.txt", tmp_path / place), 1)


# Processes that build a cache

PREPARE = """
import signal, sys
from pathlib import Path
from components.config import ConfigError
from components.data import DataSpec, prepare
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if the tests run in the background of a script
try:
    prepare(DataSpec(sys.argv[1], "text", False, sys.argv[3], Path(sys.argv[2])), 1)
except ConfigError as error:
    sys.exit(str(error))
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    """Python in a session of its own."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def start_prepare(data: Path, cache: Path) -> subprocess.Popen[str]:
    return start("-c", PREPARE, str(data), str(cache), TOKENIZER)


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens, nothing of its session is left at the end."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def processes_of(session: int) -> list[int]:
    """Living processes of a session."""
    listing = subprocess.run(["ps", "-eo", "pid=,sess=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listing.splitlines()]
    return [int(pid) for pid, owner, state, *_ in rows if int(owner) == session and not state.startswith("Z")]


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


@contextmanager
def half_built(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path, Path]]:
    """A process stopped in the middle of making a cache, the data and the cache folder."""
    data, cache = tmp_path / "big.txt", tmp_path / "cache"
    data.write_text(WORDS * 80_000)
    process = start_prepare(data, cache)
    with ended(process):
        wait_until(lambda: any(file.stat().st_size for file in cache.glob(".staging-*/tokens.bin")))
        process.send_signal(signal.SIGSTOP)
        assert not caches_in(cache), "too late to stop it"
        yield process, data, cache


def test_a_killed_build_leaves_no_cache_and_no_process(tmp_path: Path) -> None:
    with half_built(tmp_path) as (process, data, cache):
        assert len(processes_of(process.pid)) >= 3
        process.kill()
        wait_until(lambda: not processes_of(process.pid))
        assert not caches_in(cache)
        assert list(cache.glob(".staging-*"))
        assert documents_of(prepare(spec_of(data, cache), 2)) == [data.read_text()]
        assert not list(cache.glob(".staging-*"))


def test_an_interrupted_build_cleans_up(tmp_path: Path) -> None:
    with half_built(tmp_path) as (process, _, cache):
        os.killpg(process.pid, signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        _, error = process.communicate(timeout=10)
        assert process.returncode
        assert error.count("\nKeyboardInterrupt") == 1, "workers leave it to the parent"
        assert not caches_in(cache)
        assert not list(cache.glob(".staging-*"))
        wait_until(lambda: not processes_of(process.pid))


def test_a_killed_worker_ends_the_build(tmp_path: Path) -> None:
    with half_built(tmp_path) as (process, _, cache):
        os.kill(processes_of(process.pid)[-1], signal.SIGKILL)
        process.send_signal(signal.SIGCONT)
        _, error = process.communicate(timeout=10)
        assert "BrokenProcessPool" in error
        assert not caches_in(cache)
        wait_until(lambda: not processes_of(process.pid))


def test_data_that_changes_while_it_is_read_makes_no_cache(tmp_path: Path) -> None:
    with half_built(tmp_path) as (process, data, cache):
        with data.open("a") as file:
            file.write("more")
        process.send_signal(signal.SIGCONT)
        _, error = process.communicate(timeout=20)
        assert "big.txt: changed while it was read" in error
        assert not caches_in(cache)


def test_a_build_under_way_holds_up_no_other_data(tmp_path: Path) -> None:
    with half_built(tmp_path) as (process, _, cache):
        (tmp_path / "small.txt").write_text(WORDS)
        small = start_prepare(tmp_path / "small.txt", cache)
        small.communicate(timeout=20)
        assert small.returncode == 0
        assert process.poll() is None
        assert len(caches_in(cache)) == 1


def test_two_processes_at_once_tokenize_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(WORDS * 10_000)
    processes = [start_prepare(tmp_path / "a.txt", tmp_path / "cache") for _ in range(2)]
    printed = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(text[:9] for text in printed) == ["", "tokenized"]
    assert len(caches_in(tmp_path / "cache")) == 1


# The command, and the job file


def test_prepare_is_a_command(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text(WORDS)
    command = ["-m", "components.data", "prepare", "--job.config_file", "recipes/llama_debug.toml"]
    bundled = [*command, "--training.dataset_cache", str(tmp_path / "cache")]
    own = [*bundled, "--training.dataset_path", str(tmp_path / "own.txt"), "--validation.dataset_path"]
    validated, missing = ([*own, str(tmp_path / name)] for name in ("own.txt", "missing.txt"))
    runs = [bundled, bundled, validated, missing, command[:2]]
    results = []
    for arguments in runs:
        process = start(*arguments)
        results.append((*process.communicate(timeout=60), process.returncode))
    assert "66 documents" in results[0][0]
    assert results[1] == ("", "", 0)
    assert results[2][0].startswith("tokenized")
    assert results[3][1:] == (f"training data {tmp_path / 'missing.txt'}: no such file or folder\n", 2)
    assert results[4][2] == 2
    assert "usage" in results[4][1]


def test_a_spec_is_what_the_job_file_says() -> None:
    training = load_config(["--training.dataset_errors", "skip", "--training.dataset_text_field", "body"]).training
    assert data_spec(training, "t") == DataSpec(str(ROOT / "assets/kjv"), "body", True, "t", ROOT / ".cache/tokens")
    assert data_spec(training, "t", "here").path == "here"
    with pytest.raises(ConfigError, match=r'training\.dataset = "kvj": not one of kjv, c4, .*; or set dataset_path'):
        data_spec(Training(dataset="kvj"), "t")


def test_tokens_do_not_depend_on_where_chunks_are_cut() -> None:
    """The bundled text, cut into chunks, has the tokens of the text in one piece."""
    tokenizer = load_tokenizer("assets/tokenizer")
    text = "".join(file.read_text() for file in sorted((ROOT / "assets/kjv").glob("*.txt"))[:8])
    start, ids = 0, []
    while start < len(text):
        end = _cut(text, start)
        ids += tokenizer.encode(text[start:end])
        start = end
    assert ids == tokenizer.encode(text)
