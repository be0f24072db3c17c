"""The global order: each epoch a permutation, the same at any number of ranks and workers, and after a resume."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from components.config import ConfigError, JobConfig
from components.data import PackedSequences, TokenCache
from components.data.cache import how_tokenized
from components.data.order import check_data_order, data_order, sequence_at
from tests.caches import cache_of, read, spec_of
from tests.limits import finish, wait_until
from tests.processes import ended, processes_of, start

# The order


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 64, 65, 1000, 4096, 4097, 100_003])
def test_every_epoch_is_a_permutation(size: int) -> None:
    order = sequence_at(np.arange(3 * size), size, seed=7).reshape(3, size)
    for epoch in order:
        assert np.array_equal(np.sort(epoch), np.arange(size))


@pytest.mark.parametrize("size", [17, 1000, 4097])
def test_epochs_and_seeds_differ(size: int) -> None:
    orders = [sequence_at(epoch * size + np.arange(size), size, seed) for seed in (0, 1, 2**63) for epoch in (0, 1, 2)]
    assert len({order.tobytes() for order in orders}) == 9


def test_a_resume_with_another_end_token_is_refused(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, tmp_path)
    keys = [how_tokenized(replace(spec, separator=each)).hexdigest() for each in ("auto", "<|end_of_text|>", "none")]
    order, same, other = ({"data_order": data_order(key, None, JobConfig()), "global_batch_size": 8} for key in keys)
    check_data_order(order, same, 8)
    with pytest.raises(ConfigError, match=r"the data \(files, tokenizer, training\.dataset_\*, .*\) was"):
        check_data_order(order, other, 8)


def test_neighbours_in_the_text_are_apart_in_the_order() -> None:
    order = sequence_at(np.arange(10_000), 10_000, seed=0)
    assert (np.abs(np.diff(order)) == 1).mean() < 0.001
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05


def test_a_position_says_the_same_alone_as_among_others() -> None:
    together = sequence_at(np.arange(300), 100, seed=3)
    assert [int(sequence_at(np.array([position]), 100, seed=3)[0]) for position in range(300)] == together.tolist()


# The loader


@pytest.fixture
def sequences(tmp_path: Path) -> PackedSequences:
    """29 sequences: no epoch ends with a step of 12."""
    return PackedSequences(cache_of(tmp_path / "cache", np.arange(29 * 8 + 1)), 8)


@pytest.mark.parametrize(("ranks", "local"), [(1, 12), (1, 4), (2, 3), (3, 2), (4, 1), (4, 3)])
def test_degrees_change_nothing_in_the_order(sequences: PackedSequences, ranks: int, local: int) -> None:
    expected = read(sequences, 8, 1)
    assert read(sequences, 8, ranks, local=local) == expected
    order = [digest for step in expected for digest in step]
    assert len(set(order[:29])) == 29, "ranks are disjoint, and together they are the global batch"
    assert set(order[29:58]) == set(order[:29])


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (1, 3), (2, 1)])
def test_workers_change_nothing_in_the_order(sequences: PackedSequences, ranks: int, workers: int) -> None:
    assert read(sequences, 8, ranks, local=2, num_workers=workers) == read(sequences, 8, 1)


def test_a_resume_at_other_degrees_and_workers_continues_the_order(sequences: PackedSequences) -> None:
    parts = [(2, 0), (3, 0), (1, 2), (4, 0), (1, 0)]
    expected = read(sequences, 10, 1)
    for number, (ranks, workers) in enumerate(parts):
        resumed = read(sequences, 2, ranks, 24 * number, num_workers=workers)
        assert resumed == expected[2 * number : 2 * number + 2]


def test_what_a_worker_is_sent_does_not_grow_with_the_data(tmp_path: Path) -> None:
    sequences = PackedSequences(cache_of(tmp_path, np.arange(1_000_000)), 8)
    sent = pickle.dumps(sequences)
    assert len(sent) < 10_000
    again = pickle.loads(sent)
    assert np.array_equal(again.get(np.array([3, 99_999]))[0], sequences.get(np.array([3, 99_999]))[0])


LOADING = """
import multiprocessing, os, signal, sys, time
from pathlib import Path

from components.config import DataLoader
from components.data import PackedSequences, TokenCache
from components.data.loader import GlobalOrder, build_loader

if __name__ == "__main__":
    asked = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: asked.append(number))
    sequences = PackedSequences(TokenCache(Path(sys.argv[1])), 8)
    batches = build_loader(GlobalOrder(sequences, 0, 2, 2), config=DataLoader(num_workers=2))
    next(batches)
    started = time.monotonic()
    ACTION
    print(f"{time.monotonic() - started:.1f}")
"""
SIGNALLED = """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.killpg(0, number)
    time.sleep(0.5)
    for _ in range(500):
        next(batches)
    assert len(asked) == 3
"""
KILLED = """
    (worker, _) = multiprocessing.active_children()
    try:
        worker.kill()
        for _ in range(10_000):
            next(batches)
    except RuntimeError as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler may raise the same error once more
        assert "DataLoader worker" in str(error), error
        print(f"{time.monotonic() - started:.1f}", flush=True)
        os._exit(0)
    sys.exit("not noticed")
"""


@pytest.mark.parametrize("action", [SIGNALLED, KILLED], ids=["signalled", "killed"])
def test_workers_outlive_signals_to_the_group_and_a_killed_one_is_an_error_soon(
    sequences: PackedSequences, tmp_path: Path, action: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOADING.replace("    ACTION\n", action))
    assert isinstance(sequences.cache, TokenCache)
    process = start(str(script), str(sequences.cache.folder))
    with ended(process):
        out, err = finish(process)
        assert process.returncode == 0, err
        assert float(out) < 60, "seconds to read on, or to notice"
        wait_until(lambda: not processes_of(process.pid))
