"""Tokenizes text once, in parallel, into memory-mapped caches, whose keys are hashes of the content and the tokenizer.

<cache_folder>/<key>/tokens.bin      token ids, uint16 or uint32
                     blocks.bin      a hash of each 64 KiB of tokens.bin, uint64
                     documents.bin   end of each document, in tokens, int64
                     index.json      key, token type, counts, the content of each source file, skipped records

A cache holds consecutive files of a dataset. Large datasets have several caches. If files are added to a dataset, the
files that a cache has already are found by their content, and only the others are tokenized.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tqdm import tqdm

from components.config import ROOT, ConfigError, Training
from components.config.files import (
    digest,
    grouped,
    make_staging,
    publish,
    read_json_if_whole,
    real_path,
    refuse_pointer,
    replace,
    writable,
    write_json,
)
from components.data.chunks import file_tasks, in_order, start_worker
from components.data.sources import (
    HUB,
    READERS,
    REGISTERED,
    BadRecord,
    Document,
    Unread,
    ending,
    find_files,
    read_documents,
    unread_files,
)
from components.data.special_tokens import AUTO
from components.data.tokenizer import fingerprint, load_tokenizer, try_tokenizer
from components.data.tokens import BLOCK_BYTES, JoinedTokens, Segment, TokenCache, Tokens, block_hash, token_dtype
from components.launch.locks import locked
from components.launch.process import cores

_MOST_GROUPS = 256
"""Caches of one dataset, at the most, when all of it is tokenized at once."""
_FORMAT = "2"  # part of the key; to be changed when the cutting of text or the storage of tokens changes


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
    cache_bytes: ClassVar[float] = 256 << 20
    """Bytes of files that have one cache; a larger file has one for itself. A killed process loses no whole cache."""

    keeps_tokens: ClassVar[bool] = True
    """Whether a cache has the tokens. Without them, its index tells about files of tokens."""

    def files(self) -> list[Path]:
        """The data files of the path. Raises ConfigError as find_files does."""
        return find_files(self.path, self.endings)

    def unread(self) -> Unread | None:
        """Files that look like data of this format and are not read. Raises ConfigError as find_files does."""
        return unread_files(self.path, self.endings)

    def parts(self, file: Path) -> list[Path]:
        """The file, and files beside it that are read with it."""
        return [file]

    def settings(self) -> tuple[str, ...]:
        """All that affects how documents become tokens, beside the files."""
        return (_FORMAT, self.text_field, str(self.skip_errors), fingerprint(self.tokenizer_path, self.separator))

    def documents(self, file: Path) -> Iterator[Document | BadRecord]:
        return read_documents(file, self.text_field)

    def pool(self, workers: int) -> ProcessPoolExecutor:
        """Processes that tokenize."""
        # Spawned workers import only the modules they need, and inherit no locks, threads or signal handlers.
        given = self.tokenizer_path, self.separator
        return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker, given)

    def tokenize(
        self, files: list[Path], folder: Path, name: str, pool: ProcessPoolExecutor, workers: int
    ) -> dict[str, Any]:
        """Writes the tokens and document ends of a cache, and prints what was done with `name`.

        Returns fields of index.json: dtype, vocab_size, tokens, documents, skipped_records, and as "counts" the tokens
        and documents of each file, if files of the cache may be used without the others.
        """
        return _tokenize(self, files, folder, name, pool, workers)

    def open(self, folder: Path) -> TokenCache:
        return TokenCache(folder)

    def segments(self, files: list[tuple[Path, Segment]]) -> list[Segment]:
        """Where to read the tokens of each file, given where caches have it."""
        return [cached for _, cached in files]


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


def is_made(spec: DataSpec, files: list[Path]) -> bool:
    """Whether all of these files are tokenized."""
    return _find(spec, files, _contents(spec, files)) is not None


def prepare(spec: DataSpec, workers: int | None = None) -> Tokens:
    """Opens the caches of this data. `workers` processes (default: one per core) tokenize files that no cache has.

    Raises ConfigError if there is no data, a cache cannot be written, or a record is unreadable and not skipped.
    """
    try:
        files = spec.files()
        contents = _contents(spec, files)
        # An existing cache is opened without a lock, because its disk may be read-only.
        found = _find(spec, files, contents)
        if not found:
            _make(spec, files, contents, workers or cores())
            found = _find(spec, files, contents)
        if not found:
            raise ConfigError(f"data {spec.path}: no text in it")
        return found
    except OSError as error:
        where = f"cache in {spec.cache_folder} (training.dataset_cache)"
        raise ConfigError(f"data {spec.path}, {where}: {error}") from error


def _find(spec: DataSpec, files: list[Path], contents: list[str]) -> Tokens | None:
    """The tokens of the files, which have these contents; None if a file is in no cache."""
    key = _key(spec, contents)
    for parent in _parents(spec):
        index = parent / key / "index.json"
        # A cache of files without text is no dataset, but may be a part of one.
        if spec.keeps_tokens and index.exists() and read_json_if_whole(index).get("tokens") != 0:
            return spec.open(parent / key)
    known = _known(spec)
    if not known.keys() >= set(contents):
        return None
    cached = zip(files, (known[content] for content in contents), strict=True)
    segments = list[Segment]()
    for each in spec.segments([(file, segment) for file, segment in cached if segment.tokens]):
        last = segments[-1] if segments else None
        if last and (last.path, last.first_token + last.tokens) == (each.path, each.first_token):
            tokens, documents = last.tokens + each.tokens, last.documents + each.documents
            segments[-1] = Segment(last.path, last.first_token, tokens, last.first_document, documents)
        else:
            segments.append(each)
    return JoinedTokens(key, segments, segments[0].open(segments[0].path).vocab_size) if segments else None


def _parents(spec: DataSpec) -> list[Path]:
    """The folders that may have caches of this data: the job's, and that of the owner of the checkout."""
    shared = ROOT / Training.dataset_cache
    return [spec.cache_folder] + [shared] * (spec.cache_folder == own_cache())


