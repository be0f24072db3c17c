"""Packing: sequences of the token stream, what is held out of it, document ids, and batches for validation."""

import os
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from components.config import ConfigError
from components.data import PackedSequences
from components.data.loader import IGNORED, GlobalOrder, build_loader, validation_batches
from tests.caches import cache_of
from tests.harness import observe


@pytest.mark.parametrize("seq_len", [1, 3, 16, 100])
@pytest.mark.parametrize("part", ["all", "train", "validation"])
def test_sequences_overlap_by_one_token(
    tmp_path: Path, seq_len: int, part: Literal["all", "train", "validation"]
) -> None:
    sequences = PackedSequences(cache_of(tmp_path, np.arange(5003)), seq_len, part, 0.05)
    tokens, _ = sequences.get(np.arange(len(sequences)))
    assert tokens.shape == ((sequences.num_tokens - 1) // seq_len, seq_len + 1)
    assert np.array_equal(tokens[1:, 0], tokens[:-1, -1])
    joined = np.append(tokens[:, :-1].ravel(), tokens[-1, -1])
    assert np.array_equal(joined, np.unique(joined)), "each token of the stream once, in order"
    assert sequences.num_tokens - len(joined) < seq_len


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3, 0.9])
@pytest.mark.parametrize("size", [30, 101, 999, 5000, 81_919, 83_968, 86_000, 90_000, 200_001])
def test_held_out_and_trained_on_divide_the_stream(tmp_path: Path, size: int, fraction: float) -> None:
    cache = cache_of(tmp_path, np.arange(size))
    divided = []
    for seq_len in (1, 7):
        parts: list[Literal["train", "validation"]] = ["train", "validation"]
        try:
            train, held_out = (PackedSequences(cache, seq_len, part, fraction) for part in parts)
        except ConfigError:
            assert size * fraction < 20 or size * (1 - fraction) < 20, "enough text for both"
            continue
        assert train.num_tokens + held_out.num_tokens == size
        assert held_out.num_tokens == pytest.approx(size * fraction, rel=0.3, abs=5)
        divided.append((train.num_tokens, held_out.num_tokens))
        # With one token a sequence, nothing is left over at the end.
        if seq_len == 1:
            seen = [np.append(part.get(np.arange(len(part)))[0][:, 0], -1) for part in (train, held_out)]
            seen[0][-1], seen[1][-1] = (part.get(np.array([len(part) - 1]))[0][0, 1] for part in (train, held_out))
            assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(size))
    assert len(set(divided)) <= 1, "how the stream is divided does not depend on seq_len"


def test_a_stream_may_end_inside_a_held_out_block(tmp_path: Path) -> None:
    period, start = 81_920, (81_920 - 4096) // 2
    cache = cache_of(tmp_path, np.arange(10 * period + start + 100))
    held_out = PackedSequences(cache, 99, "validation", 0.05)
    assert held_out.num_tokens == 10 * 4096 + 100
    last, _ = held_out.get(np.array([len(held_out) - 1]))
    assert 10 * period + start < last.max() < len(cache.tokens)
    assert PackedSequences(cache, 1, "train", 0.05).num_tokens == 10 * (period - 4096) + start


