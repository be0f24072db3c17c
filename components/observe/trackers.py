"""Trackers beside metrics.jsonl, one row each in TRACKERS. None can end a run, nor make a step wait."""

import html
import importlib.util
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from components.config import ConfigError, JobConfig, load_config, mistake, to_dict
from components.config.environment import set_default

Row = dict[str, Any]
"""Scalars and texts of one step by name; "step" is among them."""
Writer = tuple[Callable[[Row], None], Callable[[], None]]
"""(function that writes a row, function that closes the tracker)."""
_LAST_SECONDS = 60.0
"""Time at the end of a run for rows that are not sent yet."""
_INIT_SECONDS = 30
"""Time for the server of Weights & Biases to answer at the start; rows wait meanwhile."""


class Tracker:
    """A writer in a thread of its own. After its first error it writes nothing more, and says so once."""

    def __init__(self, name: str, begin: Callable[[], Writer]) -> None:
        self.name = name
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(begin,), name=name, daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        self._rows.put(row)

    def close(self) -> None:
        """Waits for the last rows, but not for longer than _LAST_SECONDS."""
        self._rows.put(None)
        self._thread.join(_LAST_SECONDS)
        if self._thread.is_alive():
            self._say(f"did not end within {_LAST_SECONDS:.0f} s, and may lack rows")

    def _run(self, begin: Callable[[], Writer]) -> None:
        try:
            write, close = begin()
            while (row := self._rows.get()) is not None:
                write(row)
            close()
        except Exception as error:
            self._say(f"has stopped: {type(error).__name__}: {' '.join(str(error).split())}")

    def _say(self, what: str) -> None:
        print(f"{self.name} {what}; metrics.jsonl has every row", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Kind:
    """A kind of tracker."""

    title: str
    package: str
    """Name by which Python imports it."""
    begin: Callable[[Path, JobConfig, int], Writer]
    """(dump folder, job, last step of the checkpoint that the run continues or 0) -> the writer."""
    folder: str = ""
    """Folder inside of the dump folder into which it may write, if no key names it."""
    check: Callable[[], str] = lambda: ""
    """Reason why it would refuse the environment's settings; empty if it would not. Asks no server."""
    install: str = ""
    """Package to install, if its name is another."""


def trackers(config: JobConfig, step: int) -> list[Tracker]:
    """The trackers that the job asks for. step: the last step of the checkpoint that the run continues, or 0."""
    folder = Path(config.job.dump_folder)
    return [Tracker(kind.title, partial(kind.begin, folder, config, step)) for kind in enabled(config).values()]


def enabled(config: JobConfig) -> dict[str, Kind]:
    """Key -> kind of the trackers that the job asks for."""
    return {f"metrics.{name}": kind for name, kind in TRACKERS.items() if getattr(config.metrics, name)}


def check_trackers(config: JobConfig) -> None:
    """Raises ConfigError if a tracker is not installed, or would refuse the environment's settings; asks no server."""
    for key, kind in enabled(config).items():
        if importlib.util.find_spec(kind.package) is None:
            install = kind.install or kind.package
            raise ConfigError(mistake(config, key, f"{kind.package} is not installed; run `pip install {install}`"))
        if reason := kind.check():
            raise ConfigError(mistake(config, key, reason))


def _check_wandb() -> str:
    # In a process of its own, because wandb.setup starts a service, to which ranks would connect.
    done = subprocess.run([sys.executable, "-P", "-c", _CHECK], capture_output=True, text=True)
    if not done.returncode:
        return ""
    lines = [line.strip() for line in done.stdout.splitlines() if "errors.pydantic.dev" not in line]
    return ": ".join(lines) or done.stderr.strip()[-200:]


_CHECK = """
import os, sys
import wandb
try:
    settings = wandb.setup().settings
    key = "WANDB_IDENTITY_TOKEN_FILE" in os.environ or wandb.api.api_key
    try:
        from wandb.sdk.lib.wbauth import check_api_key
    except ImportError:  # its releases before 0.22 say it at the start of a run
        check_api_key = lambda key: None
    if isinstance(key, str) and (wrong := check_api_key(key)):
        raise ValueError(wrong)
except Exception as error:
    print(error)
    sys.exit(1)
if not key and settings.mode in ("online", "run", "shared"):
    print("no API key; set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline")
    sys.exit(1)
"""


def _tensorboard(folder: Path, config: JobConfig, step: int) -> Writer:
    from torch.utils.tensorboard import SummaryWriter

    events = folder / config.metrics.save_tb_folder
    writer = SummaryWriter(str(events), purge_step=step + 1 if step else None)

    def write(row: Row) -> None:
        for key, value in row.items():
            if isinstance(value, str):
                writer.add_text(key, value, row["step"])
            elif _is_number(key, value):
                writer.add_scalar(key, value, row["step"])

    return write, writer.close


def _known(folder: Path, name: str, step: int) -> tuple[Path, str | None]:
    """The file of a tracker's run, and what it names if this run continues another one."""
    file = folder / name
    return file, file.read_text().strip() if step and file.exists() else None


def _wandb(folder: Path, config: JobConfig, step: int) -> Writer:
    """A run whose id is kept in the dump folder, so that a resumed job continues the curve.

    If the server cannot be reached, the run is kept in the dump folder (offline).
    """
    import wandb

    file, known = _known(folder, "wandb_run_id", step)

    def begin(**how: Any) -> Any:
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "meshwright",
            entity=os.environ.get("WANDB_TEAM") or None,  # torchtitan's name of WANDB_ENTITY
            dir=str(folder),
            id=known,
            resume="allow" if known else None,
            notes=config.job.description,
            config=to_dict(config),
            **how,
        )

    try:
        seconds = int(os.environ.get("WANDB_INIT_TIMEOUT") or _INIT_SECONDS)
        run = begin(settings=wandb.Settings(init_timeout=seconds))
    except wandb.errors.CommError as error:
        print(f"Weights & Biases: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        run = begin(mode="offline")
        print(
            f"Weights & Biases is offline; afterwards: wandb sync {Path(run.dir).parent}", file=sys.stderr, flush=True
        )
    file.write_text(run.id)

    def shown(value: Any) -> Any:
        return wandb.Html(f"<p>{html.escape(value)}</p>") if isinstance(value, str) else value

    return lambda row: run.log({key: shown(row[key]) for key in row if key != "step"}, step=row["step"]), run.finish


def _mlflow(folder: Path, config: JobConfig, step: int) -> Writer:
    """A run whose id is kept in the dump folder, so that a resumed job continues it.

    Without MLFLOW_TRACKING_URI it is kept in mlruns in the dump folder.
    """
    set_default("MLFLOW_ALLOW_FILE_STORE", "true")  # newer releases refuse folders otherwise
    from mlflow.entities import Metric, Param
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").absolute().as_uri())
    file, known = _known(folder, "mlflow_run_id", step)
    if known:
        try:
            client.update_run(known, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            known = None
    run_id = known or _new_mlflow_run(client, config)
    file.write_text(run_id)
    if not known:
        settings = [Param(key, str(value)) for key, value in settings_of(config).items()]
        for first in range(0, len(settings), _MLFLOW_AT_ONCE):
            client.log_batch(run_id, params=settings[first : first + _MLFLOW_AT_ONCE])

    def write(row: Row) -> None:
        now = time.time_ns() // 1_000_000
        values = [Metric(key, value, now, row["step"]) for key, value in row.items() if _is_number(key, value)]
        for first in range(0, len(values), _MLFLOW_AT_ONCE):
            client.log_batch(run_id, metrics=values[first : first + _MLFLOW_AT_ONCE])

    return write, lambda: client.set_terminated(run_id)


_MLFLOW_AT_ONCE = 100
"""Maximum number of params of a request."""


def _new_mlflow_run(client: Any, config: JobConfig) -> str:
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "meshwright"
    found = client.get_experiment_by_name(name)
    experiment = found.experiment_id if found else client.create_experiment(name)
    run = client.create_run(experiment, tags={"mlflow.note.content": config.job.description})
    return str(run.info.run_id)


def settings_of(config: JobConfig) -> dict[str, Any]:
    """Key ("training.steps") -> value that differs from its default."""
    defaults = dict(_settings(to_dict(load_config([]))))
    return {key: value for key, value in _settings(to_dict(config)) if value != defaults.get(key)}


def _settings(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_number(key: str, value: Any) -> bool:
    return key != "step" and value is not None and not isinstance(value, str)


def _trackio(folder: Path, config: JobConfig, step: int) -> Writer:
    """A run whose name is kept in the dump folder, so that a resumed job continues it.

    Without TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL it is kept in trackio in the dump folder.
    """
    if not any(os.environ.get(name) for name in ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")):
        os.environ["TRACKIO_DIR"] = str((folder / "trackio").absolute())
    import trackio

    file, known = _known(folder, "trackio_run_name", step)
    name = known or f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(2)}"
    quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    project = os.environ.get("TRACKIO_PROJECT") or "meshwright"
    run = trackio.init(project=project, name=name, resume="allow", config=settings_of(config), **quiet)
    file.write_text(name)

    def write(row: Row) -> None:
        run.log({key: value for key, value in row.items() if _is_number(key, value)}, step=row["step"])

    return write, run.finish


TRACKERS: dict[str, Kind] = {
    "enable_tensorboard": Kind("TensorBoard", "tensorboard", _tensorboard),
    "enable_wandb": Kind("Weights & Biases", "wandb", _wandb, "wandb", _check_wandb),
    "enable_mlflow": Kind("MLflow", "mlflow", _mlflow, "mlruns", install="mlflow-skinny"),
    "enable_trackio": Kind("Trackio", "trackio", _trackio, "trackio"),
}
"""Key of the table [metrics] -> the tracker that it begins, in the order in which they begin."""
