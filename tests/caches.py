"""Token caches for tests: made from numbers or from text, and read back as documents, or as batches of a loader."""

import hashlib
import json
from itertools import islice
from pathlib import Path

import numpy as np
from torch import Tensor

from components.config import ROOT, DataLoader
from components.data import DataSpec, PackedSequences, TokenCache, prepare
from components.data.loader import GlobalOrder, build_loader
from components.data.tokenizer import load_tokenizer

TOKENIZER = str(ROOT / "assets" / "tokenizer")
WORDS = "In the beginning God created the heaven and the earth. "


def cache_of(folder: Path, tokens: np.ndarray, document_ends: list[int] | None = None) -> TokenCache:
    """A token cache with these tokens, written as prepare writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = np.asarray(document_ends or [len(tokens)], dtype=np.int64)
    tokens.astype(np.uint32).tofile(folder / "tokens.bin")
    ends.tofile(folder / "documents.bin")
    index = {"key": "k", "dtype": "uint32", "vocab_size": 1 << 20, "tokens": len(tokens), "documents": len(ends)}
    (folder / "index.json").write_text(json.dumps(index))
    return TokenCache(folder)


def prepared(spec: DataSpec, workers: int = 1) -> TokenCache:
    """The one cache of small data."""
    cache = prepare(spec, workers)
    assert isinstance(cache, TokenCache)
    return cache


def spec_of(
    path: Path | str, cache: Path, *, field: str = "text", skip: bool = False, tokenizer: str = TOKENIZER
) -> DataSpec:
    return DataSpec(str(path), field, skip, tokenizer, cache)


def documents_of(cache: TokenCache, tokenizer_path: str = TOKENIZER) -> list[str]:
    """The texts in a cache, decoded, without the tokens that stand around them."""
    tokenizer = load_tokenizer(tokenizer_path)
    around = {tokenizer.bos_id, tokenizer.eos_id}
    parts = np.split(np.asarray(cache.tokens), cache.document_ends[:-1])
    return [tokenizer.decode([token for token in part.tolist() if token not in around]) for part in parts]


def caches_in(folder: Path) -> list[Path]:
    return [file.parent for file in folder.glob("[!.]*/index.json")]


def digests(batch: dict[str, Tensor]) -> list[str]:
    """A hash of tokens and labels of each sequence."""
    rows = zip(batch["tokens"].numpy(), batch["labels"].numpy())
    return [hashlib.sha1(tokens.tobytes() + labels.tobytes()).hexdigest() for tokens, labels in rows]


def read(
    sequences: PackedSequences, steps: int, ranks: int, consumed: int = 0, local: int = 1, num_workers: int = 0
) -> list[list[str]]:
    """The digests of each step's global batch of 12, in the order of ranks."""
    of_ranks = []
    for rank in range(ranks):
        order = GlobalOrder(sequences, 5, 12, local, rank, ranks, consumed)
        loader = build_loader(order, config=DataLoader(num_workers=num_workers))
        batches = islice(loader, steps * 12 // (ranks * local))
        of_ranks.append(np.array([digest for batch in batches for digest in digests(batch)]).reshape(steps, -1))
    return np.concatenate(of_ranks, axis=1).tolist()
