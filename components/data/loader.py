"""Batches of sequences for one rank, in the global order."""

import atexit
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from components.config import ConfigError, DataLoader
from components.data.order import token_keys
from components.data.packed import PackedSequences
from components.launch.process import shorten_temporary_folder

IGNORED = -100
"""Label of tokens without loss: padding, and tokens that are not trained."""
COLUMNS: dict[str, Callable[[PackedSequences, np.ndarray, int], np.ndarray]] = {
    "dropout_keys": lambda sequences, positions, seed: token_keys(positions, sequences.seq_len, seed),
    "sources": lambda sequences, positions, seed: np.repeat(
        sequences.sources_at(positions)[:, None], sequences.seq_len, axis=1
    ),
}
"""Name of a further column of a batch -> (sequences, positions (n,) in the global order, seed) -> (n, seq_len)."""
OF_ROWS: dict[str, Callable[[Any, np.ndarray], np.ndarray]] = {
    "sides": lambda rows, numbers: rows.sides_at(numbers),
    "reference": lambda rows, numbers: rows.reference_at(numbers),
}
"""As COLUMNS, of rows of pairs, at whatever position: (PairRows, sequence numbers (n,)) -> (n, seq_len)."""
DIVISORS: dict[str, Callable[[Any, np.ndarray], int]] = {
    "labels": lambda sequences, numbers: sequences.count_valid(numbers),
    "pairs": lambda rows, numbers: rows.count_pairs(numbers),
}
"""Objective.divisor -> (sequences, sequence numbers) -> the count by which the loss is divided."""


@dataclass(eq=False)
class GlobalOrder(Sampler):
    """Yields the positions (local_batch_size,) in the global order of one rank's local batches, without end.

    A rank takes a contiguous share of each global batch, one local batch after another. The first position of a step
    is the only state, so the numbers of workers and ranks may change at any step.
    """

    sequences: PackedSequences
    seed: int
    global_batch_size: int
    """A multiple of local_batch_size x batch_ranks."""
    local_batch_size: int
    batch_rank: int = 0
    batch_ranks: int = 1
    consumed_sequences: int = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        step_start, share = self.consumed_sequences, self.global_batch_size // self.batch_ranks
        while True:
            start = step_start + self.batch_rank * share
            for first in range(start, start + share, self.local_batch_size):
                yield np.arange(first, first + self.local_batch_size)
            step_start += self.global_batch_size

    def count(self, what: str) -> int:
        """The count of one of DIVISORS in the next global batch. Each rank counts all of it, without a collective."""
        positions = np.arange(self.consumed_sequences, self.consumed_sequences + self.global_batch_size)
        return DIVISORS[what](self.sequences, self.sequences.at(positions, self.seed))


@dataclass
class _Batches(Dataset):
    """The batch of a list of positions in the global order, as build_loader describes it."""

    order: GlobalOrder
    document_mask: bool
    columns: Sequence[str]

    def __getitem__(self, positions: np.ndarray) -> dict[str, Tensor]:
        sequences, seed = self.order.sequences, self.order.seed
        try:
            numbers = sequences.at(positions, seed)
            batch = batch_of(sequences, numbers, self.document_mask)
        except ConfigError as error:
            raise _Mistake(str(error)) from None
        return batch | _columns(self.columns, sequences, positions, numbers, seed)


class _Mistake(Exception):
    """A ConfigError on its way from a worker. torch puts a traceback in front, and a ConfigError cuts long messages."""


def _columns(
    names: Sequence[str], sequences: PackedSequences, positions: np.ndarray, numbers: np.ndarray, seed: int
) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(
            OF_ROWS[name](sequences, numbers) if name in OF_ROWS else COLUMNS[name](sequences, positions, seed)
        )
        for name in names
    }


