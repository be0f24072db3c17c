"""Sequences of equal length, cut from a token stream without gaps; held-out data."""

from typing import Any, Literal

import numpy as np

from components.config import ConfigError
from components.data.order import sequence_at
from components.data.stream import StreamCache
from components.data.teacher_rows import TeacherRows
from components.data.tokens import Tokens

_BLOCK = 4096  # tokens of a held-out block, at the most


def _too_few(num_tokens: int, part: str, seq_len: int) -> str:
    purpose = {"all": "", "train": " for training", "validation": " for validation"}[part]
    return (
        f"{num_tokens} tokens{purpose} do not fill one sequence of {seq_len} (and the token after it): "
        "give more text or a shorter seq_len"
    )


class PackedSequences:
    """Windows of seq_len + 1 tokens; each window begins with the last token of the previous window.

    The stream is divided into equal periods. One block of each period is held out; the other tokens, joined, are the
    training part. Both parts are computed by index arithmetic and do not depend on seq_len. Raises ConfigError if the
    text does not fill one sequence.
    """

    mixture: list[Any] | None = None
    """The phases of a mixture: first position, and the weight and the key of each source's data. None without one."""
    teacher: TeacherRows | None = None
    """The rows of a teacher of these sequences (distill.alpha)."""
    content: str | None = None
    """Hash of the files of a streamed folder, whose key does not depend on their content; None for other data."""

    def __init__(
        self,
        cache: Tokens,
        seq_len: int,
        part: Literal["all", "train", "validation"] = "all",
        held_out_fraction: float = 0.0,
    ) -> None:
        self.cache, self.seq_len, self.part = cache, seq_len, part
        self.key = f"{cache.key}/{part}/{held_out_fraction}" if part != "all" else cache.key
        stream = cache.num_tokens
        # A stream too short for ten periods of whole blocks gets smaller blocks.
        self._block = max(1, min(_BLOCK, int(stream * held_out_fraction / 10)))
        self._period = round(self._block / held_out_fraction) if held_out_fraction else stream
        periods, rest = divmod(stream, self._period)
        held_out = periods * self._block + max(0, min(self._block, rest - self._start))
        self.num_tokens = {"all": stream, "train": stream - held_out, "validation": held_out}[part]
        self.num_sequences = (self.num_tokens - 1) // seq_len
        if self.num_sequences < 1:
            raise ConfigError(_too_few(self.num_tokens, part, seq_len))

    @property
    def _start(self) -> int:
        """Start of the held-out block, which is in the middle of its period."""
        return (self._period - self._block) // 2

    def __len__(self) -> int:
        return self.num_sequences

    def describe(self, end: int) -> list[str]:
        """Lines about a run of `end` sequences: the teacher, and the sources of a mixture.

        Raises ConfigError if the data do not suffice.
        """
        return [str(self.teacher)] if self.teacher else []

    def taught(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """The teacher's tokens and log-probabilities, (n, seq_len, K) each; None without a teacher."""
        return self.teacher.get(np.asarray(indices)) if self.teacher else None

    def at(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """Sequence numbers (int64) at these positions of the global order, which start at 0 and have no end."""
        return sequence_at(positions, self.num_sequences, seed)

    def sources_at(self, positions: np.ndarray) -> np.ndarray:
        """The number of a mixture's source (int64) at these positions of the global order; -1 without a mixture."""
        return np.full(len(positions), -1)

    def get(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (n, seq_len + 1) and document ids (n, seq_len) of n sequences, int64.

        Ids number the documents of a sequence from 0 on. A join of two parts of the stream begins a new document.
        """
        places = self._places_of(indices)
        tokens = self.cache.tokens_at(places)
        documents = self.cache.documents_at(places[:, :-1])
        joins = np.cumsum(np.diff(places[:, :-1], axis=1, prepend=places[:, :1]) > 1, axis=1)
        # Both grow along a sequence; a document that ends at a join is one change, not two.
        changes = np.diff(documents + joins, axis=1, prepend=(documents + joins)[:, :1]) > 0
        return tokens, np.cumsum(changes, axis=1)

    def trained(self, indices: np.ndarray) -> np.ndarray | None:
        """bool (n, seq_len + 1): which tokens of n sequences are trained, as labels; None for all of them."""
        return None if self.cache.trained is None else self.cache.trained[self._places_of(indices)]

    def padding(self, indices: np.ndarray) -> np.ndarray | None:
        """bool (n, seq_len): which tokens of n sequences are padding; None for none."""
        return None

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
    """Sequences of a stream, in its order, or permuted within windows. Their number is unknown until the stream ends.

    Sequence numbers have no end, because the first sequence follows the last.
    """

    def __init__(self, cache: StreamCache, seq_len: int, window: int = 0) -> None:
        """window: number of sequences that are permuted among each other, at each multiple of it; 0 for none."""
        self.cache: StreamCache = cache
        self.window = window
        self.seq_len, self.part, self.key, self.content = seq_len, "all", cache.key, cache.spec.content

    def __len__(self) -> int:
        raise TypeError("a stream has no length")

    def at(self, positions: np.ndarray, seed: int) -> np.ndarray:
        positions = np.asarray(positions, dtype=np.int64)
        if not self.window:
            return positions
        # Each epoch of sequence_at is a permutation of its own, and so is each window.
        return positions - positions % self.window + sequence_at(positions, self.window, seed)

    def get(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As above, after waiting for the tokens. Raises what StreamCache.reach raises."""
        self.cache.reach((int(np.max(indices)) + 1) * self.seq_len + 1)
        if self.cache.is_whole:
            num_sequences = (self.cache.num_tokens - 1) // self.seq_len
            if num_sequences < 1:
                raise ConfigError(_too_few(self.cache.num_tokens, "train", self.seq_len))
            indices = np.asarray(indices) % num_sequences
        return super().get(indices)
