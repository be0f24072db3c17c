"""Weights & Biases and TensorBoard end no run and hold none up; what they would refuse is refused before the start."""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.config import ConfigError, load_config
from components.observe import trackers as module
from components.observe.trackers import Row, Tracker, Writer, check_wandb, trackers
from tests.processes import small_disk


def fail(*_: Any) -> Any:
    raise RuntimeError("no\n  server")


@pytest.mark.parametrize("begin", [fail, lambda: (fail, lambda: None), lambda: (lambda row: None, fail)])
def test_the_first_error_of_a_tracker_is_said_once(
    begin: Callable[[], Writer], capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker("Tracker", begin)
    for step in range(3):
        tracker.write({"step": step})
    tracker.close()
    expected = "Tracker has stopped: RuntimeError: no server; metrics.jsonl has every row\n"
    assert capsys.readouterr().err == expected


def test_a_tracker_that_hangs_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_LAST_SECONDS", 0.1)
    answers = threading.Event()

    def wait(row: Row) -> None:
        answers.wait(600)

    tracker = Tracker("Tracker", lambda: (wait, lambda: None))
    started = time.monotonic()
    for step in range(100):
        tracker.write({"step": step})
    tracker.close()
    assert time.monotonic() - started < 60
    assert capsys.readouterr().err.startswith("Tracker did not end within 0 s, and may lack rows")
    answers.set()


class FakeRun:
    """Stands for wandb's run."""

    def __init__(self, folder: Path) -> None:
        self.id, self.dir, self.rows = "abc", str(folder / "wandb/offline-run-abc/files"), list[tuple[int, Row]]()

    def log(self, row: Row, step: int) -> None:
        self.rows.append((step, row))

    def finish(self) -> None:
        self.rows.append((0, {}))


def test_without_its_server_a_run_of_weights_and_biases_is_kept_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class CommError(Exception):
        pass

    run, asked = FakeRun(tmp_path), list[str]()

    def init(mode: str = "online", **_: Any) -> FakeRun:
        asked.append(mode)
        if mode == "online":
            raise CommError("connection refused")
        return run

    fake = SimpleNamespace(init=init, Settings=dict, errors=SimpleNamespace(CommError=CommError))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    words = ["--job.dump_folder", str(tmp_path), "--metrics.enable_wandb"]
    (tracker,) = trackers(load_config(words), 0)
    tracker.write({"step": 3, "loss": 1.0})
    tracker.close()
    assert asked == ["online", "offline"]
    assert run.rows == [(3, {"loss": 1.0}), (0, {})]
    assert (tmp_path / "wandb_run_id").read_text() == "abc"
    said = capsys.readouterr().err
    assert "connection refused" in said
    assert f"afterwards: wandb sync {tmp_path / 'wandb/offline-run-abc'}" in said


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_events_of_a_full_disk_are_lost_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", "16k") as disk:
        words = ["--job.dump_folder", str(disk), "--metrics.enable_tensorboard"]
        (tracker,) = trackers(load_config(words), 0)
        for step in range(3000):
            tracker.write({"step": step, "loss": 1.0})
        tracker.close()
    assert "TensorBoard has stopped: OSError: [Errno 28] No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("WANDB_MODE", "online", "no API key; set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline"),
        ("WANDB_MODE", "on", "Input should be 'online', 'offline'"),
        ("WANDB_API_KEY", "short", "API key must have 40"),
    ],
)
def test_a_missing_key_and_a_bad_mode_are_refused_before_the_start(
    name: str, value: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv(name, value)
    check_wandb(load_config([]))
    with pytest.raises(ConfigError, match=r"metrics.enable_wandb = true: ") as caught:
        check_wandb(load_config(["--metrics.enable_wandb"]))
    assert reason in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