def test_document_ids_count_the_documents_begun_in_a_sequence(tmp_path: Path) -> None:
    sequences = PackedSequences(cache_of(tmp_path, np.arange(13), [1, 4, 4, 8, 13]), 4)
    tokens, ids = sequences.get(np.arange(3))
    assert tokens[:, :-1].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert ids.tolist() == [[0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert PackedSequences(sequences.cache, 12).get(np.array([0]))[1][0].tolist() == [0, 1, 1, 1, *[2] * 4, *[3] * 4]


def test_a_new_document_begins_where_two_parts_are_joined(tmp_path: Path) -> None:
    # Held out are 4096 tokens from 18,432 on in each 40,960. One document ends just there, one inside, one far away.
    cache = cache_of(tmp_path, np.arange(409_600), [100, 18_432, 20_000, 409_600])
    sequences = PackedSequences(cache, 60, "train", 0.1)
    tokens, ids = sequences.get(np.arange(len(sequences)))
    begun = np.diff(ids, axis=1)
    joins = np.diff(tokens[:, :-1], axis=1) > 1
    assert joins.sum() >= 8
    assert (begun[joins] == 1).all()
    assert begun.sum() == joins.sum() + 1
    assert (ids[:, 0] == 0).all()


def test_labels_are_tokens_shifted_and_all_are_int64(tmp_path: Path) -> None:
    sequences = PackedSequences(cache_of(tmp_path, np.arange(1000)), 9)
    batch = next(build_loader(GlobalOrder(sequences, 0, 4, 4)))
    assert list(batch) == ["tokens", "labels", "positions"]
    assert {(tuple(value.shape), str(value.dtype)) for value in batch.values()} == {((4, 9), "torch.int64")}
    assert (batch["labels"] == batch["tokens"] + 1).all()
    assert (batch["positions"] == batch["positions"].new_tensor(range(9))).all()


@pytest.mark.parametrize("seq_len", [1000, 10**9])
def test_too_few_tokens_are_told(tmp_path: Path, seq_len: int) -> None:
    with pytest.raises(ConfigError, match=f"1000 tokens do not fill one sequence of {seq_len}"):
        PackedSequences(cache_of(tmp_path, np.arange(1000)), seq_len)
    with pytest.raises(ConfigError, match="tokens for validation do not fill"):
        PackedSequences(cache_of(tmp_path, np.arange(1000)), 100, "validation", 0.05)


@pytest.mark.parametrize(("size", "local", "ranks"), [(1, 1, 1), (7, 2, 3), (12, 2, 3), (13, 4, 4), (5, 8, 2)])
def test_validation_sees_every_sequence_once(tmp_path: Path, size: int, local: int, ranks: int) -> None:
    sequences = PackedSequences(cache_of(tmp_path, np.arange(size * 3 + 1)), 3)
    batches = [list(validation_batches(sequences, local, rank, ranks, size + 99)) for rank in range(ranks)]
    assert len({len(of_rank) for of_rank in batches}) == 1
    rows = [
        (tokens.tolist(), labels.tolist())
        for of_all_ranks in zip(*batches)
        for batch in of_all_ranks
        for tokens, labels in zip(batch["tokens"], batch["labels"])
    ]
    padding = [labels for _, labels in rows[size:]]
    assert [tokens[0] for tokens, _ in rows[:size]] == list(range(0, 3 * size, 3))
    assert all(labels == [token + 1 for token in tokens] for tokens, labels in rows[:size])
    assert padding == [[IGNORED] * 3] * len(padding)
    few = [batch for rank in range(ranks) for batch in validation_batches(sequences, local, rank, ranks, 1)]
    assert sum(int((batch["labels"] != IGNORED).sum()) for batch in few) == 3


def _on_a_node_of_its_own(folder: Path) -> None:
    os.environ["LOCAL_RANK"] = "0"
    os.environ["HOME"] = str(folder / os.environ["RANK"])


@pytest.mark.parametrize("streamed", [False, True])
def test_nodes_with_other_files_are_told(streamed: bool, tmp_path: Path) -> None:
    for rank, text in enumerate(("In the beginning " * 2000, "And the earth was " * 2000)):
        (tmp_path / str(rank) / "data").mkdir(parents=True)
        (tmp_path / str(rank) / "data" / "a.txt").write_text(text)
    words = ["--training.dataset_path", "~/data", "--training.dataset_cache", str(tmp_path / "cache")]
    words += ["--training.dataset_streaming"] * streamed
    layout = ("--parallelism.data_parallel_shard_degree", "2", "--training.local_batch_size", "18")
    with pytest.raises(RuntimeError, match="/data: ranks 1 have found other data than rank 0"):
        observe(*words, *layout, ranks=2, steps=1, mutate=partial(_on_a_node_of_its_own, tmp_path))
