"""Finds the rows of a job's teacher (teacher_rows.py), and writes them, whatever computes them."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from tqdm import tqdm

from components.config import ConfigError, JobConfig, mistake
from components.config.files import sample
from components.data.cache import data_spec, hashes_of
from components.data.order import token_keys
from components.data.packed import PackedSequences
from components.data.teacher_rows import Rows, Taught, TeacherRows, Writer
from components.data.tokens import token_dtype
from components.launch.locks import locked

_FORMAT = "teacher 1"
"""Part of the hash of a job; change it with the storage of rows."""


def _of_job(config: JobConfig, sequences: PackedSequences) -> Path:
    """The folder of all teachers' rows for these sequences."""
    distill, training = config.distill, config.training
    parts = [_FORMAT, sequences.key, sequences.seq_len, len(sequences), training.masks_documents]
    content = json.dumps([*parts, distill.top, distill.temperature])
    cache = data_spec(training, config.model.hf_assets_path, "-").cache_folder
    return cache / "teachers" / hashlib.blake2b(content.encode(), digest_size=12).hexdigest()


def hash_of_teacher(config: JobConfig, teacher: Path) -> str:
    """A hash of a Hugging Face folder's configuration and weights, of which samples are read. Raises ConfigError."""
    files = sorted([*teacher.glob("config.json"), *teacher.glob("*.safetensors")])
    if len(files) < 2:
        reason = "has no config.json with .safetensors: name a Hugging Face folder"
        raise ConfigError(f"distill.teacher_path = {teacher}: {reason}")
    cache = data_spec(config.training, config.model.hf_assets_path, "-").cache_folder
    content = "".join(f"{file.name}\0{found}\0" for file, found in zip(files, hashes_of(cache, files, sample)))
    return hashlib.blake2b(content.encode(), digest_size=12).hexdigest()


def open_rows(config: JobConfig, sequences: PackedSequences) -> TeacherRows:
    """The rows of distill.teacher_path, or of the only teacher. Raises ConfigError if there are none, or several."""
    parent, teacher = _of_job(config, sequences), config.distill.teacher_path
    if teacher:
        folders = [parent / hash_of_teacher(config, Path(teacher))]
    else:
        folders = [file.parent for file in sorted(parent.glob("[!.]*/rows.json"))]
    found = [TeacherRows(folder) for folder in folders if (folder / "rows.json").exists()]
    if not found:
        what = "held-out" if sequences.part == "validation" else "training"
        raise ConfigError(
            f"distill.alpha = {config.distill.alpha:g}: no teacher's rows for the {what} data, at this seq_len, mask, "
            f"distill.top = {config.distill.top} and distill.temperature = {config.distill.temperature:g}, in "
            f"{parent}; write them: {command(config)}"
        )
    if len(found) > 1:
        names, count = ", ".join(each.about.teacher for each in found), len(found)
        raise ConfigError(f"distill.teacher_path is unset, but {count} teachers have rows: set it to one of {names}")
    return found[0]


def command(config: JobConfig) -> str:
    """The command that writes the rows of a job."""
    file = next((origin.rpartition(":")[0] for origin in config.origins.values() if ":" in origin), "RECIPE")
    more = " (with this start's other overrides)" * ("command line" in config.origins.values())
    return f"python -m components.data teach {file} --teacher {config.distill.teacher_path or 'FOLDER'}{more}"


@contextmanager
def _writing(folder: Path, about: Rows) -> Iterator[Writer | None]:
    """A Writer, alone with this folder; None if the rows are finished."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.lock"), f"write {folder}"):
        if (folder / "rows.json").exists():
            yield None
            return
        with _told(folder):
            writer = Writer(folder, about)
        try:
            yield writer
        finally:
            with _told(folder):
                writer.close()


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Raises ConfigError instead of OSError."""
    try:
        yield
    except OSError as error:
        reason = f"a teacher's rows cannot be written: {error.strerror or error}; the same command goes on from there"
        raise ConfigError(f"{folder}: {reason}") from error


def fill(
    config: JobConfig,
    sequences: PackedSequences,
    teacher: str,
    vocab_size: int,
    score: Callable[[np.ndarray], Taught],
    at_once: int,
    together: Callable[[Callable[[], int]], int] = lambda action: action(),
    writes: bool = True,
) -> Path:
    """Write the rows of sequences, whose numbers `score` gets, `at_once` at a time. Returns their folder.

    teacher: the hash of its files. All ranks call this with the same arguments, and one of them `writes`.
    together: gives every rank what the writing rank's action returns. Goes on where a killed process was. Raises
    ConfigError if the rows do not fit on the disk, or cannot be written.
    """
    distill, count = config.distill, len(sequences)
    folder, dtype = _of_job(config, sequences) / teacher, token_dtype(vocab_size).name
    named = str(distill.teacher_path or teacher)
    about = Rows(named, distill.top, distill.temperature, count, sequences.seq_len, dtype)  # type: ignore[arg-type]
    with ExitStack() as stack:
        opened: list[Writer | None] = []

        def begin() -> int:
            opened.append(stack.enter_context(_writing(folder, about)))
            if opened[0] is None:
                return count
            done, free = opened[0].about.done, shutil.disk_usage(folder.parent).free
            if (needed := sum(about.sizes) * (count - done)) > free:
                reason = f"the rows take {needed / 2**30:,.1f} GiB more in {folder.parent} (training.dataset_cache)"
                raise ConfigError(mistake(config, "distill.top", f"{reason}, and {free / 2**30:,.1f} GiB are free"))
            return done

        done = together(begin)
        size, shown = sequences.seq_len, {"unit": " tokens", "unit_scale": True, "disable": done == count or not writes}
        with tqdm(total=count * size, initial=done * size, desc=f"teacher, {sequences.part}", **shown) as bar:
            for start in range(done, count, at_once):
                ids, logs = score(np.minimum(np.arange(start, start + at_once), count - 1))
                if writes and opened[0]:
                    left = min(at_once, count - start)
                    with _told(folder):
                        opened[0].write(ids[:left], logs[:left])
                    bar.update(left * size)
    together(lambda: count)  # no rank looks for the rows before they have their name
    return folder


def made_up(top: int, vocab_size: int, sequences: PackedSequences) -> Callable[[np.ndarray], Taught]:
    """Rows by a hash instead of a model, for proofs of layouts: `score` of fill."""

    def score(numbers: np.ndarray) -> Taught:
        keys = token_keys(numbers, sequences.seq_len, 0).view(np.uint64)[..., None]
        places = np.arange(top, dtype=np.uint64)
        ids = (keys % np.uint64(vocab_size) + places * np.uint64(vocab_size // top)) % np.uint64(vocab_size)
        sizes = 1 + (keys >> (places + np.uint64(8))) % np.uint64(1000)
        shares = sizes / (sizes.sum(axis=-1, keepdims=True) + 200)
        return ids.astype(np.int64), np.log(shares).astype(np.float32)

    return score
