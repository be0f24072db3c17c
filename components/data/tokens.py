"""Reads the caches that cache.py makes: tokens and documents at any places of a dataset, from one cache or several."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from components.config import ConfigError
from components.config.files import read_json_as

BLOCK_BYTES = 1 << 16
"""Bytes of tokens that have a hash."""
_FEW = 1 << 16
"""Documents whose ends stay in the processor's cache, so that one search for all tokens is faster than one a row."""
_MOST_OPEN = 128
"""Caches that a process keeps open. Each has two memory maps, which hold two file descriptors."""


@dataclass
class Index:
    """The fields of index.json that are read."""

    key: str
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    tokens: int
    documents: int
    how: str = ""
    """how_tokenized, in hexadecimal."""
    files: list[tuple[str, int, int]] = field(default_factory=list)
    """(content, tokens, documents) of each source file, in order."""


class Tokens(ABC):
    """Tokens of documents one after another."""

    key: str
    """Hash of the documents and of how they became tokens."""
    vocab_size: int
    trained: np.ndarray | None = None
    """bool (num_tokens,): whether a token is a label in training; None if all tokens are."""

    @property
    @abstractmethod
    def num_tokens(self) -> int: ...

    @abstractmethod
    def tokens_at(self, places: np.ndarray) -> np.ndarray:
        """The tokens at places (n, S), int64. Places grow along each row. Raises ConfigError for damaged tokens."""

    @abstractmethod
    def documents_at(self, places: np.ndarray) -> np.ndarray:
        """The number of the document at each place, int64 (n, S). Places grow along each row."""


class MappedTokens(Tokens):
    """Tokens in memory-mapped files."""

    tokens: np.ndarray
    document_ends: np.ndarray
    """int64: end of each document, in tokens."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def verify(self, places: np.ndarray) -> None:
        """Verifies the tokens at these places before they are read, if there is something to compare them with."""

    def tokens_at(self, places: np.ndarray) -> np.ndarray:
        self.verify(places)
        return self.tokens[places].astype(np.int64)

    def documents_at(self, places: np.ndarray) -> np.ndarray:
        ends = self.document_ends
        if len(ends) < _FEW:
            return np.searchsorted(ends, places, side="right")
        edges = np.searchsorted(ends, places[:, [0, -1]], side="right")
        # A search among the few documents of a row touches no other page of the file.
        rows = zip(edges.tolist(), places, strict=True)
        return np.stack([low + np.searchsorted(ends[low:high], row, side="right") for (low, high), row in rows])


class TokenCache(MappedTokens):
    """A finished, memory-mapped cache. Raises ConfigError if a file has the wrong size.

    If the cache has hashes, each process verifies a block of tokens before its first read of that block.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = read_json_as(Index, folder / "index.json")
        token_size = np.dtype(index.dtype).itemsize
        for name, size in (("tokens.bin", token_size * index.tokens), ("documents.bin", 8 * index.documents)):
            if (found := (folder / name).stat().st_size) != size:
                raise ConfigError(f"{folder / name}: {found} bytes, not {size}: remove {folder} to tokenize again")
        self.key, self.vocab_size = index.key, index.vocab_size
        self.tokens = np.memmap(folder / "tokens.bin", dtype=index.dtype, mode="r")
        self.document_ends = np.memmap(folder / "documents.bin", dtype=np.int64, mode="r")
        blocks = -(-self.tokens.nbytes // BLOCK_BYTES)
        file = folder / "blocks.bin"
        hashes = np.fromfile(file, np.uint64) if file.exists() else np.empty(0, np.uint64)
        self._hashes = hashes if len(hashes) == blocks else None
        self._verified = np.zeros(blocks, dtype=bool)

    def verify(self, places: np.ndarray) -> None:
        """Verifies the blocks of the tokens at these places. Raises ConfigError if a block differs from its hash."""
        if self._hashes is None:
            return
        block_tokens = BLOCK_BYTES // self.tokens.itemsize
        numbers = places // block_tokens
        for number in np.unique(numbers[~self._verified[numbers]]).tolist():
            block = self.tokens[number * block_tokens : (number + 1) * block_tokens]
            if block_hash(block) != self._hashes[number]:
                raise ConfigError(f"{self.folder / 'tokens.bin'}: block {number} is damaged: remove {self.folder}")
            self._verified[number] = True

    def __reduce__(self) -> tuple[type["TokenCache"], tuple[Path]]:
        """Pickles only the folder: pickling a memory map would copy its content."""
        return TokenCache, (self.folder,)


@dataclass(frozen=True)
class Segment:
    """Consecutive documents of a cache, or of another file that `open` reads."""

    path: Path
    first_token: int
    tokens: int
    first_document: int
    documents: int
    open: Callable[[Path], Tokens] = TokenCache
    largest: tuple[int, ...] = ()
    """Largest id of a token file and the place of this token; empty for text."""


class JoinedTokens(Tokens):
    """The segments of a dataset one after another. Raises ConfigError as TokenCache does, when it reads a segment.

    Each row of places needs one search for its segments. Thousands of segments therefore cost little more than one.
    """

    def __init__(self, key: str, segments: Sequence[Segment], vocab_size: int) -> None:
        self.key, self.segments, self.vocab_size = key, segments, vocab_size
        self._starts = np.cumsum([0, *(each.tokens for each in segments)])
        self._documents = np.cumsum([0, *(each.documents for each in segments)])

    def __reduce__(self) -> tuple[type["JoinedTokens"], tuple[str, Sequence[Segment], int]]:
        return JoinedTokens, (self.key, self.segments, self.vocab_size)

    @property
    def num_tokens(self) -> int:
        return int(self._starts[-1])

    def tokens_at(self, places: np.ndarray) -> np.ndarray:
        found = np.empty(places.shape, np.int64)
        for row, part, number, own in self._runs(places):
            found[row, part] = self._open(number).tokens_at(own)[0]
        return found

    def documents_at(self, places: np.ndarray) -> np.ndarray:
        found = np.empty(places.shape, np.int64)
        for row, part, number, own in self._runs(places):
            before = self._documents[number] - self.segments[number].first_document
            found[row, part] = self._open(number).documents_at(own)[0] + before
        return found

    def _open(self, number: int) -> Tokens:
        return _opened(self.segments[number].open, self.segments[number].path)

    def _runs(self, places: np.ndarray) -> Iterator[tuple[int, slice, int, np.ndarray]]:
        """Yields the runs of each row that lie in one segment.

        Yields (row, part of the row, number of the segment, places (1, k) in the segment's cache).
        """
        edges = np.searchsorted(self._starts, places[:, [0, -1]], side="right") - 1
        for row, (first, last) in enumerate(edges.tolist()):
            ends = np.searchsorted(places[row], self._starts[first + 1 : last + 1]).tolist()
            for number, low, high in zip(range(first, last + 1), [0, *ends], [*ends, places.shape[1]], strict=True):
                if low < high:
                    own = places[row : row + 1, low:high] - self._starts[number] + self.segments[number].first_token
                    yield row, slice(low, high), number, own


@lru_cache(_MOST_OPEN)
def _opened(open_: Callable[[Path], Tokens], path: Path) -> Tokens:
    return open_(path)


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every token."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def block_hash(content: np.ndarray) -> int:
    """64-bit hash of a block."""
    return int.from_bytes(hashlib.blake2b(content.view(np.uint8).data, digest_size=8).digest(), "little")
