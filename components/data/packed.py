"""Sequences of equal length, cut from a token stream without gaps; held-out data; the datasets of a job."""

import os
import sys
from dataclasses import replace
from typing import Literal

import numpy as np

from components.config import ConfigError, JobConfig, mistake
from components.data.cache import TokenCache, data_spec, prepare
from components.data.order import sequence_at
from components.data.stream import StreamCache, is_stream, start_writer, stream_spec
from components.data.tokenizer import check_tokenizer, load_tokenizer
from components.launch.orphan import LAUNCHER_PIPE

_BLOCK = 4096  # tokens of a held-out block, at the most


def _too_few(num_tokens: int, what: str, seq_len: int) -> str:
    return (
        f"{num_tokens} tokens for {what} do not fill one sequence of {seq_len} (and the token after it): "
        "give more text or a shorter seq_len"
    )


class PackedSequences:
    """Windows of seq_len + 1 tokens; each window begins with the last token of the previous window.

    The stream is divided into equal periods. One block of each period is held out; the other tokens, joined, are the
    training part. Both parts are computed by index arithmetic and do not depend on seq_len. Raises ConfigError if the
    text does not fill one sequence.
    """

    content: str | None = None
    """Hash of the files of a streamed folder, whose key does not depend on their content; None for other data."""

    def __init__(
        self,
        cache: TokenCache | StreamCache,
        seq_len: int,
        part: Literal["all", "train", "validation"] = "all",
        held_out_fraction: float = 0.0,
    ) -> None:
        self.cache, self.seq_len, self.part = cache, seq_len, part
        self.key = f"{cache.key}/{part}/{held_out_fraction}" if part != "all" else cache.key
        stream = len(cache.tokens)
        # A stream too short for ten periods of whole blocks gets smaller blocks.
        self._block = max(1, min(_BLOCK, int(stream * held_out_fraction / 10)))
        self._period = round(self._block / held_out_fraction) if held_out_fraction else stream
        periods, rest = divmod(stream, self._period)
        held_out = periods * self._block + max(0, min(self._block, rest - self._start))
        self.num_tokens = {"all": stream, "train": stream - held_out, "validation": held_out}[part]
        self.num_sequences = (self.num_tokens - 1) // seq_len
        if self.num_sequences < 1:
            raise ConfigError(_too_few(self.num_tokens, "validation" if part == "validation" else "training", seq_len))

    @property
    def _start(self) -> int:
        """Start of the held-out block, which is in the middle of its period."""
        return (self._period - self._block) // 2

    def __len__(self) -> int:
        return self.num_sequences

    def at(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """Sequence numbers (int64) at these positions of the global order, which start at 0 and have no end."""
        return sequence_at(positions, self.num_sequences, seed)

    def get(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (n, seq_len + 1) and document ids (n, seq_len) of n sequences, int64.

        Ids number the documents of a sequence from 0 on. A join of two parts of the stream begins a new document.
        """
        places = self._places_of(indices)
        self.cache.verify(places)
        tokens = self.cache.tokens[places].astype(np.int64)
        documents = np.searchsorted(self.cache.document_ends, places[:, :-1], side="right")
        joins = np.cumsum(np.diff(places[:, :-1], axis=1, prepend=places[:, :1]) > 1, axis=1)
        # Both grow along a sequence; a document that ends at a join is one change, not two.
        changes = np.diff(documents + joins, axis=1, prepend=(documents + joins)[:, :1]) > 0
        return tokens, np.cumsum(changes, axis=1)

    def trained(self, indices: np.ndarray) -> np.ndarray | None:
        """bool (n, seq_len + 1): which tokens of n sequences are trained, as labels; None for all of them."""
        return None if self.cache.trained is None else self.cache.trained[self._places_of(indices)]

    def count_valid(self, indices: np.ndarray) -> int:
        """Number of labels with loss in these sequences."""
        trained = self.trained(indices)
        return len(indices) * self.seq_len if trained is None else int(np.count_nonzero(trained[:, 1:]))

    def _places_of(self, indices: np.ndarray) -> np.ndarray:
        """The places of n sequences' tokens in the whole stream, (n, seq_len + 1)."""
        return self._places(np.asarray(indices, dtype=np.int64)[:, None] * self.seq_len + np.arange(self.seq_len + 1))

    def _places(self, positions: np.ndarray) -> np.ndarray:
        """Converts positions in this part to positions in the whole stream."""
        if self.part == "all":
            return positions
        if self.part == "validation":
            period, offset = np.divmod(positions, self._block)
            return period * self._period + self._start + offset
        period, offset = np.divmod(positions, self._period - self._block)
        return period * self._period + offset + np.where(offset >= self._start, self._block, 0)


class StreamedSequences(PackedSequences):
    """Sequences of a stream, in its order. Their number is unknown until the stream ends.

    Sequence numbers have no end, because the first sequence follows the last.
    """

    def __init__(self, cache: StreamCache, seq_len: int) -> None:
        self.cache: StreamCache = cache
        self.seq_len, self.part, self.key, self.content = seq_len, "all", cache.key, cache.spec.content

    def __len__(self) -> int:
        raise TypeError("a stream has no length")

    def at(self, positions: np.ndarray, seed: int) -> np.ndarray:
        return np.asarray(positions, dtype=np.int64)

    def get(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As above, after waiting for the tokens. Raises what StreamCache.reach raises."""
        self.cache.reach((int(np.max(indices)) + 1) * self.seq_len + 1)
        if self.cache.is_whole:
            num_sequences = (len(self.cache.tokens) - 1) // self.seq_len
            if num_sequences < 1:
                raise ConfigError(_too_few(len(self.cache.tokens), "training", self.seq_len))
            indices = np.asarray(indices) % num_sequences
        return super().get(indices)


def build_datasets(config: JobConfig, vocab_size: int) -> tuple[PackedSequences, PackedSequences | None]:
    """(training sequences, validation sequences or None). Validation has separate data or a held-out part.

    All ranks must call this function. Raises ConfigError in three cases:

    - The tokenizer has more tokens than vocab_size, or lacks training.dataset_separator.
    - There is not enough text.
    - The files on the nodes differ.
    """
    import torch.distributed as dist  # whoever only tokenizes needs no torch

    from parallelize.groups import gather

    warnings = check_tokenizer(config)
    if LAUNCHER_PIPE not in os.environ and os.environ.get("RANK", "0") == "0":  # else the launcher has printed them
        print(*(f"warning: {warning}" for warning in warnings), sep="\n", end="\n" * bool(warnings), file=sys.stderr)
    built = _build(config, vocab_size)
    if dist.is_initialized():
        found = gather([(part.key, part.content) for part in built if part is not None])
        if others := [rank for rank, parts in enumerate(found) if parts != found[0]]:
            where = config.training.dataset_path or config.training.dataset
            reason = f"ranks {', '.join(map(str, others))} have found other data than rank 0"
            raise ConfigError(f"training data {where}: {reason}: all nodes need the same files")
    return built


def _build(config: JobConfig, vocab_size: int) -> tuple[PackedSequences, PackedSequences | None]:
    training, validation = config.training, config.validation
    if is_stream(training):
        return _streamed(config, vocab_size)
    cache = prepare(data_spec(training, config.model.hf_assets_path))
    _check_vocabulary(config, cache.vocab_size, vocab_size)
    if not validation.enable:
        return PackedSequences(cache, training.seq_len), None
    if validation.dataset_path:
        return PackedSequences(cache, training.seq_len), _own_validation(config)
    seq_len, held_out = validation.seq_len or training.seq_len, validation.held_out_fraction
    return (
        PackedSequences(cache, training.seq_len, "train", held_out),
        PackedSequences(cache, seq_len, "validation", held_out),
    )


def _streamed(config: JobConfig, vocab_size: int) -> tuple[PackedSequences, PackedSequences | None]:
    from parallelize.together import together

    # A dataset of the hub may change at any time, so all ranks read the commit that rank 0 has resolved.
    spec = together(lambda: stream_spec(config), first_only=True)[0]
    _check_vocabulary(config, spec.vocab_size, vocab_size)
    first_of_node = int(os.environ.get("LOCAL_RANK", 0)) == 0
    if first_of_node and spec.revision is None:  # another node may have other files in this folder
        spec = replace(spec, content=stream_spec(config).content)
    writer = start_writer(spec) if first_of_node else None
    train_set = StreamedSequences(StreamCache(spec, writer), config.training.seq_len)
    return train_set, _own_validation(config) if config.validation.enable else None


def _own_validation(config: JobConfig) -> PackedSequences:
    own = prepare(data_spec(config.training, config.model.hf_assets_path, config.validation.dataset_path))
    return PackedSequences(own, config.validation.seq_len or config.training.seq_len)


def _check_vocabulary(config: JobConfig, found: int, most: int) -> None:
    tokenizer = config.model.hf_assets_path, config.training.dataset_separator
    if found > most and (found := load_tokenizer(*tokenizer).rows) > most:
        reason = f"{found} tokens, but {config.model.name} {config.model.flavor} has a table of {most}"
        raise ConfigError(mistake(config, "model.hf_assets_path", reason))