def _known(spec: DataSpec) -> dict[str, Segment]:
    """Content of each file that a cache has, tokenized by the settings of spec -> where it is."""
    how, known = how_tokenized(spec).hexdigest(), dict[str, Segment]()
    for parent in _parents(spec):
        for file in sorted(parent.glob("[!.]*/index.json")):  # no cache that another process is making
            index = read_json_if_whole(file)
            if index.get("how") != how:
                continue
            tokens = documents = 0
            for content, own_tokens, own_documents, *largest in index["files"]:
                segment = Segment(file.parent, tokens, own_tokens, documents, own_documents, largest=(*largest,))
                known[content] = segment
                tokens, documents = tokens + own_tokens, documents + own_documents
    return known


def _make(spec: DataSpec, files: list[Path], contents: list[str], workers: int) -> None:
    """Makes caches for the files that are in no cache. Takes last those that another process is making."""
    try_tokenizer(spec.tokenizer_path, spec.separator)
    spec.cache_folder.mkdir(parents=True, exist_ok=True)
    known = _known(spec)
    parts = [
        part
        for group in _groups(spec, list(zip(files, contents, strict=True)))
        if (part := [(file, content) for file, content in group if content not in known])
    ]
    with spec.pool(workers) as pool:
        for task in (None, f"tokenize {spec.path}"):
            left = []
            for part in parts:
                folder = spec.cache_folder / _key(spec, [content for _, content in part])
                with locked(folder.with_name(f".{folder.name}.lock"), task) as is_held:
                    if not is_held:
                        left.append(part)
                    elif not (folder / "index.json").exists():
                        _build(spec, part, folder, pool, workers, len(files))
            parts = left


def _groups(spec: DataSpec, files: list[tuple[Path, str]]) -> Iterator[list[tuple[Path, str]]]:
    """Consecutive files for one cache each. The groups do not depend on what is tokenized already, so that processes
    which start at different times share the work.
    """
    sizes = [file.stat().st_size for file, _ in files]
    return grouped(zip(files, sizes, strict=True), max(spec.cache_bytes, sum(sizes) / _MOST_GROUPS))


