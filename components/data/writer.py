"""`python -m components.data.writer` tokenizes a stream ahead of its readers; stream.start_writer starts it."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from components.config import ConfigError
from components.config.files import replace
from components.data.chunks import tokenized
from components.data.stream import StreamSpec, read_progress, read_wanted, stream_documents
from components.data.tokens import token_dtype
from components.launch.locks import end_process, keep_lock
from components.launch.process import cores

_PUBLISH_SECONDS = 0.25
_MOST_WORKERS = 8


def main() -> None:
    """Waits for the lock, then writes until the dataset or the parent ends. Publishes errors for the readers."""
    # The writer ignores these signals, because a rank that saves before it stops needs tokens for its last step. The
    # writer's workers inherit ignored signals.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    fields, ahead_tokens = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    spec = StreamSpec(**fields | {"cache_folder": Path(fields["cache_folder"]), "folder": Path(fields["folder"])})
    spec.folder.mkdir(parents=True, exist_ok=True)
    if not keep_lock(spec.lock_file):  # another job's writer holds the lock; take over when it ends
        print("ready", flush=True)
        keep_lock(spec.lock_file, f"tokenize {spec.path} ahead")
    progress = begin(spec)
    print("ready", flush=True)
    try:
        if not progress["is_whole"]:
            write(spec, progress, ahead_tokens)
    except ConfigError as error:
        _publish_error(spec, str(error), is_mistake=True)
    except Exception as error:
        traceback.print_exc()
        reason = f"tokenizing {spec.path} ahead failed: {type(error).__name__}: {error}"
        _publish_error(spec, reason, is_mistake=False)


def _end_with_parent() -> None:
    sys.stdin.read()
    end_process(1)


def begin(spec: StreamSpec) -> dict[str, Any]:
    """Publishes and returns the progress so far, without an earlier writer's error. Resets the readers' requests."""
    progress = read_progress(spec.folder) | {"error": None}
    if any(size and _size(spec.folder / name) < size for name, size in _published(spec, progress).items()):
        print(f"{spec.folder}: shorter than it was: made again from the start", file=sys.stderr, flush=True)
        progress = {}
    progress = {"key": spec.key, "tokens": 0, "documents": 0, "place": {}, "is_whole": False, "error": None} | progress
    (spec.folder / "wanted").write_bytes(bytes(8))
    _publish(spec.folder, progress)
    return progress


def _published(spec: StreamSpec, progress: dict[str, Any]) -> dict[str, int]:
    """File name -> number of bytes that have been published to readers."""
    tokens = token_dtype(spec.vocab_size).itemsize * progress.get("tokens", 0)
    return {"tokens.bin": tokens, "documents.bin": 8 * progress.get("documents", 0)}


def _publish_error(spec: StreamSpec, error: str, is_mistake: bool) -> None:
    """Publishes the error that ended the writer. First truncates unpublished data, because the disk may be full."""
    progress = read_progress(spec.folder)
    for name, size in _published(spec, progress).items():
        with contextlib.suppress(OSError):
            os.truncate(spec.folder / name, size)
    _publish(spec.folder, progress | {"error": error, "is_mistake": is_mistake})


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def write(spec: StreamSpec, progress: dict[str, Any], ahead_tokens: int) -> None:
    """Appends tokens and document ends from `progress` on, and updates it. Raises ConfigError for unreadable data."""
    dtype = token_dtype(spec.vocab_size)
    bad: list[str] = []
    wanted, last_published = 0, time.monotonic()
    skipped_before = progress["place"].get("skipped", 0)
    documents, workers = stream_documents(spec, progress["place"]), min(_MOST_WORKERS, cores())
    with (
        (spec.folder / "tokens.bin").open("ab") as tokens,
        (spec.folder / "documents.bin").open("ab") as ends,
        spec.pool(workers) as pool,
    ):
        tokens.truncate(dtype.itemsize * progress["tokens"])  # a killed writer leaves unpublished data
        ends.truncate(8 * progress["documents"])

        def publish() -> None:
            for file in (tokens, ends):
                file.flush()
                os.fsync(file.fileno())
            _publish(spec.folder, progress)

        total = progress["tokens"]
        for encoded, is_end, _, place in tokenized(documents, spec, pool, workers, bad):
            total += tokens.write(encoded) // dtype.itemsize
            if not is_end:
                continue
            ends.write(np.int64(total).tobytes())
            progress |= {"tokens": total, "documents": progress["documents"] + 1, "place": place}
            if total >= wanted + ahead_tokens or time.monotonic() - last_published > _PUBLISH_SECONDS:
                publish()
                last_published = time.monotonic()
            while total >= wanted + ahead_tokens:
                wanted = read_wanted(spec.folder)
                if total >= wanted + ahead_tokens:
                    time.sleep(0.05)
        if not total:
            raise ConfigError([f"data {spec.path}: no text in it", *bad[:3]])
        skipped = skipped_before + len(bad)
        progress |= {"is_whole": True, "skipped_records": skipped}
        publish()
    print(
        f"{spec.path}: all of it is tokenized, {total:,} tokens in {progress['documents']:,} documents"
        + (f"; {skipped:,} records skipped, the last: {bad[-1]}" if bad else ""),
        file=sys.stderr,
        flush=True,
    )


def _publish(folder: Path, progress: dict[str, Any]) -> None:
    replace(folder / "progress.json", json.dumps(progress))


if __name__ == "__main__":
    main()
