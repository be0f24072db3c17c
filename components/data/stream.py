"""Streams a dataset of the hub, or a folder of such files: tokenizes documents ahead of training.

<cache_folder>/stream-<hash>/tokens.bin, documents.bin   growing files as in cache.py, in the order of the dataset
                             progress.json               published tokens and documents, position of the writer
                             wanted                      number of tokens that readers have asked for, int64

The first rank of each node starts the writer (writer.py); all ranks and loader workers read.
"""

import dataclasses
import errno
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from components.config import ConfigError, JobConfig, Training, mistake, python_path
from components.config.files import read_json_if_whole, refuse_pointer, sample
from components.config.keys import short
from components.data.cache import DataSpec, data_spec, hashes_of, how_tokenized
from components.data.formats import text_pieces
from components.data.hub import hub_errors, hub_place, is_of_hub, is_of_network, train_split
from components.data.sources import (
    REGISTERED,
    BadRecord,
    Document,
    Unread,
    check_inside,
    ending,
    unread,
    walk,
)
from components.data.tokenizer import load_tokenizer, try_tokenizer
from components.data.tokens import MappedTokens, token_dtype
from components.launch.locks import is_held

AHEAD_TOKENS = 1 << 24
"""Read-ahead of the writer: it waits when it is this many tokens ahead of the readers' requests."""
_POLL_SECONDS = 0.05
_HANDOVER_SECONDS = 4.0
"""Time for another job's writer to take over after a writer has ended."""


@dataclasses.dataclass(frozen=True)
class StreamSpec(DataSpec):
    """A dataset to stream (always its split "train"), with the settings of tokenization."""

    config: str | None
    revision: str | None
    """Commit of a hub dataset; None for a folder."""
    key: str
    """Identifies the token sequence. The key of a folder depends on the names and sizes of its files."""
    content: str | None
    """Hash of a folder's files; large files are only sampled. None for a hub dataset, which its commit identifies."""
    vocab_size: int
    folder: Path
    """Folder of the cache."""

    @property
    def lock_file(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}.lock")


def is_stream(training: Training) -> bool:
    """Whether training data is streamed: if dataset_streaming is set, and always for texts of the hub."""
    return training.dataset_streaming or (is_of_hub(training) and training.dataset_format == "text")


def stream_spec(config: JobConfig) -> StreamSpec:
    """The stream of a job. The hub resolves a branch or tag to a commit.

    Raises ConfigError of one line in three cases:

    - The hub cannot be reached, has no such dataset or revision, or denies access.
    - training.dataset_path is not a folder.
    - The job sets a key that streams do not support.
    """
    training = config.training
    if "training.dataset_streaming" in config.origins and not training.dataset_streaming:
        reason = f'"{training.dataset}" is of the hub and always streamed; or fetch it and set training.dataset_path'
        raise ConfigError(mistake(config, "training.dataset_streaming", reason))
    if config.validation.enable and not config.validation.dataset_path:
        reason = "training data is streamed, so no part of it can be held out: set validation.dataset_path"
        key = "validation.held_out_fraction"
        raise ConfigError(mistake(config, key if key in config.origins else "validation.enable", reason))
    if training.dataset_path or training.dataset in REGISTERED:
        base = data_spec(training, config.model.hf_assets_path)
        path, part, revision = str(Path(base.path).absolute()), None, None
        if not Path(path).is_dir():
            raise ConfigError(mistake(config, "training.dataset_path", "not a folder; only folders are streamed"))
        found = list(walk(Path(path)))
        check_inside(Path(path), found)
        files = sorted((str(file.relative_to(path)), file.stat()) for file in found)
        name = hashlib.blake2b(repr([(file, state.st_size) for file, state in files]).encode(), digest_size=12)
        # A copy of the folder has the same key, but another cache, because `version` includes modification times.
        try:
            content = sampled(base.cache_folder, [Path(path) / file for file, _ in files])
        except OSError as error:
            raise ConfigError(mistake(config, "training.dataset_path", str(error))) from None
        version = str([state.st_mtime_ns for _, state in files]) + content
        data = name.hexdigest()
    else:
        path, part, revision = hub_place(config)
        version, content = "", None
        base = data_spec(training, config.model.hf_assets_path, path)
        data = f"{path}:{part or 'default'}@{revision}"
    key = f"{data}/{how_tokenized(base).hexdigest()}"
    folder = base.cache_folder / f"stream-{hashlib.blake2b((key + version).encode(), digest_size=12).hexdigest()}"
    vocab_size = load_tokenizer(base.tokenizer_path).vocab_size
    fields = vars(base) | {
        "path": path,
        "config": part,
        "revision": revision,
        "key": key,
        "content": content,
        "folder": folder,
    }
    return StreamSpec(**fields, vocab_size=vocab_size)


