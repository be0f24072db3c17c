"""Log-probabilities of pairs under the reference model, computed once: the reference is the run's starting weights.

<cache_folder>/reference/<key>/rows-<N>-<first>.npz   N rows: their numbers, and the numbers of all their sequences

The key is a hash of the weights, of the model's sizes, of the rows and of the precision, not of the layout. Pieces are
written as they are computed, so a run that is killed goes on with the next piece. Checkpoints keep the hash of the
weights: a resumed run compares with the same reference.
"""

import hashlib
import os
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from components.config import ConfigError, JobConfig
from components.data.cache import data_spec
from components.data.loader import batch_of
from components.data.pairs import PairRows
from components.state.base import hash_of_base
from components.state.checkpoint import Checkpointer
from components.state.init import initialize_weights
from parallelize.groups import print_on_rank_0
from parallelize.mesh import batch_rank
from parallelize.scores import Scorer
from parallelize.together import together

_MOST_BATCHES = 64
"""Batches of a piece; the first pieces have fewer, so that little is lost early, and an ETA is known soon."""


def add_reference(run: Any, checkpointer: Checkpointer, cache: Path | None = None) -> None:
    """Give the run's rows of pairs the reference's log-probabilities of all that is still to be trained or validated.

    run: train.py's Run, after the resumption. cache: the folder of the pieces, by default in training.dataset_cache.
    Called by all ranks. Raises ConfigError if the reference is not known.
    """
    config: JobConfig = run.config
    if config.reference != "start":
        return
    if run.step and not run.reference:
        raise ConfigError(
            f"preference.loss = {config.preference.loss}: the checkpoint's run had no reference; begin a new run from "
            "its weights, with checkpoint.initial_load_path"
        )
    stages = run.mesh["pp"].get_group()
    weights = run.reference or hash_of_base(run.stages, stages)
    needed = _needed(run)
    cache = cache or _cache(config)
    folders = [cache / _key(config, run.stages[0].config, weights, rows) for rows, _ in needed]
    for (rows, _), folder in zip(needed, folders, strict=True):
        rows.reference = together(partial(_read, rows, folder), first_only=True)[0]
    missing = [_missing(rows, numbers) for rows, numbers in needed]
    if any(map(len, missing)):
        with _starting_weights(run, checkpointer) if run.reference else _as_they_are():
            if run.reference and (found := hash_of_base(run.stages, stages)) != weights:
                raise ConfigError(
                    f"checkpoint.initial_load_path: other weights than the run has started from ({found}, not "
                    f"{weights}), and {folders[0]} lacks their log-probabilities of some pairs; set the path, "
                    "debug.seed and optimizer.mup_base as they were"
                )
            for (rows, _), numbers, folder in zip(needed, missing, folders, strict=True):
                _compute(run, rows, numbers, folder)
    pairs = sum(rows.count_pairs(numbers) for rows, numbers in needed)
    print_on_rank_0(f"reference: log-probabilities of {pairs:,} pairs by the starting weights, in {cache}")
    run.reference = weights


def _needed(run: Any) -> list[tuple[PairRows, np.ndarray]]:
    """The datasets of the run, and the numbers of their rows that it has still to see."""
    left = (run.config.training.steps - run.step) * run.global_batch_size
    rows: PairRows = run.train_set
    positions = np.arange(run.sequences, run.sequences + min(left, 2 * len(rows)))  # two epochs have every row
    found = [(rows, np.unique(rows.at(positions, run.config.debug.seed)))]
    if run.validation_set is not None:
        steps = run.config.validation.steps
        count = len(run.validation_set) if steps == -1 else steps * run.global_batch_size
        found.append((run.validation_set, np.arange(min(count, len(run.validation_set)))))
    return found


def _cache(config: JobConfig) -> Path:
    training = config.training
    return data_spec(training, config.model.hf_assets_path, training.dataset_path or ".").cache_folder / "reference"


def _key(config: JobConfig, sizes: Any, weights: str, rows: PairRows) -> str:
    model, quantize = config.model, config.quantize if config.model.converters else ""
    forward = f"{model.name}/{sizes}/{model.converters}/{quantize}/{config.training.mixed_precision_param}"
    forward += f"/{config.training.float32_matmul_precision}"
    key = f"{weights}/{rows.key}/{rows.seq_len}/{forward}"
    return hashlib.blake2b(key.encode(), digest_size=12).hexdigest()


