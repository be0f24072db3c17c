"""Locks of files, with flock and without: the holder is named, and a process that has ended holds nothing."""

import errno
import fcntl
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from components.commands import start
from components.config import ROOT, ConfigError, load_config
from components.config.files import sample
from components.data.cache import hashes_of
from components.launch import environment, locks, ranks
from components.launch.locks import RUN_LOCK, free_lock_of_dead, holder, is_held, keep_lock, locked
from components.launch.settings import read_settings
from components.observe.metrics import lock_folder

HOLD = """
import fcntl, os, sys
from pathlib import Path
from components.launch.locks import end_process, keep_lock
number = int(sys.argv[2])
def refuse(*_):
    raise OSError(number, os.strerror(number))
if number:
    fcntl.flock = refuse
assert keep_lock(Path(sys.argv[1]))
print("held", flush=True)
if sys.stdin.readline() == "end_process\\n":
    end_process(0)
"""
FLOCK = 0
KINDS = pytest.mark.parametrize("number", [FLOCK, errno.ENOSYS])


def without_flock(patch: pytest.MonkeyPatch, number: int = errno.ENOSYS) -> None:
    """As on a file system that has none."""

    def flock(*_: object) -> None:
        raise OSError(number, "no flock here")

    if number:
        patch.setattr(fcntl, "flock", flock)


@pytest.fixture(autouse=True)
def _own_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_kept", [])


def hold(file: Path, number: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(file), str(number)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert process.stdout
    assert process.stdout.readline() == "held\n", process.communicate()
    return process


@KINDS
@pytest.mark.parametrize("end", ["\n", "end_process\n", "kill"])
def test_a_lock_is_held_by_the_living_alone(
    number: int, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / ".lock"
    process = hold(file, number)
    without_flock(monkeypatch, number)
    assert keep_lock(file) is None
    assert is_held(file)
    expected = f"process {process.pid} on {socket.gethostname()} has it since {time.strftime('%Y-')}"
    assert holder(file).startswith(expected)
    assert holder(file).endswith(f"; if that process has ended, remove {file}") == (number != FLOCK)
    if end == "kill":
        process.kill()
        process.communicate()
        free_lock_of_dead(file)
    else:
        process.communicate(end)
    assert not is_held(file)
    if number:
        assert list(tmp_path.iterdir()) == [], "another host could not know that the process has ended"
    assert keep_lock(file)


def test_a_process_of_the_same_host_takes_over_from_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = hold(tmp_path / ".lock", errno.ENOSYS)
    process.kill()
    process.communicate()
    without_flock(monkeypatch)
    assert keep_lock(tmp_path / ".lock")


def test_the_launcher_removes_the_lock_of_a_killed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = hold(tmp_path / RUN_LOCK, errno.ENOSYS)
    without_flock(monkeypatch)

    def run_ranks(*_: object) -> int:
        process.kill()
        process.communicate()
        return 1

    monkeypatch.setattr(ranks, "run_ranks", run_ranks)
    config = load_config(["--job.dump_folder", str(tmp_path)])
    assert start.start(config, read_settings(config, {}), "", []) == 1
    assert not (tmp_path / RUN_LOCK).exists()


@pytest.mark.parametrize(("text", "who"), [("7\nelsewhere\n", "process 7 on elsewhere"), ("", "an unknown process")])
def test_who_waits_for_another_host_is_told_what_to_do(
    text: str, who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_flock(monkeypatch)
    monkeypatch.setattr(locks, "_SILENT_SECONDS", 0.1)
    file = tmp_path / ".lock"
    file.write_text(text)
    said: list[str] = []

    def remove() -> None:
        while not said:
            said.extend(capsys.readouterr().err.splitlines())
            time.sleep(0.01)
        file.unlink()

    thread = threading.Thread(target=remove)
    thread.start()
    with locked(file, "tokenize a.txt"):
        thread.join()
        assert is_held(file)
    assert said[0].startswith(f"waiting for 0 s to tokenize a.txt: {who} has it since 20")
    assert said[0].endswith(f"; if that process has ended, remove {file}")
    assert not file.exists()


@KINDS
def test_a_dump_folder_says_whose_it_is(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(["--job.dump_folder", str(tmp_path / "run")])
    (tmp_path / "run").mkdir()
    process = hold(tmp_path / "run/.lock", number)
    without_flock(monkeypatch, number)
    with pytest.raises(ConfigError, match=rf"another run is writing into it: process {process.pid} on .* since 20"):
        lock_folder(config, 0)
    process.communicate("\n")
    lock_folder(config, 0)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_text_is_hashed_with_no_lock_left(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_flock(monkeypatch, number)
    (tmp_path / "a.txt").write_text("a")
    assert len(hashes_of(tmp_path, [tmp_path / "a.txt"], sample)) == 1
    assert {file.name for file in tmp_path.iterdir()} == {"a.txt", "hashes.json"}


def test_two_first_runs_make_one_environment_without_flock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_flock(monkeypatch)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    order: list[str] = []

    def second() -> None:
        with environment._lock():
            order.append("second")

    with environment._lock():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.3)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    file = tmp_path / ".cache/environment.held"
    assert f"which makes .venv; if it has ended, remove {file}" in capsys.readouterr().out
    assert not file.exists()