def sampled(cache_folder: Path, files: list[Path]) -> str:
    """Hash of the sampled content of these files, in order."""
    found = hashes_of(cache_folder, files, sample)
    return hashlib.blake2b("".join(found).encode(), digest_size=12).hexdigest()


def check_stream(config: JobConfig) -> Unread | None:
    """Files of a streamed folder that the stream does not read.

    Raises ConfigError of one line if the first document of the stream cannot be read.
    """
    try_tokenizer(config.model.hf_assets_path, config.training.dataset_separator)
    spec = stream_spec(config)
    name = spec.path if spec.revision is None else spec.key.rpartition("/")[0]
    print(f"streaming {name}, tokens in {spec.folder}", flush=True)
    try:
        spec.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(mistake(config, "training.dataset_cache", f"cannot make {spec.folder}: {error}")) from None
    key = "training.dataset_path" if spec.revision is None else "training.dataset"
    try:
        others = _left_out(spec) if spec.revision is None else None
        if read_progress(spec.folder).get("tokens"):
            return others
        with hub_errors(spec.path, "dataset"):
            first = next(stream_documents(spec, {}), (BadRecord("no documents in it"), None))[0]
            if not isinstance(first, str | BadRecord):
                for _ in first:
                    pass
    except ConfigError as error:
        raise ConfigError(mistake(config, key, " ".join(str(error).split()))) from None
    if isinstance(first, BadRecord) and not spec.skip_errors:
        raise ConfigError(mistake(config, key, first.reason))
    return others


def stream_documents(spec: StreamSpec, place: dict[str, Any]) -> Iterator[tuple[Document | BadRecord, dict[str, Any]]]:
    """Yields (document, position after this document), starting at `place` (the first document if `place` is empty).

    Raises ConfigError of one line if the data cannot be read. Errors of the network and of the disk pass through.
    """
    records, skipped = place.get("records", 0), place.get("skipped", 0)
    with _one_line(spec, records):
        builder = _builder(spec)
        documents = _texts(builder, records) if builder.name == "text" else _records(builder, spec, place)
    reason = f'no text in field "{spec.text_field}" (training.dataset_text_field)'
    while True:
        with _one_line(spec, records):
            text, state = next(documents, (None, None))
        if state is None:
            return
        records, skipped = records + 1, skipped + (text is None)
        document = BadRecord(f"{spec.path}: record {records:,}: {reason}") if text is None else text
        yield document, {"records": records, "skipped": skipped, "state": state}


def _texts(builder: Any, records: int) -> Iterator[tuple[Document, dict[str, Any]]]:
    """Yields (pieces of a text file, {}), after the first `records` files.

    A document is a whole file, as without streaming, and may be larger than memory. But each \\r becomes \\n.
    """
    from datasets import StreamingDownloadManager
    from datasets.utils.file_utils import xopen

    def pieces(file: str) -> Iterator[str]:
        with xopen(file, encoding="utf-8") as text:
            yield from text_pieces(text, f"data {file}")

    manager = StreamingDownloadManager(base_path=builder.base_path)
    files = manager.iter_files(manager.extract(manager.download(builder.config.data_files["train"])))
    for file in islice(files, records, None):
        yield pieces(file), {}


