"""A teacher's rows: of each token of packed sequences, the teacher's K likeliest next tokens and their probabilities.

<cache_folder>/teachers/<job>/<teacher>/ids.bin                 (sequences, seq_len, K), uint16 or uint32
                                        log_probabilities.bin   the same shape, float32
                                        hashes.bin              a hash of each sequence's rows, uint64
                                        rows.json               the fields of Rows

<job> is a hash of everything in the job on which rows depend: data, packing, mask, K and temperature. <teacher> is a
hash of the teacher's files. A folder that is being written has .staging- before its name; `done` in its rows.json
counts the sequences that are on disk, and the next writer goes on from there.

Log-probabilities are float32: the probability of all other tokens is 1 - (sum of K), and float16 would round it by
1e-4. Ids and log-probabilities take 6 K bytes a token, of a vocabulary of more than 65,536 tokens 8 K.
"""

import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from components.config import ConfigError
from components.config.files import publish, read_json_as, staging_of, sync
from components.config.files import replace as write_text
from components.data.tokens import block_hash

_FILES = ("ids.bin", "log_probabilities.bin", "hashes.bin")
_SAVED_SECONDS = 30.0
"""Time between two records of how many sequences are on disk."""
Taught = tuple[np.ndarray, np.ndarray]
"""Ids (n, seq_len, K) and log-probabilities (n, seq_len, K), float32."""


@dataclass
class Rows:
    """Fields of rows.json, which describe a folder of a teacher's rows."""

    teacher: str
    """The folder of the teacher, as it was named."""
    top: int
    temperature: float
    sequences: int
    seq_len: int
    dtype: Literal["uint16", "uint32"]
    largest: int = -1
    """The largest id."""
    done: int = 0
    """Sequences that are on disk."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of a sequence in each of _FILES."""
        rows = self.seq_len * self.top
        return rows * np.dtype(self.dtype).itemsize, rows * 4, 8


class TeacherRows:
    """A teacher's finished rows, memory-mapped. Raises ConfigError if a file has the wrong size."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.about = folder, read_json_as(Rows, folder / "rows.json")
        about = self.about
        for name, size in zip(_FILES, about.sizes, strict=True):
            found = (folder / name).stat().st_size if (folder / name).exists() else 0
            if about.done != about.sequences or found != size * about.sequences:
                whole = size * about.sequences
                raise ConfigError(f"{folder / name}: {found} bytes of {whole}: {_AGAIN.format(folder)}")
        shape = about.sequences, about.seq_len, about.top
        self._ids = np.memmap(folder / _FILES[0], about.dtype, "r", shape=shape)
        self._logs = np.memmap(folder / _FILES[1], np.float32, "r", shape=shape)
        self._hashes = np.fromfile(folder / _FILES[2], np.uint64)
        self._verified = np.zeros(about.sequences, dtype=bool)

    @property
    def name(self) -> str:
        """The hashes of the job and of the teacher."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    def get(self, numbers: np.ndarray) -> Taught:
        """The rows of the sequences with these numbers. Raises ConfigError if they differ from their hash."""
        for number in np.unique(numbers[~self._verified[numbers]]).tolist():
            if _hash(self._ids[number], self._logs[number]) != self._hashes[number]:
                raise ConfigError(f"{self.folder}: rows of sequence {number} are damaged: {_AGAIN.format(self.folder)}")
            self._verified[number] = True
        return self._ids[numbers].astype(np.int32), self._logs[numbers]

    def __str__(self) -> str:
        about = self.about
        return f"teacher {about.teacher}: {about.top} likeliest tokens at temperature {about.temperature:g}"

    def __reduce__(self) -> tuple[type["TeacherRows"], tuple[Path]]:
        return TeacherRows, (self.folder,)


_AGAIN = "remove {} to write it again"


def _hash(ids: np.ndarray, logs: np.ndarray) -> int:
    return block_hash(np.concatenate([each.reshape(-1).view(np.uint8) for each in (ids, logs)]))


class Writer:
    """Writes a teacher's rows, sequence after sequence, from about.done on. Raises OSError."""

    def __init__(self, folder: Path, about: Rows) -> None:
        self.folder, self.about, self._staging = folder, about, staging_of(folder)
        self._staging.mkdir(parents=True, exist_ok=True)
        before = self._staging / "rows.json"
        if before.exists():
            try:
                left = read_json_as(Rows, before)
            except ConfigError:
                left = about
            if asdict(left) | {"done": 0, "largest": -1, "teacher": ""} == asdict(about) | {"teacher": ""}:
                self.about = left
        self._files = [(self._staging / name).open("ab") for name in _FILES]
        for file, size in zip(self._files, self.about.sizes, strict=True):
            file.truncate(size * self.about.done)  # what a killed writer had not recorded
            file.seek(0, os.SEEK_END)
        self._written, self._saved = self.about.done, time.monotonic()

    def write(self, ids: np.ndarray, log_probabilities: np.ndarray) -> None:
        """Add the rows of the next n sequences, (n, seq_len, K) each."""
        ids, logs = ids.astype(self.about.dtype), log_probabilities.astype(np.float32)
        hashes = np.asarray([_hash(*each) for each in zip(ids, logs, strict=True)], np.uint64)
        parts: list[np.ndarray] = [ids, logs, hashes]
        for file, part in zip(self._files, parts, strict=True):
            file.write(part.tobytes())
        self.about.largest = max(self.about.largest, int(ids.max()))
        self._written += len(ids)
        if time.monotonic() - self._saved > _SAVED_SECONDS:
            self.save()

    def save(self) -> None:
        """Record how many sequences are on disk."""
        for file in self._files:
            file.flush()
            sync(Path(file.name))
        self.about.done, self._saved = self._written, time.monotonic()
        write_text(self._staging / "rows.json", json.dumps(asdict(self.about)))

    def close(self) -> None:
        """Record what is written; rows of all sequences get their name."""
        self.save()
        for file in self._files:
            file.close()
        if self.about.done == self.about.sequences:
            shutil.rmtree(publish(self._staging, self.folder), ignore_errors=True)
