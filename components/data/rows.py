"""Rows of chats: a cache of chats' tokens, packed into rows of equal length, each chat a document of its own.

<cache_folder>/<key>/trained.bin     which tokens are trained, as labels, bool
                     places.txt      file and row of each sequence, a line each
                     and the files of cache.py; a document is a sequence of a chat
"""

import math
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from tqdm import tqdm

from components.config import ConfigError
from components.config.tables import Chat
from components.data.cache import DataSpec
from components.data.chats import Chats
from components.data.chunks import end_with_parent
from components.data.order import sequence_at
from components.data.packed import PackedSequences
from components.data.sources import RECORDS, BadRecord, read_records
from components.data.template import BadChat
from components.data.tokenizer import fingerprint
from components.data.tokens import TokenCache, token_dtype

_FORMAT = "chat 1"
"""Part of the key; change it with the rendering of chats or the storage of rows."""
_DEEPEST = 100
"""Levels of nested lists and objects that a record may have."""
_BATCH = 64
"""Records of one task of a worker."""


@dataclass(frozen=True)
class ChatSpec(DataSpec):
    """Chats to tokenize."""

    chat: Chat = field(default_factory=Chat, kw_only=True)

    kind: ClassVar[type[Chats]] = Chats
    """Reads the records."""
    unit: ClassVar[str] = "chats"

    endings = RECORDS
    cache_bytes = math.inf

    def settings(self) -> tuple[str, ...]:
        chat, template = self.chat, Chats(self.chat, self.tokenizer_path).template
        rules: tuple[str, ...] = (
            chat.messages_field,
            repr(chat.roles_to_train),
            chat.message_field_training,
            chat.history,
        )
        if chat.special_tokens_in_text != "fail":
            rules += (chat.special_tokens_in_text,)
        tokenizer = fingerprint(self.tokenizer_path, self.separator)
        rules += () if self.unit == "chats" else (self.unit,)
        return (_FORMAT, str(self.skip_errors), tokenizer, template.fingerprint(), *rules)

    def documents(self, file: Path) -> Iterator[str | BadRecord]:
        """The text of each sequence."""
        chats = self.kind(self.chat, self.tokenizer_path)
        for place, record in read_records(file):
            found = _sequences(chats, place, record)
            if isinstance(found, BadRecord):
                yield found
            else:
                yield from (chats.tokenizer.decode(ids) for ids, _ in found)

    def pool(self, workers: int) -> ProcessPoolExecutor:
        given = self.kind, self.chat, self.tokenizer_path
        return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, given)

    def tokenize(
        self, files: list[Path], folder: Path, name: str, pool: ProcessPoolExecutor, workers: int
    ) -> dict[str, Any]:
        chats, started = Chats(self.chat, self.tokenizer_path), time.perf_counter()
        dtype = token_dtype(chats.tokenizer.vocab_size)
        total = trained = records = 0
        ends: list[int] = []
        bad: list[str] = []
        size = sum(file.stat().st_size for file in files)
        bar = tqdm(total=size, unit="B", unit_scale=True, desc=f"tokenizing {self.path}", file=sys.stderr)
        names = ("tokens.bin", "trained.bin", "places.txt")
        with bar, ExitStack() as stack:
            tokens, labels, places = (stack.enter_context((folder / name).open("wb")) for name in names)
            for place, found in self._all(files, pool, workers):
                records += 1
                if isinstance(found, BadRecord):
                    if not self.skip_errors:
                        raise ConfigError(f'{found.reason}. To skip such records, training.dataset_errors = "skip"')
                    bad.append(found.reason)
                    continue
                for ids, is_trained in found:
                    total += tokens.write(np.asarray(ids, dtype=dtype).tobytes()) // dtype.itemsize
                    labels.write(is_trained.tobytes())
                    places.write(f"{place}\n".encode())
                    trained += int(is_trained.sum())
                    ends.append(total)
        if not total:
            raise ConfigError([f"data {self.path}: no {self.unit[:-1]} in it", *bad[:3]])
        np.asarray(ends, dtype=np.int64).tofile(folder / "documents.bin")
        seconds = time.perf_counter() - started
        print(
            f"tokenized {self.path}: {records - len(bad):,} {self.unit} in {len(ends):,} sequences of {total:,} "
            f"tokens, {trained:,} of them trained, {seconds:.1f} s "
            f"({records / seconds / workers:,.0f} {self.unit}/s a core)"
            + (f"; {len(bad):,} records skipped" if bad else ""),
            flush=True,
        )
        index = {"dtype": dtype.name, "vocab_size": chats.tokenizer.vocab_size, "tokens": total}
        index |= {"documents": len(ends), "records": records, "trained_tokens": trained}
        return index | {"skipped_records": bad}

    def _all(self, files: list[Path], pool: ProcessPoolExecutor, workers: int) -> Iterator[tuple[str, Any]]:
        """Yields (place, sequences or BadRecord) of each record, in order; workers run a few batches ahead."""
        waiting: list[Future[list[tuple[str, Any]]]] = []
        records = (each for file in files for each in _shallow(read_records(file)))
        while batch := [*islice(records, _BATCH)]:
            waiting.append(pool.submit(_work, batch))
            if len(waiting) > 4 * workers:
                yield from waiting.pop(0).result()
        for future in waiting:
            yield from future.result()

    def open(self, folder: Path) -> "ChatCache":
        return ChatCache(folder)