def _read(rows: PairRows, folder: Path) -> np.ndarray:
    """The log-probabilities by sequence, NaN for those that no piece has. A damaged piece is left out."""
    found = np.full(len(rows.lengths), np.nan)
    for file in sorted(folder.glob("rows-*.npz")):
        try:
            with np.load(file) as piece:
                numbers, values = piece["rows"], piece["values"]
            found[_sequences(rows, numbers)] = values
        except (OSError, ValueError, KeyError, IndexError, zipfile.BadZipFile):
            continue
    return found


def _sequences(rows: PairRows, numbers: np.ndarray) -> np.ndarray:
    """The numbers of all sequences of these rows."""
    return np.concatenate([np.arange(len(rows.lengths))[rows.sequences_of(number)] for number in numbers])


def _missing(rows: PairRows, numbers: np.ndarray) -> np.ndarray:
    assert rows.reference is not None
    unknown = np.isnan(rows.reference)
    return np.asarray([number for number in numbers if unknown[rows.sequences_of(number)].any()], dtype=np.int64)


def _compute(run: Any, rows: PairRows, numbers: np.ndarray, folder: Path) -> None:
    """Compute and store the log-probabilities of these rows, shared out over the batch ranks."""
    scorer = Scorer(run.stages, run.runner, run.mesh, run.config)
    size, rank = run.config.training.local_batch_size, batch_rank(run.mesh)
    at_once, batches, at, started = size * run.degrees.batch_ranks, 1, 0, time.monotonic()
    assert rows.reference is not None
    while at < len(numbers):
        piece = numbers[at : at + batches * at_once]
        own: dict[int, np.ndarray] = {}
        for first in range(0, len(piece), at_once):
            mine = piece[first : first + at_once][rank * size : (rank + 1) * size]
            # Every rank makes the same calls: a rank that has too few rows repeats one.
            found = _sums(scorer, rows, np.resize(mine if len(mine) else piece[:1], size))
            own |= dict(zip(mine.tolist(), found, strict=False))
        of_all = {number: sums for each in together(own.copy) for number, sums in each.items()}
        for number, sums in of_all.items():
            rows.reference[rows.sequences_of(number)] = sums
        together(partial(_write, rows, piece, folder), first_only=True)
        at, batches = at + len(piece), min(2 * batches, _MOST_BATCHES)
        left = (time.monotonic() - started) / at * (len(numbers) - at)
        print_on_rank_0(f"reference: {at:,} of {len(numbers):,} rows of {rows.part}, eta {left:.0f} s")


def _sums(scorer: Scorer, rows: PairRows, numbers: np.ndarray) -> list[np.ndarray]:
    """The log-probability of each completion of these rows."""
    scores = scorer.of_batch(batch_of(rows, numbers, document_mask=True), 0).label.cpu().numpy()
    sides = rows.sides_at(numbers)
    count = [rows.sequences_of(number).stop - rows.sequences_of(number).start for number in numbers]
    found = zip(sides, scores, count, strict=True)
    return [np.bincount(side, score, minlength=most + 1)[1:] for side, score, most in found]


def _write(rows: PairRows, numbers: np.ndarray, folder: Path) -> None:
    """Write a piece atomically. Raises ConfigError if the cache cannot be written."""
    assert rows.reference is not None
    file = folder / f"rows-{len(numbers)}-{numbers[0]}.npz"
    staging = folder / f".{file.stem}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with staging.open("wb") as opened:
            np.savez(opened, rows=numbers, values=rows.reference[_sequences(rows, numbers)])
            opened.flush()
            os.fsync(opened.fileno())
        staging.replace(file)
    except OSError as error:
        raise ConfigError(f"training.dataset_cache: the reference cannot be written: {error}") from None


@contextmanager
def _as_they_are() -> Iterator[None]:
    yield


@contextmanager
def _starting_weights(run: Any, checkpointer: Checkpointer) -> Iterator[None]:
    """The weights from which the run has started, instead of those of its checkpoint."""
    if checkpointer.config.initial_load_path and not checkpointer.config.initial_load_model_only:
        raise ConfigError(
            "checkpoint.initial_load_model_only = false: the reference's log-probabilities are gone from "
            "training.dataset_cache, and the weights that the first run has started from are unknown; begin a new run"
        )
    print_on_rank_0("reference: the cache lacks some pairs; they are computed with the starting weights")
    kept = [parameter.detach().to("cpu", copy=True) for parameter in run.parameters]
    for stage in run.stages:
        initialize_weights(stage, stage.init_std, run.config.debug.seed, run.device)
    checkpointer.load_initial()
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in zip(run.parameters, kept, strict=True):
                parameter.copy_(before)
