"""Documents into chunks of text, and chunks into tokens, by a pool of processes that a cache or a stream shares."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from components.config import ConfigError
from components.data.sources import BadRecord, Document, is_compressed
from components.data.tokenizer import load_tokenizer
from components.data.tokens import token_dtype

if TYPE_CHECKING:
    from components.data.cache import DataSpec

_CHUNK = 1 << 16
"""Characters of one task of a worker, and of the text that the tokenizer merges at once."""
_SMALL = 1 << 20
"""Bytes of files that are one task of a worker."""
Documents = Iterable[tuple[Document | BadRecord, Any]]
"""(document, position of the source after this document). Sources that cannot resume have the position None."""


def tokenized(
    documents: Documents, spec: "DataSpec", pool: ProcessPoolExecutor, workers: int, bad: list[str]
) -> Iterator[tuple[bytes, bool, int, Any]]:
    """Yields (encoded tokens, whether they end a document, bytes of text, position of the source) per chunk, in order.

    The pool's `workers` processes run a few chunks ahead of the reader. Raises ConfigError for an unreadable record;
    with spec.skip_errors the reason is appended to `bad` instead.
    """
    return in_order(_chunk_tasks(documents, spec, pool, bad), workers, bad)


_Encoded = tuple[bytes, bool, int, int]
"""Tokens of a chunk, whether they end a document, bytes of its text, and number of its place."""
_Task = tuple[Future[tuple[list[_Encoded], list[str]]], Sequence[Any]]
"""Future of chunks and of reasons of unreadable records; places of the chunks."""


def in_order(tasks: Iterable[_Task], workers: int, bad: list[str]) -> Iterator[tuple[bytes, bool, int, Any]]:
    waiting = deque[_Task]()

    def first() -> Iterator[tuple[bytes, bool, int, Any]]:
        future, places = waiting.popleft()
        chunks, own_bad = future.result()
        bad.extend(own_bad)
        for encoded, is_end, size, number in chunks:
            yield encoded, is_end, size, places[number]

    for task in tasks:
        waiting.append(task)
        if len(waiting) > 4 * workers:
            yield from first()
    while waiting:
        yield from first()


def _chunk_tasks(documents: Documents, spec: "DataSpec", pool: ProcessPoolExecutor, bad: list[str]) -> Iterator[_Task]:
    """Tasks of about _CHUNK characters, because a task costs as much as thousands of characters."""
    chunks, places, size = list[tuple[str, bool, bool, int]](), list[Any](), 0
    for text, is_start, is_end, place in _chunks(documents, spec, bad):
        chunks.append((text, is_start, is_end, len(places)))
        places.append(place)
        size += len(text)
        if size >= _CHUNK:
            yield pool.submit(_encode_chunks, chunks), places
            chunks, places, size = [], [], 0
    if chunks:
        yield pool.submit(_encode_chunks, chunks), places


def file_tasks(files: list[Path], spec: "DataSpec", pool: ProcessPoolExecutor, bad: list[str]) -> Iterator[_Task]:
    """Tasks of small files, which workers read themselves, and of chunks of the others. A place is a file's number."""
    task, size = list[int](), 0
    for number, file in enumerate(files):
        own = file.stat().st_size
        is_small = own <= _SMALL and not is_compressed(file)
        if task and not (is_small and size + own <= _SMALL):
            yield pool.submit(_encode_files, spec, [files[each] for each in task]), task
            task, size = [], 0
        if is_small:
            task.append(number)
            size += own
        else:
            yield from _chunk_tasks(((each, number) for each in spec.documents(file)), spec, pool, bad)
    if task:
        yield pool.submit(_encode_files, spec, [files[each] for each in task]), task


def _chunks(documents: Documents, spec: "DataSpec", bad: list[str]) -> Iterator[tuple[str, bool, bool, Any]]:
    """Yields (text, whether it starts a document, whether it ends one, position of the source) per chunk.

    Documents are cut at a space if possible. Empty documents are left out.
    """
    for document, place in documents:
        if isinstance(document, BadRecord):
            if not spec.skip_errors:
                raise ConfigError(f'{document.reason}. To skip such records, training.dataset_errors = "skip"')
            bad.append(document.reason)
            continue
        text, start, is_start = "", 0, True
        for piece in [document] if isinstance(document, str) else document:
            text, start = text[start:] + piece, 0
            while len(text) - start > _CHUNK:
                end = _cut(text, start)
                yield text[start:end], is_start, False, place
                start, is_start = end, False
        if start < len(text):
            yield text[start:], is_start, True, place


def _cut(document: str, start: int) -> int:
    """The end of the chunk that begins at start. If possible, it is before a space, where no token is cut."""
    last = start + _CHUNK
    if last >= len(document):
        return len(document)
    spaces = (end for end in range(last, start, -1) if document[end] == " " and not document[end - 1].isspace())
    return next(spaces, last)


def start_worker(tokenizer_path: str, separator: str) -> None:
    # The parent handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    tokenizer = load_tokenizer(tokenizer_path, separator)
    _worker["tokenizer"], _worker["dtype"] = tokenizer, token_dtype(tokenizer.vocab_size)
    # Some tokenizers prepend a space to each text. _encode then encodes each chunk after a document's first with a
    # word before it, and drops the word's tokens.
    _worker["spaces"] = tokenizer.encode("a") + tokenizer.encode(" b") != tokenizer.encode("a b")


def end_with_parent() -> None:
    """Ends the worker when its parent ends; otherwise it would wait for work forever after a kill of the parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


_worker: dict = {}  # set once in each worker process by start_worker


def _encode_files(spec: "DataSpec", files: list[Path]) -> tuple[list[_Encoded], list[str]]:
    """The result of a _Task: a file is a place, and the first has number 0."""
    bad: list[str] = []
    documents = ((document, number) for number, file in enumerate(files) for document in spec.documents(file))
    return _encode_chunks(_chunks(documents, spec, bad))[0], bad


def _encode_chunks(chunks: Iterable[tuple[str, bool, bool, int]]) -> tuple[list[_Encoded], list[str]]:
    """The result of a _Task. A chunk is (text, whether it starts a document, whether it ends one, its place)."""
    return [
        (_encode(text, is_start, is_end), is_end, len(text.encode()), at) for text, is_start, is_end, at in chunks
    ], []


def _encode(text: str, is_start: bool, is_end: bool) -> bytes:
    """Token ids as bytes, with BOS at the start of a document and EOS at its end, if the tokenizer has them.

    A token that is both is written once, at the start, because a generated text begins with that token too.
    """
    tokenizer = _worker["tokenizer"]
    ids = tokenizer.encode(text)
    if _worker["spaces"] and not is_start and text.startswith(" "):
        word, after_word = tokenizer.encode("a"), tokenizer.encode("a" + text)
        if after_word[: len(word)] == word:
            ids = after_word[len(word) :]
    if is_start and tokenizer.bos_id is not None:
        ids.insert(0, tokenizer.bos_id)
    if is_end and tokenizer.eos_id not in (None, tokenizer.bos_id):
        ids.append(tokenizer.eos_id)
    return np.asarray(ids, dtype=_worker["dtype"]).tobytes()