_worker: dict[str, Chats] = {}  # set once in each worker process


def _start_worker(kind: type[Chats], chat: Chat, tokenizer_path: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=end_with_parent, daemon=True).start()
    _worker["chats"] = kind(chat, tokenizer_path)


def _work(batch: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(place, _sequences(_worker["chats"], place, record)) for place, record in batch]


def _shallow(records: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The records. A BadRecord replaces a record that is nested too deeply to be sent to another process."""
    for place, record in records:
        level, depth = [record], 0
        while level and depth < _DEEPEST:
            nested = (
                each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)
            )
            level, depth = [child for children in nested for child in children], depth + 1
        yield place, BadRecord(f"{place}: nested deeper than {_DEEPEST}") if level else record


def _sequences(chats: Chats, place: str, record: Any) -> Any:
    if isinstance(record, BadRecord):
        return record
    try:
        return chats.sequences(record)
    except BadChat as error:
        return BadRecord(f"{place}: {error}")


class ChatCache(TokenCache):
    """A finished cache of chats. A document is a sequence of a chat."""

    trained: np.ndarray

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if (found := (folder / "trained.bin").stat().st_size) != len(self.tokens):
            raise ConfigError(
                f"{folder / 'trained.bin'}: {found} bytes, not {len(self.tokens)}: remove {folder} to tokenize again"
            )
        self.trained = np.memmap(folder / "trained.bin", dtype=np.bool_, mode="r")

    def place(self, number: int) -> str:
        """File and row of a sequence."""
        with (self.folder / "places.txt").open(encoding="utf-8") as lines:
            return next(line for at, line in enumerate(lines) if at == number).rstrip("\n")

    def __reduce__(self) -> tuple[type["ChatCache"], tuple[Path]]:
        return type(self), (self.folder,)


class ChatRows(PackedSequences):
    """Rows of seq_len + 1 tokens: whole sequences of chats one after another, then padding.

    The held-out part has every N-th unit, at any seq_len. Raises ConfigError if no sequence is left, or, with
    too_long = "fail", if one does not fit a row.
    """

    sides: ClassVar[int] = 1
    """Consecutive sequences of the cache that lie in one row: a unit."""
    unit: ClassVar[str] = "chat"

    def __init__(
        self,
        cache: ChatCache,
        chat: Chat,
        seq_len: int,
        part: Literal["all", "train", "validation"] = "all",
        held_out_fraction: float = 0.0,
    ) -> None:
        self.cache: ChatCache = cache
        self.seq_len, self.part, self.chat = seq_len, part, chat
        rules = f"{part}/{held_out_fraction}/{chat.too_long}/{chat.packing}"
        self.key = f"{cache.key}/{rules}"
        ends = np.asarray(cache.document_ends)
        starts = np.concatenate([[0], ends[:-1]])
        starts, lengths = (each.reshape(-1, self.sides) for each in (starts, ends - starts))
        period = round(1 / held_out_fraction) if held_out_fraction else 0
        if period == 1 or (period and abs(1 / period - held_out_fraction) > 0.05 * held_out_fraction):
            near = ", ".join(f"{1 / each:.3g}" for each in sorted({max(2, period), period + 1}))
            raise ConfigError(
                f"validation.held_out_fraction = {held_out_fraction:g}: every N-th {self.unit} is held out: use {near}"
            )
        held_out = np.arange(len(starts)) % period == period // 2 if period else np.zeros(len(starts), bool)
        if part == "validation" and period and not held_out.any():
            raise ConfigError(
                f"validation.held_out_fraction = {held_out_fraction:g} holds out none of {len(starts)} {self.unit}s: "
                f"set {1 / max(2, len(starts)):.2g}, or validation.dataset_path"
            )
        chosen = np.flatnonzero(held_out if part == "validation" else ~held_out)
        lengths = lengths[chosen]
        fits_row = lengths.sum(1) <= seq_len + 1
        self.too_long = int((~fits_row).sum())
        if self.too_long and chat.too_long == "fail":
            first = np.flatnonzero(~fits_row)[0]
            others = "sequences" if self.sides == 1 else f"{self.unit}s"
            raise ConfigError(
                f"{cache.place(self.sides * chosen[first])}: {lengths[first].sum():,} tokens, and "
                f"{self.too_long - 1:,} other {others}, do not fit training.seq_len = {seq_len}; "
                'chat.too_long = "skip" leaves them out, "truncate_end" cuts their end off'
            )
        if chat.too_long == "skip":
            chosen, lengths = chosen[fits_row], lengths[fits_row]
        lengths = self._cut(lengths)
        labels = _count(cache.trained, starts[chosen].ravel(), lengths.ravel()).reshape(-1, self.sides)
        kept = (labels > 0).all(1)
        self.without_labels = int((~kept).sum())
        chosen, lengths, labels = chosen[kept], lengths[kept], labels[kept]
        if not len(chosen):
            what = "validation" if part == "validation" else "training"
            raise ConfigError(f"{cache.folder}: no {self.unit} for {what} fits training.seq_len = {seq_len}")
        whole = lengths.sum(1)
        fits = best_fit(whole, seq_len + 1) if chat.packing == "best_fit" else [[each] for each in range(len(chosen))]
        order = np.fromiter((each for row in fits for each in row), np.int64, len(chosen))
        self._starts, self.lengths = starts[chosen][order].ravel(), lengths[order].ravel()
        """Places and lengths of the sequences, in the order of rows."""
        self._rows = np.concatenate([[0], np.cumsum([self.sides * len(row) for row in fits])])
        """Row r has the sequences from _rows[r] up to _rows[r + 1]."""
        self.labels_by_sequence = labels[order].ravel()
        """Labels with loss, by sequence."""
        self.labels = np.add.reduceat(self.labels_by_sequence, self._rows[:-1])
        """Labels with loss, by row."""
        self.num_sequences, self.num_tokens = len(fits), int(lengths.sum())

    def _cut(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens that are kept of each unit's sequences, (n, sides), so that each unit fits a row."""
        return np.minimum(lengths, self.seq_len + 1)

    def at(self, positions: np.ndarray, seed: int) -> np.ndarray:
        return sequence_at(positions, self.num_sequences, seed)

    def get(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (n, seq_len + 1), 0 for padding, and document ids (n, seq_len); padding is a document of its own."""
        places, documents = self._laid_out(indices)
        tokens = self.cache.tokens_at(np.maximum(places, 0))
        return np.where(places < 0, 0, tokens), documents[:, :-1]

    def trained(self, indices: np.ndarray) -> np.ndarray:
        places = self._laid_out(indices)[0]
        return (places >= 0) & self.cache.trained[places]

    def padding(self, indices: np.ndarray) -> np.ndarray:
        return self._laid_out(indices)[0][:, :-1] < 0

    def count_valid(self, indices: np.ndarray) -> int:
        return int(self.labels[indices].sum())

    def _laid_out(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places of n rows' tokens in the cache, -1 for padding, and document ids, both (n, seq_len + 1)."""
        places = np.full((len(indices), self.seq_len + 1), -1, dtype=np.int64)
        documents = np.empty_like(places)
        for row, index in enumerate(np.asarray(indices)):
            at = 0
            for document, number in enumerate(range(self._rows[index], self._rows[index + 1])):
                end = at + self.lengths[number]
                places[row, at:end] = np.arange(self._starts[number], self._starts[number] + self.lengths[number])
                documents[row, at:end] = document
                at = end
            documents[row, at:] = self._rows[index + 1] - self._rows[index]
        return places, documents


def _count(trained: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Trained tokens of each of these parts; reads the file once. The first token of a sequence is never trained."""
    edges = np.stack([starts, starts + lengths], axis=1).ravel()
    inside = edges[edges < len(trained)]  # the last part may end with the file
    return np.add.reduceat(trained, inside, dtype=np.int64)[::2]


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Rows of sequences by best-fit decreasing: the longest first, each into the fullest row that has place for it."""
    rows: list[list[int]] = []
    with_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    """Space -> rows that have so much left."""
    spaces = 0
    """Bit s is set if with_space[s] has a row."""
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = with_space[space].pop()
            if not with_space[space]:
                spaces ^= 1 << space
            rows[row].append(number)
        else:
            space, row = capacity, len(rows)
            rows.append([number])
        if left := space - length:
            with_space[left].append(row)
            spaces |= 1 << left
    return rows
