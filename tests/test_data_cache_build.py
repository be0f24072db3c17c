"""Processes that build a cache: killed, interrupted, two at once, and data that changes while it is read."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.caches import TOKENIZER, WORDS, caches_in, documents_of, prepared, spec_of
from tests.limits import finish, wait_until
from tests.processes import ended, processes_of, start

PREPARE = """
import signal, sys
from pathlib import Path
from components.config import ConfigError
from components.data import DataSpec, prepare
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if the tests run in the background of a script
DataSpec.cache_bytes = int(sys.argv[4])
try:
    prepare(DataSpec(sys.argv[1], "text", False, sys.argv[3], Path(sys.argv[2])), 1)
except ConfigError as error:
    sys.exit(str(error))
"""


def start_prepare(data: Path, cache: Path, cache_bytes: int = 1 << 30) -> subprocess.Popen[str]:
    return start("-c", PREPARE, str(data), str(cache), TOKENIZER, str(cache_bytes))


@contextmanager
def half_built(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path, Path]]:
    """A process stopped in the middle of making a cache, the data and the cache folder."""
    data, cache = tmp_path / "big.txt", tmp_path / "cache"
    data.write_text(WORDS * 80_000)
    process = start_prepare(data, cache)
    with ended(process):
        wait_until(lambda: any(file.stat().st_size for file in cache.glob(".staging-*/tokens.bin")))
        process.send_signal(signal.SIGSTOP)
        assert not caches_in(cache), "too late to stop it"
        yield process, data, cache


def test_a_killed_build_leaves_no_cache_and_no_process(tmp_path: Path) -> None:
    with half_built(tmp_path) as (process, data, cache):
        assert len(processes_of(process.pid)) >= 3
        process.kill()
        wait_until(lambda: not processes_of(process.pid))
        assert not caches_in(cache)
        assert list(cache.glob(".staging-*"))
        assert documents_of(prepared(spec_of(data, cache), 2)) == [data.read_text()]
        assert not list(cache.glob(".staging-*"))


def test_an_interrupted_build_cleans_up(tmp_path: Path) -> None:
    with half_built(tmp_path) as (process, _, cache):
        os.killpg(process.pid, signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        _, error = finish(process)
        assert process.returncode
        assert error.count("\nKeyboardInterrupt") == 1, "workers leave it to the parent"
        assert not caches_in(cache)
        assert not list(cache.glob(".staging-*"))
        wait_until(lambda: not processes_of(process.pid))


def test_a_killed_worker_ends_the_build(tmp_path: Path) -> None:
    with half_built(tmp_path) as (process, _, cache):
        os.kill(processes_of(process.pid)[-1], signal.SIGKILL)
        process.send_signal(signal.SIGCONT)
        _, error = finish(process)
        assert "BrokenProcessPool" in error
        assert not caches_in(cache)
        wait_until(lambda: not processes_of(process.pid))


def test_data_that_changes_while_it_is_read_makes_no_cache(tmp_path: Path) -> None:
    with half_built(tmp_path) as (process, data, cache):
        with data.open("a") as file:
            file.write("more")
        process.send_signal(signal.SIGCONT)
        _, error = finish(process)
        assert "big.txt: changed while it was read" in error
        assert not caches_in(cache)


def test_a_build_under_way_holds_up_no_other_data(tmp_path: Path) -> None:
    with half_built(tmp_path) as (process, _, cache):
        (tmp_path / "small.txt").write_text(WORDS)
        small = start_prepare(tmp_path / "small.txt", cache)
        finish(small)
        assert small.returncode == 0
        assert process.poll() is None
        assert len(caches_in(cache)) == 1


def test_two_processes_at_once_tokenize_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(WORDS * 10_000)
    processes = [start_prepare(tmp_path / "a.txt", tmp_path / "cache") for _ in range(2)]
    printed = [finish(process)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(text[:9] for text in printed) == ["", "tokenized"]
    assert len(caches_in(tmp_path / "cache")) == 1
