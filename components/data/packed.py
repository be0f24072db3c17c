"""Sequences of one length, cut from a token stream without gaps; and the part of the stream that is held out."""

from typing import Literal

import numpy as np

from components.config import ConfigError
from components.data.cache import TokenCache

_BLOCK = 4096  # tokens of a held-out block, at the most


class PackedSequences:
    """Windows of seq_len + 1 tokens, each beginning with the last token of the one before.

    Held out is a block in each of equal periods, spread over the stream; what is trained on is the rest, joined. Both
    are index arithmetic. How the stream is divided does not depend on seq_len.

    Raises:
        ConfigError: there is not enough text for one sequence.
    """

    def __init__(
        self,
        cache: TokenCache,
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
            raise ConfigError(
                f"{self.num_tokens} tokens for {'validation' if part == 'validation' else 'training'} do not fill one "
                f"sequence of {seq_len} (and the token after it): give more text or a shorter seq_len"
            )

    @property
    def _start(self) -> int:
        """Where in each period its held-out block begins: in the middle."""
        return (self._period - self._block) // 2

    def __len__(self) -> int:
        return self.num_sequences

    def get(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (n, seq_len + 1) and document ids (n, seq_len) of n sequences, int64.

        Ids count the documents that have begun since the sequence did; where two parts of the stream were joined, a
        new document is taken to begin.
        """
        within = np.asarray(indices, dtype=np.int64)[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        places = self._places(within)
        tokens = self.cache.tokens[places].astype(np.int64)
        documents = np.searchsorted(self.cache.document_ends, places[:, :-1], side="right")
        joins = np.cumsum(np.diff(places[:, :-1], axis=1, prepend=places[:, :1]) > 1, axis=1)
        # Both only grow along a sequence; a document that ends at a join is one change, not two.
        changes = np.diff(documents + joins, axis=1, prepend=(documents + joins)[:, :1]) > 0
        return tokens, np.cumsum(changes, axis=1)

    def count_valid(self, indices: np.ndarray) -> int:
        """Labels that count in these sequences: all of them."""
        return len(indices) * self.seq_len

    def _places(self, positions: np.ndarray) -> np.ndarray:
        """Positions in this part as positions in the whole stream."""
        if self.part == "all":
            return positions
        if self.part == "validation":
            period, offset = np.divmod(positions, self._block)
            return period * self._period + self._start + offset
        period, offset = np.divmod(positions, self._period - self._block)
        return period * self._period + offset + np.where(offset >= self._start, self._block, 0)