def _records(builder: Any, spec: StreamSpec, place: dict[str, Any]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yields (text of a record or None, state of the library after this record), after `place`."""
    import datasets
    import pyarrow

    field = spec.text_field
    absent = f'data {spec.path}: a file has no "{field}" (training.dataset_text_field); it has '

    def text_only(table: Any, **more: Any) -> Any:
        """The column of the text, where values that are no text are null."""
        if field not in table.column_names and not spec.skip_errors:
            raise ConfigError(absent + ", ".join(table.column_names))
        values = table[field] if field in table.column_names else pyarrow.nulls(len(table), pyarrow.string())
        kind = values.type.value_type if pyarrow.types.is_dictionary(values.type) else values.type
        if str(kind) not in ("string", "large_string", "string_view"):
            values = pyarrow.nulls(len(table), pyarrow.string())
        elif [field] in more.get("json_field_paths", ()):  # mixed types, each of which the library has encoded as JSON
            decoded = [value and json.loads(value) for value in values.to_pylist()]
            values = pyarrow.array([value if isinstance(value, str) else None for value in decoded], pyarrow.string())
        return pyarrow.table({field: values.cast(pyarrow.string())})

    # The library casts the columns of all files to those of the first file, but other columns than text may differ.
    builder._cast_table = text_only
    if builder.info.features is not None or builder.name in ("arrow", "parquet"):
        builder.info.features = datasets.Features({field: datasets.Value("string")})
    if builder.name == "parquet":
        builder.config.columns = [field]
    stream = builder.as_streaming_dataset(split="train")
    if place:
        stream.load_state_dict(place["state"])
    try:
        for record in stream:
            text = record[field]
            yield text if isinstance(text, str) else None, stream.state_dict()
    except pyarrow.ArrowInvalid as error:
        _, is_absent, columns = str(error).partition(f"No match for FieldRef.Name({field}) in ")
        if not is_absent:
            raise
        raise ConfigError(absent + ", ".join(columns.partition("\n__")[0].splitlines())) from None


@contextmanager
def _one_line(spec: StreamSpec, records: int) -> Iterator[None]:
    """Turns any error into a ConfigError of one line, except errors of the network or disk, which a retry may end."""
    try:
        yield
    except Exception as error:
        of_disk = isinstance(error, OSError) and error.errno not in (None, *_MISTAKES)
        if isinstance(error, ConfigError) or is_of_network(error) or of_disk:
            raise
        where, cause = f" after record {records:,}" if records else "", error.__cause__ or error
        reason = f"{type(cause).__name__}: {short(' '.join(str(cause).split()))}"
        raise ConfigError(f"data {spec.path}: cannot be read{where}: {reason}") from error


def _builder(spec: StreamSpec) -> Any:
    """The library's builder of a dataset.

    Raises ConfigError in five cases:

    - train_split raises it.
    - A package is missing that decompresses the files.
    - The metadata of a folder names files outside of that folder.
    - A folder has files that a run without streaming would read, but that are in no split that the library finds.
    """
    files = list(walk(Path(spec.path))) if spec.revision is None else []
    for file in files:
        if ending(file) in (*_ENDINGS, ".text") and file.suffix not in _ENDINGS:
            raise ConfigError(f"data {file}: a stream reads only {', '.join(_ENDINGS)}: {_MOVE}")
    builder = train_split(spec.path, spec.config, spec.revision)
    splits = builder.config.data_files
    for file in splits["train"]:
        package = _PACKAGES.get(Path(file).suffix)
        if package and not importlib.util.find_spec(package):
            install = f"needs the package {package}: {sys.executable} -m pip install {package}, or decompress it"
            raise ConfigError(f"data {file}: {install}")
    if spec.revision is None:
        found = [path for split in splits.values() for path in _paths(split)]
        check_inside(Path(spec.path), found)
        for file in found:
            refuse_pointer(file)
        named = {file.resolve() for file in found}
        others = [file for file in files if ending(file) in _ENDINGS and file.resolve() not in named]
        if others:
            reason = f"a stream reads {builder.name} files of the split train, and would leave out {others[0]}"
            raise ConfigError(f"data {spec.path}: {reason}: {_MOVE}")
    return builder


def _paths(files: Iterable[str]) -> list[Path]:
    """The paths of files; the library may name a part of a file, before "::"."""
    return [Path(str(file).rpartition("::")[2]) for file in files]


def _left_out(spec: StreamSpec) -> Unread | None:
    """Files of a streamed folder that look like data and are not read: of other splits, or of other kinds."""
    folder = Path(spec.path)
    with _one_line(spec, 0):
        builder = _builder(spec)
    remedy = f"a stream reads {builder.name} files of the split train; {_MOVE}"
    return unread(walk(folder), _paths(builder.config.data_files["train"]), remedy)


_ENDINGS = (".jsonl", ".ndjson", ".parquet", ".txt")
"""Endings of files that a stream of their kind must not leave out."""
_PACKAGES = {".zst": "zstandard", ".lz4": "lz4"}
"""Ending of a compressed file -> package that the library needs for it."""
_MISTAKES = (errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ENOTDIR)
"""System errors that a retry would not resolve."""
_MOVE = "rename or move it, or leave out training.dataset_streaming"


def read_progress(folder: Path) -> dict[str, Any]:
    """The progress that the writer has published last; an empty dict before its first publication."""
    return read_json_if_whole(folder / "progress.json")


def read_wanted(folder: Path) -> int:
    """Number of tokens that readers have asked for."""
    return int.from_bytes((folder / "wanted").read_bytes(), "little")


class StreamCache(MappedTokens):
    """A growing cache, without hashes. tokens and document_ends are as last mapped; reach waits for more tokens."""

    def __init__(self, spec: StreamSpec, writer: "subprocess.Popen[str] | None" = None) -> None:
        self.spec, self.key, self.folder, self.vocab_size = spec, spec.key, spec.folder, spec.vocab_size
        self.writer = writer  # ends with this object, or with the process
        self.tokens = np.empty(0, token_dtype(spec.vocab_size))
        self.document_ends = np.empty(0, np.int64)
        self.is_whole = False

    def __reduce__(self) -> tuple[type["StreamCache"], tuple[StreamSpec]]:
        """Pickles only the spec: another process maps the files again, and does not own the writer."""
        return StreamCache, (self.spec,)

    def reach(self, wanted: int) -> None:
        """Waits until this many tokens exist, or the whole dataset is tokenized.

        Raises ConfigError if the writer could not read the data, RuntimeError if the writer failed or is gone.
        """
        started = told = alive = time.monotonic()
        while not self.is_whole:
            self._ask(wanted)
            if len(self.tokens) >= wanted:
                return
            progress = read_progress(self.folder)
            # The end may be published after the last token.
            if progress.get("tokens", 0) > len(self.tokens) or progress.get("is_whole"):
                self._map(progress)
            if self.is_whole or len(self.tokens) >= wanted:
                return
            if progress.get("error"):
                raise (ConfigError if progress["is_mistake"] else RuntimeError)(progress["error"])
            now = time.monotonic()
            if self._writer_lives():
                alive = now
            elif now - alive > _HANDOVER_SECONDS:
                raise RuntimeError(f"the process that tokenizes {self.spec.path} is gone: killed, or out of memory")
            if now - told > 10:
                told = now
                print(
                    f"waiting for tokens of {self.spec.path} for {now - started:.0f} s: "
                    f"{len(self.tokens):,} of {wanted:,} are there",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(_POLL_SECONDS)

    def _map(self, progress: dict[str, Any]) -> None:
        self.tokens = np.memmap(self.folder / "tokens.bin", self.tokens.dtype, "r", shape=(progress["tokens"],))
        self.document_ends = np.memmap(self.folder / "documents.bin", np.int64, "r", shape=(progress["documents"],))
        self.is_whole = progress["is_whole"]

    def _ask(self, wanted: int) -> None:
        """Requests tokens up to `wanted`. Readers overwrite each other's requests, but a waiting reader asks again."""
        try:
            if read_wanted(self.folder) < wanted:
                (self.folder / "wanted").write_bytes(wanted.to_bytes(8, "little"))
        except FileNotFoundError:  # the writer is still starting
            return

    def _writer_lives(self) -> bool:
        return is_held(self.spec.lock_file)


def start_writer(spec: StreamSpec, ahead_tokens: int = AHEAD_TOKENS) -> "subprocess.Popen[str]":
    """Starts the writer, which ends when its standard input is closed, and thus when this process ends.

    Raises RuntimeError if the writer ends at once.
    """
    # With multiprocessing, the writer and its workers would import train.py, and thus torch.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "components.data.writer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    assert process.stdin
    assert process.stdout
    process.stdin.write(json.dumps([dataclasses.asdict(spec), ahead_tokens], default=str) + "\n")
    process.stdin.flush()
    if not process.stdout.readline():
        raise RuntimeError(f"the process that tokenizes {spec.path} ended at once, with exit code {process.wait()}")
    return process
