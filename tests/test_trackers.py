"""Trackers end no run and hold none up; what they would refuse is refused before the start."""

import importlib.util
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from components.config import ConfigError, load_config
from components.observe import trackers as module
from components.observe.trackers import TRACKERS, Row, Tracker, Writer, check_trackers, settings_of, trackers
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
    check_trackers(load_config([]))
    with pytest.raises(ConfigError, match=r"metrics.enable_wandb = true: ") as caught:
        check_trackers(load_config(["--metrics.enable_wandb"]))
    assert reason in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_is_refused_with_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, kind = load_config([f"--metrics.{name}"]), TRACKERS[name]
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    install = "mlflow-skinny" if name == "enable_mlflow" else kind.package
    reason = f"metrics.{name} = true: {kind.package} is not installed; run `pip install {install}`"
    with pytest.raises(ConfigError, match=reason):
        check_trackers(config)
    check_trackers(load_config([]))


def test_settings_are_those_that_differ_from_their_defaults() -> None:
    assert settings_of(load_config(["--training.seq_len", "64", "--optimizer.matrix.lr_factor", "2"])) == {
        "training.seq_len": 64,
        "optimizer.matrix.lr_factor": 2.0,
    }


def write_twice(folder: Path, name: str) -> None:
    """A run of steps 1 to 3, and its continuation."""
    words = ["--job.dump_folder", str(folder), f"--metrics.{name}", "--training.steps", "9"]
    for begun, steps in ((0, (1, 2, 3)), (3, (4, 5))):
        (tracker,) = trackers(load_config(words), begun)
        for step in steps:
            tracker.write({"step": step, "loss": 1.5 * step, "lr": 1e-3, "mfu": None})
        tracker.close()


def test_mlflow_has_every_row_and_a_resumed_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    write_twice(tmp_path, "enable_mlflow")
    assert "has stopped" not in capsys.readouterr().err
    client = tracking.MlflowClient((tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("meshwright")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == (tmp_path / "mlflow_run_id").read_text()
    assert run.info.status == "FINISHED"
    assert run.data.params["training.steps"] == "9"
    assert [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "loss")] == [
        (step, 1.5 * step) for step in range(1, 6)
    ]
    assert "mfu" not in run.data.metrics


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="not installed")  # an import takes its folder
def test_trackio_has_every_row_and_a_resumed_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sqlite3

    for variable in ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(variable, raising=False)
    write_twice(tmp_path, "enable_trackio")
    assert "has stopped" not in capsys.readouterr().err
    with sqlite3.connect(tmp_path / "trackio" / "meshwright.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert {name for name, _, _ in rows} == {(tmp_path / "trackio_run_name").read_text()}
    assert [step for _, step, _ in rows] == [1, 2, 3, 4, 5]
    assert json.loads(rows[-1][2])["loss"] == 7.5


class FakeMlflow:
    """Stands for mlflow's client: what a run of it was told."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    runs: ClassVar[dict[str, list[Any]]] = {}
    error_code = "RESOURCE_DOES_NOT_EXIST"

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=name)

    def create_run(self, experiment: str, tags: dict[str, str]) -> Any:
        self.runs[f"{self.uri} {len(self.runs)}"] = []
        return SimpleNamespace(info=SimpleNamespace(run_id=list(self.runs)[-1]))

    def update_run(self, run_id: str, status: str) -> None:
        if run_id not in self.runs:
            raise FakeError(self.error_code)

    def log_batch(self, run_id: str, metrics: tuple[Any, ...] = (), params: tuple[Any, ...] = ()) -> None:
        assert len(params) <= 100
        self.runs[run_id] += [(each[0], each[1], each[3]) for each in metrics]

    def set_terminated(self, run_id: str) -> None:
        self.runs[run_id].append("ended")


class FakeError(Exception):
    """Stands for MlflowException."""

    def __init__(self, error_code: str) -> None:
        super().__init__(error_code)
        self.error_code = error_code


def test_a_run_that_the_server_does_not_know_begins_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And any other error of the server stops the tracker, not the run."""
    entities = SimpleNamespace(Metric=lambda *given: given, Param=lambda *given: given)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", SimpleNamespace(MlflowException=FakeError))
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=FakeMlflow))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server")
    write_twice(tmp_path, "enable_mlflow")
    assert [*FakeMlflow.runs] == ["http://server 0"]
    assert FakeMlflow.runs["http://server 0"].count("ended") == 2
    FakeMlflow.runs.clear()
    write_twice(tmp_path, "enable_mlflow")
    (tmp_path / "mlflow_run_id").write_text("forgotten")
    (tracker,) = trackers(load_config(["--job.dump_folder", str(tmp_path), "--metrics.enable_mlflow"]), 5)
    tracker.close()
    assert [*FakeMlflow.runs] == ["http://server 0", "http://server 1"]
    monkeypatch.setattr(FakeMlflow, "error_code", "PERMISSION_DENIED")
    (tmp_path / "mlflow_run_id").write_text("secret")
    (tracker,) = trackers(load_config(["--job.dump_folder", str(tmp_path), "--metrics.enable_mlflow"]), 5)
    tracker.close()
    assert "MLflow has stopped: FakeError: PERMISSION_DENIED" in capsys.readouterr().err