def batch_of(sequences: PackedSequences, numbers: np.ndarray, document_mask: bool) -> dict[str, Tensor]:
    """The columns of the sequences with these numbers; (n, seq_len, K) for those of a teacher."""
    tokens, document_ids = sequences.get(numbers)
    labels, trained = tokens[:, 1:], sequences.trained(numbers)
    if trained is not None:
        labels = np.where(trained[:, 1:], labels, IGNORED)
    positions = np.broadcast_to(np.arange(document_ids.shape[1]), document_ids.shape)
    batch = {"tokens": tokens[:, :-1], "labels": labels, "positions": positions}
    if document_mask:
        begins = np.diff(document_ids, axis=1, prepend=0) > 0
        starts = np.maximum.accumulate(np.where(begins, positions, 0), axis=1)
        batch |= {"positions": positions - starts, "document_ids": document_ids}
    if (padding := sequences.padding(numbers)) is not None:
        batch["positions"] = np.where(padding, -1, batch["positions"])
    if (taught := sequences.taught(numbers)) is not None:
        batch |= dict(zip(("teacher_ids", "teacher_log_probabilities"), taught, strict=True))
    return {name: torch.from_numpy(array.copy()) for name, array in batch.items()}


def _start_worker(leaving: Any, worker_id: int) -> None:
    # Signals reach the whole process group, but a rank that saves before it stops still needs its workers. Workers
    # obey SIGTERM only once the rank's interpreter ends and waits for its workers.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0) if leaving.value else None)


def _batches(loader: StatefulDataLoader) -> Iterator[dict[str, Tensor]]:
    try:
        yield from loader
    except (ConnectionError, EOFError) as error:
        raise RuntimeError("a DataLoader worker is gone: killed, or out of memory") from error
    except _Mistake as error:
        raise ConfigError(str(error).rpartition("_Mistake: ")[2].strip()) from None


def build_loader(
    order: GlobalOrder, document_mask: bool = False, config: DataLoader | None = None, columns: Sequence[str] = ()
) -> Iterator[dict[str, Tensor]]:
    """Yields batches {tokens, labels, positions}, each (local_batch_size, seq_len) int64, without end.

    With document_mask a batch also has document_ids, and positions restart at each document. columns: names
    of further columns (COLUMNS, OF_ROWS). Raises RuntimeError if a worker dies, ConfigError if TMPDIR is too long for
    sockets.
    """
    config = config or DataLoader()
    if config.num_workers:
        shorten_temporary_folder()  # workers send tensors through sockets in it
    context = multiprocessing.get_context("spawn")
    leaving = context.RawValue("b", 0)
    atexit.register(setattr, leaving, "value", 1)
    # torchdata 0.11 calls a function that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    loader = StatefulDataLoader(
        _Batches(order, document_mask, columns),
        sampler=order,
        batch_size=None,
        num_workers=config.num_workers,
        persistent_workers=config.persistent_workers,
        pin_memory=config.pin_memory,
        prefetch_factor=config.prefetch_factor,
        generator=torch.Generator(),  # otherwise each start draws from the global random state
        worker_init_fn=partial(_start_worker, leaving),
        # Forked workers deadlock if the parent has run multi-threaded operations. SIGTERM to the process group would
        # end a fork server and its workers.
        multiprocessing_context=context if config.num_workers else None,
    )
    return _batches(loader)


def validation_batches(
    sequences: PackedSequences,
    local_batch_size: int,
    batch_rank: int,
    batch_ranks: int,
    max_sequences: int,
    document_mask: bool = False,
    columns: Sequence[str] = (),
) -> Iterator[dict[str, Tensor]]:
    """Yields one rank's batches of the first max_sequences sequences, in order. Each sequence is on one rank only.

    Batches are as in build_loader; all ranks get the same number of batches. Labels of padding are IGNORED.
    """
    count = min(max_sequences, len(sequences))
    for start in range(0, count, local_batch_size * batch_ranks):
        wanted = start + batch_rank * local_batch_size + np.arange(local_batch_size)
        numbers = np.minimum(wanted, count - 1)
        batch = batch_of(sequences, numbers, document_mask)
        batch |= _columns(columns, sequences, wanted, numbers, 0)
        batch["labels"][torch.from_numpy(wanted >= count)] = IGNORED
        yield batch