def _build(
    spec: DataSpec, part: list[tuple[Path, str]], folder: Path, pool: ProcessPoolExecutor, workers: int, of_files: int
) -> None:
    """Makes a cache in a staging folder, which is renamed when it is complete."""
    staging = make_staging(folder)
    files, contents = [file for file, _ in part], [content for _, content in part]
    name = spec.path if len(files) == of_files else f"{len(files):,} of {of_files:,} files of {spec.path}"
    try:
        index = spec.tokenize(files, staging, name, pool, workers)
        if not index["tokens"] and len(files) == of_files:
            raise ConfigError([f"data {spec.path}: no text in it", *index["skipped_records"][:3]])
        if _contents(spec, files) != contents:
            raise ConfigError(f"data {spec.path}: changed while it was read")
        if counts := index.pop("counts", None):
            own = [[content, *each] for content, each in zip(contents, counts, strict=True)]
            index |= {"how": how_tokenized(spec).hexdigest(), "files": own}
        if spec.keeps_tokens:
            write_hashes(staging)
        write_json(staging / "index.json", {"key": folder.name, **index, "sources": [str(file) for file in files]})
        shutil.rmtree(publish(staging, folder), ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _contents(spec: DataSpec, files: list[Path]) -> list[str]:
    """Ending and hash of each file, with the hashes of the files beside it."""
    parts = [spec.parts(file) for file in files]
    hashes = iter(hashes_of(spec.cache_folder, [part for each in parts for part in each], _whole))
    return [":".join([ending(each[0]), *islice(hashes, len(each))]) for each in parts]


def _key(spec: DataSpec, contents: list[str]) -> str:
    """Hash of the contents of files, in order, and of the settings in how_tokenized."""
    key = how_tokenized(spec)
    for content in contents:
        key.update(f"{content}\0".encode())
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
    names = [f"{kind}{real_path(file)}:{s.st_size}:{s.st_mtime_ns}:{s.st_ctime_ns}" for file, s in zip(files, states)]
    memory: dict[str, str] = {}

    def hashed() -> dict[str, str]:
        new = {name: file for name, file in zip(names, files, strict=True) if name not in memory}
        if sum(state.st_size for state in states) < len(files) << 16:  # a thread costs more than a small file
            return {name: hash_file(file) for name, file in new.items()}
        with ThreadPoolExecutor(cores()) as threads:  # hashlib lets other threads run
            return dict(zip(new, threads.map(hash_file, new.values()), strict=True))

    try:
        memory = read_json_if_whole(memory_file)
        if not memory.keys() >= set(names):
            cache_folder.mkdir(parents=True, exist_ok=True)
            with locked(cache_folder / ".hashes.lock", f"hash the data's {len(files):,} files"):
                memory = read_json_if_whole(memory_file)
                memory |= hashed()
                replace(memory_file, json.dumps(memory))
    except OSError:  # the cache is read-only, or a file cannot be read
        memory |= hashed()
    return [memory[name] for name in names]


def _whole(file: Path) -> str:
    refuse_pointer(file)
    return digest(file)[1]


def _tokenize(
    spec: DataSpec, files: list[Path], folder: Path, name: str, pool: ProcessPoolExecutor, workers: int
) -> dict[str, Any]:
    tokenizer = load_tokenizer(spec.tokenizer_path, spec.separator)
    dtype = token_dtype(tokenizer.vocab_size)
    bad: list[str] = []
    ends: list[int] = []
    counts = np.zeros((len(files), 2), np.int64)
    """Tokens and documents of each file."""
    total, started = 0, time.perf_counter()
    size = sum(file.stat().st_size for file in files)
    bar = tqdm(total=size, unit="B", unit_scale=True, desc=f"tokenizing {name}", file=sys.stderr)
    with bar, (folder / "tokens.bin").open("wb") as tokens:
        tasks = file_tasks(files, spec, pool, bad)
        for encoded, is_end, read_bytes, number in in_order(tasks, workers, bad):
            written = tokens.write(encoded) // dtype.itemsize
            total += written
            counts[number] += written, is_end
            bar.update(read_bytes)
            if is_end:
                ends.append(total)
    seconds = time.perf_counter() - started
    (folder / "documents.bin").write_bytes(np.asarray(ends, dtype=np.int64).tobytes())
    if total:
        print(
            f"tokenized {name}: {total:,} tokens in {len(ends):,} documents, {seconds:.1f} s "
            f"({total / seconds / workers:,.0f} tokens/s a core)" + (f"; {len(bad):,} records skipped" if bad else ""),
            flush=True,
        )
    return {
        "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "tokens": total,
        "documents": len(ends),
        "counts": counts.tolist(),
        "skipped_records": bad,
    }


def write_hashes(folder: Path) -> None:
    """Write blocks.bin of the tokens in a folder."""
    with (folder / "tokens.bin").open("rb") as written:
        blocks = iter(partial(written.read, BLOCK_BYTES), b"")
        hashes = [block_hash(np.frombuffer(block, np.uint8)) for block in blocks]
    np.asarray(hashes, dtype=np.uint64).tofile(folder / "blocks.bin")
