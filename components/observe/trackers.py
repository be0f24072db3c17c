"""Weights & Biases and TensorBoard, beside metrics.jsonl. Neither can end a run, nor make a step wait."""

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.config import ConfigError, JobConfig, mistake, to_dict

Row = dict[str, Any]
"""Scalars of one step by name; "step" is among them."""
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


def trackers(config: JobConfig, step: int) -> list[Tracker]:
    """The trackers that the job asks for. step: the last step of the checkpoint that the run continues, or 0."""
    folder, found = Path(config.job.dump_folder), []
    if config.metrics.enable_tensorboard:
        found.append(Tracker("TensorBoard", lambda: _tensorboard(folder / config.metrics.save_tb_folder, step)))
    if config.metrics.enable_wandb:
        found.append(Tracker("Weights & Biases", lambda: _wandb(folder, config, step)))
    return found


def check_wandb(config: JobConfig) -> None:
    """Raises ConfigError if Weights & Biases would refuse the environment's settings or has no key; asks no server."""
    if not config.metrics.enable_wandb:
        return
    # In a process of its own, because wandb.setup starts a service, to which ranks would connect.
    done = subprocess.run([sys.executable, "-P", "-c", _CHECK], capture_output=True, text=True)
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if "errors.pydantic.dev" not in line]
        raise ConfigError(mistake(config, "metrics.enable_wandb", ": ".join(lines) or done.stderr.strip()[-200:]))


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


def _tensorboard(folder: Path, step: int) -> Writer:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def write(row: Row) -> None:
        for key, value in row.items():
            if key != "step" and value is not None:
                writer.add_scalar(key, value, row["step"])

    return write, writer.close


def _wandb(folder: Path, config: JobConfig, step: int) -> Writer:
    """A run whose id is kept in the dump folder, so that a resumed job continues the curve.

    If the server cannot be reached, the run is kept in the dump folder (offline).
    """
    import wandb

    file = folder / "wandb_run_id"
    known = file.read_text().strip() if step and file.exists() else None

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
    return lambda row: run.log({key: row[key] for key in row if key != "step"}, step=row["step"]), run.finish
