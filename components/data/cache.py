"""Tokenizes text once, in parallel, into a memory-mapped cache, whose key is a hash of the content and the tokenizer.

<cache_folder>/<key>/tokens.bin      token ids, uint16 or uint32
                     blocks.bin      a hash of each 64 KiB of tokens.bin, uint64
                     documents.bin   end of each document, in tokens, int64
                     index.json      key, token type, counts, source files, skipped records
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from tqdm import tqdm

from components.config import ROOT, ConfigError, Training
from components.config.files import (
    digest,
    make_staging,
    publish,
    read_json_as,
    read_json_if_whole,
    replace,
    writable,
    write_json,
)
from components.data.sources import HUB, READERS, REGISTERED, BadRecord, Document, ending, find_files, read_documents
from components.data.special_tokens import AUTO
from components.data.tokenizer import fingerprint, load_tokenizer, try_tokenizer
from components.launch.locks import locked
from components.launch.process import cores

_CHUNK = 1 << 16  # characters of one task of a worker; also bounds the text that the tokenizer merges at once
BLOCK_BYTES = 1 << 16
_FORMAT = "2"  # part of the key; to be changed when the cutting of text or the storage of tokens changes

Documents = Iterable[tuple[Document | BadRecord, Any]]
"""(document, position of the source after this document). Sources that cannot resume have the position None."""


@dataclass(frozen=True)
class DataSpec:
    """Data to tokenize, with the settings of tokenization."""

    path: str
    text_field: str
    skip_errors: bool
    tokenizer_path: str
    cache_folder: Path
    separator: str = field(default=AUTO, kw_only=True)
    """training.dataset_separator"""

    endings: ClassVar[Collection[str]] = READERS
    """Endings of the files that are read."""

    def settings(self) -> tuple[str, ...]:
        """All that affects how documents become tokens, beside the files."""
        return (_FORMAT, self.text_field, str(self.skip_errors), fingerprint(self.tokenizer_path, self.separator))

    def documents(self, file: Path) -> Iterator[Document | BadRecord]:
        return read_documents(file, self.text_field)

    def tokenize(self, files: list[Path], folder: Path, key: str, workers: int) -> None:
        """Write the files of a cache."""
        _tokenize(self, files, folder, key, workers)

    def open(self, folder: Path) -> "TokenCache":
        return TokenCache(folder)


@dataclass
class _Index:
    """The fields of index.json that are read."""

    key: str
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    tokens: int
    documents: int


class TokenCache:
    """A finished, memory-mapped cache. Raises ConfigError if a file has the wrong size.

    If the cache has hashes, each process verifies a block of tokens before its first read of that block.
    """

    trained: np.ndarray | None = None
    """bool (tokens,): whether a token is a label in training; None if all tokens are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = read_json_as(_Index, folder / "index.json")
        token_size = np.dtype(index.dtype).itemsize
        for name, size in (("tokens.bin", token_size * index.tokens), ("documents.bin", 8 * index.documents)):
            if (found := (folder / name).stat().st_size) != size:
                raise ConfigError(f"{folder / name}: {found} bytes, not {size}: remove {folder} to tokenize again")
        self.key, self.vocab_size = index.key, index.vocab_size
        self.tokens = np.memmap(folder / "tokens.bin", dtype=index.dtype, mode="r")
        self.document_ends = np.memmap(folder / "documents.bin", dtype=np.int64, mode="r")
        blocks = -(-self.tokens.nbytes // BLOCK_BYTES)
        file = folder / "blocks.bin"
        hashes = np.fromfile(file, np.uint64) if file.exists() else np.empty(0, np.uint64)
        self._hashes = hashes if len(hashes) == blocks else None
        self._verified = np.zeros(blocks, dtype=bool)

    def verify(self, places: np.ndarray) -> None:
        """Verifies the blocks of the tokens at these places (n, S) before they are read.

        Raises ConfigError if a block differs from its hash.
        """
        if self._hashes is None:
            return
        block_tokens = BLOCK_BYTES // self.tokens.itemsize
        numbers = places // block_tokens
        for number in np.unique(numbers[~self._verified[numbers]]).tolist():
            block = self.tokens[number * block_tokens : (number + 1) * block_tokens]
            if block_hash(block) != self._hashes[number]:
                raise ConfigError(f"{self.folder / 'tokens.bin'}: block {number} is damaged: remove {self.folder}")
            self._verified[number] = True

    def __reduce__(self) -> tuple[type["TokenCache"], tuple[Path]]:
        """Pickles only the folder: pickling a memory map would copy its content."""
        return TokenCache, (self.folder,)


def data_spec(training: Training, tokenizer_path: str, path: str | None = None) -> DataSpec:
    """The spec of the training data, or of data at another path. Raises ConfigError for an unknown dataset."""
    path = path or training.dataset_path
    if path is None:
        if training.dataset not in REGISTERED:
            known = ", ".join([*REGISTERED, *HUB, "org/name of the Hugging Face hub"])
            raise ConfigError(f'training.dataset = "{training.dataset}": not one of {known}; or set dataset_path')
        path = str(REGISTERED[training.dataset])
    folder = ROOT / training.dataset_cache
    if training.dataset_cache == Training.dataset_cache and not writable(folder):  # somebody else's checkout
        folder = own_cache()
    skip, separator = training.dataset_errors == "skip", training.dataset_separator
    return DataSpec(path, training.dataset_text_field, skip, tokenizer_path, folder, separator=separator)


def own_cache() -> Path:
    """The folder of tokenized data in the user's own folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "meshwright/tokens"


def cache_of(spec: DataSpec, files: list[Path]) -> Path:
    """The folder of the finished cache of this data, or where the cache is to be made."""
    key = _key(spec, files)
    shared = ROOT / Training.dataset_cache / key  # perhaps made by the owner of the checkout
    return shared if spec.cache_folder == own_cache() and is_made(shared) else spec.cache_folder / key


def is_made(folder: Path) -> bool:
    """Whether a cache is finished."""
    return (folder / "index.json").exists()


def prepare(spec: DataSpec, workers: int | None = None) -> TokenCache:
    """Opens the cache of this data; if it is missing, `workers` processes make it (default: one per core).

    Raises ConfigError if there is no data, the cache cannot be written, or a record is unreadable and not skipped.
    """
    try:
        files = find_files(spec.path, spec.endings)
        folder = cache_of(spec, files)
        # An existing cache is opened without a lock, because its disk may be read-only.
        if not is_made(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_name(f".{folder.name}.lock"), f"tokenize {spec.path}"):
                if not is_made(folder):
                    _build(spec, files, folder, workers or cores())
        return spec.open(folder)
    except OSError as error:
        where = f"cache in {spec.cache_folder} (training.dataset_cache)"
        raise ConfigError(f"training data {spec.path}, {where}: {error}") from error


def _build(spec: DataSpec, files: list[Path], folder: Path, workers: int) -> None:
    """Makes the cache in a staging folder, which is renamed when it is complete."""
    staging = make_staging(folder)
    try:
        try_tokenizer(spec.tokenizer_path, spec.separator)
        spec.tokenize(files, staging, folder.name, workers)
        if _key(spec, files) != folder.name:
            raise ConfigError(f"training data {spec.path}: changed while it was read")
        shutil.rmtree(publish(staging, folder), ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _key(spec: DataSpec, files: list[Path]) -> str:
    """Hash of the files' contents, in order, and of the settings in how_tokenized."""
    key = how_tokenized(spec)
    for file, content in zip(files, hashes_of(spec.cache_folder, files, _whole)):
        key.update(f"{ending(file)}:{content}\0".encode())
    return key.hexdigest()


def how_tokenized(spec: DataSpec) -> hashlib.blake2b:
    """Hash of all settings that affect how documents become tokens."""
    return hashlib.blake2b(b"".join(part.encode() + b"\0" for part in spec.settings()), digest_size=12)


def hashes_of(cache_folder: Path, files: list[Path], hash_file: Callable[[Path], str]) -> list[str]:
    """The hash of each file. hashes.json, if it can be written, remembers the hashes of unchanged files."""
    memory_file = cache_folder / "hashes.json"
    states = [file.stat() for file in files]
    # A copy may keep size and mtime, but ctime cannot be set.
    kind = "" if hash_file is _whole else f"{hash_file.__name__}:"
    names = [f"{kind}{file.resolve()}:{s.st_size}:{s.st_mtime_ns}:{s.st_ctime_ns}" for file, s in zip(files, states)]
    memory: dict[str, str] = {}
    try:
        memory = read_json_if_whole(memory_file)
        if not memory.keys() >= set(names):
            cache_folder.mkdir(parents=True, exist_ok=True)
            with locked(cache_folder / ".hashes.lock", f"hash the data's {len(files):,} files"):
                memory = read_json_if_whole(memory_file)
                memory |= {name: hash_file(file) for name, file in zip(names, files) if name not in memory}
                replace(memory_file, json.dumps(memory))
    except OSError:  # the cache is read-only, or a file cannot be read
        memory |= {name: hash_file(file) for name, file in zip(names, files) if name not in memory}
    return [memory[name] for name in names]


def _whole(file: Path) -> str:
    return digest(file)[1]


def block_hash(content: np.ndarray) -> int:
    """64-bit hash of a block."""
    return int.from_bytes(hashlib.blake2b(content.view(np.uint8).data, digest_size=8).digest(), "little")


def _tokenize(spec: DataSpec, files: list[Path], folder: Path, key: str, workers: int) -> None:
    tokenizer = load_tokenizer(spec.tokenizer_path, spec.separator)
    dtype = token_dtype(tokenizer.vocab_size)
    bad: list[str] = []
    ends: list[int] = []
    total, started = 0, time.perf_counter()
    size = sum(file.stat().st_size for file in files)
    documents = ((document, None) for file in files for document in spec.documents(file))
    bar = tqdm(total=size, unit="B", unit_scale=True, desc=f"tokenizing {spec.path}", file=sys.stderr)
    with bar, (folder / "tokens.bin").open("wb") as tokens:
        for encoded, is_end, read_bytes, _ in tokenized(documents, spec, dtype, workers, bad):
            total += tokens.write(encoded) // dtype.itemsize
            bar.update(read_bytes)
            if is_end:
                ends.append(total)
    seconds = time.perf_counter() - started
    if not total:
        raise ConfigError([f"training data {spec.path}: no text in it", *bad[:3]])
    write_hashes(folder)
    (folder / "documents.bin").write_bytes(np.asarray(ends, dtype=np.int64).tobytes())
    index = {
        "key": key,
        "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "tokens": total,
        "documents": len(ends),
        "skipped_records": bad,
        "sources": [str(file) for file in files],
    }
    write_json(folder / "index.json", index)
    print(
        f"tokenized {spec.path}: {total:,} tokens in {len(ends):,} documents, {seconds:.1f} s "
        f"({total / seconds / workers:,.0f} tokens/s a core)" + (f"; {len(bad):,} records skipped" if bad else ""),
        flush=True,
    )


def write_hashes(folder: Path) -> None:
    """Write blocks.bin of the tokens in a folder."""
    with (folder / "tokens.bin").open("rb") as written:
        blocks = iter(partial(written.read, BLOCK_BYTES), b"")
        hashes = [block_hash(np.frombuffer(block, np.uint8)) for block in blocks]
    np.asarray(hashes, dtype=np.uint64).tofile(folder / "blocks.bin")


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every token."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def tokenized(
    documents: Documents, spec: DataSpec, dtype: np.dtype, workers: int, bad: list[str]
) -> Iterator[tuple[bytes, bool, int, Any]]:
    """Yields (encoded tokens, whether they end a document, bytes of text, position of the source) per chunk, in order.

    `workers` processes run a few chunks ahead of the reader. Raises ConfigError for an unreadable record; with
    spec.skip_errors the reason is appended to `bad` instead.
    """
    # Spawned workers import only the modules they need, and inherit no locks, threads or signal handlers.
    given = spec.tokenizer_path, spec.separator, dtype.str
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, given)
    waiting: list[tuple[Future[bytes], bool, int, Any]] = []
    with pool:
        for chunk, is_start, is_end, place in _chunks(documents, spec, bad):
            waiting.append((pool.submit(_encode, chunk, is_start, is_end), is_end, len(chunk.encode()), place))
            if len(waiting) > 4 * workers:
                future, *rest = waiting.pop(0)
                yield future.result(), *rest
        for future, *rest in waiting:
            yield future.result(), *rest


def _chunks(documents: Documents, spec: DataSpec, bad: list[str]) -> Iterator[tuple[str, bool, bool, Any]]:
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


def _start_worker(tokenizer_path: str, separator: str, dtype: str) -> None:
    # The parent handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    tokenizer = load_tokenizer(tokenizer_path, separator)
    _worker["tokenizer"], _worker["dtype"] = tokenizer, dtype
    # Some tokenizers prepend a space to each text. _encode then encodes each chunk after a document's first with a
    # word before it, and drops the word's tokens.
    _worker["spaces"] = tokenizer.encode("a") + tokenizer.encode(" b") != tokenizer.encode("a b")


def end_with_parent() -> None:
    """Ends the worker when its parent ends; otherwise it would wait for work forever after a kill of the parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


_worker: dict = {}  # set once in each worker process by _start_worker


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
