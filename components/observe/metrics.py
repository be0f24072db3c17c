"""Outputs of a run: metrics.jsonl, run.json, the console line, loss.png."""

import contextlib
import json
import math
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from components.config import ROOT, ConfigError, JobConfig, absolute_tables, mistake
from components.config.files import replace
from components.launch.locks import RUN_LOCK, holder, keep_lock
from components.observe.report import draw_loss, read_rows
from components.observe.trackers import Row, Tracker, trackers

# Dense bfloat16 FLOP/s by CUDA's device name, from the makers' data sheets. Other devices get no MFU.
PEAK_FLOPS = {
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "A100": 312e12,
    "L40S": 362e12,
}


def peak_flops(device_name: str) -> float | None:
    """The value of the first name in PEAK_FLOPS that the device's name contains as whole words."""
    return next((peak for name, peak in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


class Metrics:
    """Writes a row for each logged step. Only rank 0 writes; on other ranks every method does nothing."""

    def __init__(
        self, config: JobConfig, rank: int, device: torch.device, flops_per_token: tuple[int, int], layout: str
    ) -> None:
        self.config, self.device, self.flops_per_token = config, device, flops_per_token
        self.folder = Path(config.job.dump_folder)
        self.rank = rank
        self.peak = None if config.comm.share_gpus else peak_flops(_device_name(device))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.trackers: list[Tracker] = []
        self.rows = self.folder / "metrics.jsonl"
        self.started = self.last_time = time.perf_counter()
        self.last_step = self.last_tokens = self.first_step = 0
        self.torn = self.told = False
        if rank == 0:
            self._write_run(layout)

    def resume(self, step: int, tokens: int) -> None:
        """Continue after this step. An earlier run's rows of later steps are dropped, because those steps run again."""
        self.last_step, self.last_tokens, self.first_step = step, tokens, step
        self.started = self.last_time = time.perf_counter()
        if self.rank:
            return
        with self._refusing():
            if not step and self.rows.exists():  # the rows are another run's
                self.rows.replace(self.folder / f"metrics-until-{time.strftime('%Y-%m-%d_%H-%M-%S')}.jsonl")
            rows = read_rows(self.rows)
            replace(self.rows, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))
        self.trackers = trackers(self.config, step)

    def log(self, step: int, tokens: int, **values: Any) -> None:
        """Write the row of a training step; tokens: seen so far; values: loss, grad_norm, lr and others."""
        if self.rank:
            return
        row: Row = {"step": step, **values, "tokens": tokens}
        for name, number in NUMBERS.items():
            row[name] = number(self, row)
        self._write(row)
        steps = self.config.training.steps
        eta = (steps - step) * (time.perf_counter() - self.last_time) / max(1, step - self.last_step)
        parts = [
            f"step {step:>{len(str(steps))}}/{steps}",
            f"loss {values['loss']:.4f}",
            f"grad norm {values['grad_norm']:.3f}",
            f"lr {values['lr']:.2e}",
            f"{row['tokens_per_second']:,.0f} tokens/s",
            *([f"mfu {row['mfu']:.1%}"] if row["mfu"] else []),
            f"{row['memory_gib']:.2f} GiB",
            f"eta {_duration(eta)}",
        ]
        if skipped := values.get("skipped_steps"):
            parts.append(f"{skipped:.0f} steps skipped")
        self._print("  ".join(parts), colour="36")
        self.restart_clock(step, tokens)

    def tokens_per_second(self, row: Row) -> float:
        """Speed since the previous row, without validation and saving."""
        return (row["tokens"] - self.last_tokens) / (time.perf_counter() - self.last_time)

    def mfu(self, row: Row, flops_per_token: int) -> float | None:
        """Fraction of all ranks' peak FLOP/s at this many FLOPs a token; None on an unknown device."""
        return flops_per_token * row["tokens_per_second"] / (self.peak * self.world_size) if self.peak else None

    def log_validation(self, step: int, loss: float, tokens: int, by_source: dict[str, float] | None = None) -> None:
        """Write the row of a validation."""
        if self.rank:
            return
        row: Row = {"step": step, "validation_loss": loss, "validation_tokens": tokens}
        self._write(row | ({"validation_loss_by_source": by_source} if by_source else {}))
        self._print(f"step {step}  validation loss {loss:.4f}  ({tokens:,} tokens)", colour="32")

    def log_dynamics(self, step: int, tables: dict[str, dict[str, float]]) -> None:
        """Write the row of a step whose dynamics were sampled: table -> part of the model -> number."""
        if not self.rank:
            self._write({"step": step, "dynamics": tables})

    def restart_clock(self, step: int, tokens: int) -> None:
        """Measure speed from here on, so that validation and saving are left out."""
        self.last_time, self.last_step, self.last_tokens = time.perf_counter(), step, tokens

    def close(self) -> None:
        """Draw loss.png and close the trackers."""
        if self.rank:
            return
        for tracker in self.trackers:
            tracker.close()
        self.trackers = []
        try:
            draw_loss(read_rows(self.rows), self.folder / "loss.png", self.config.job.description)
        except Exception as error:  # a picture must not hide how the run ended
            print(f"loss.png could not be drawn: {error}", file=sys.stderr)

    def _write(self, row: dict[str, Any]) -> None:
        row = _without_nan(row)
        try:
            with self.rows.open("a") as file:
                file.write("\n" * self.torn + json.dumps(row) + "\n")  # a line break first, to end a torn row
            self.torn = False
        except OSError as error:  # a full disk must not end the run
            if not self.told:
                print(f"step {row['step']}: rows are lost: {self.rows}: {error.strerror}", file=sys.stderr, flush=True)
            self.torn = self.told = True
        for tracker in self.trackers:
            tracker.write(_flat(row))

    def _print(self, line: str, colour: str) -> None:
        coloured = self.config.metrics.color_printing and (sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR")))
        print(f"\033[{colour}m{line}\033[0m" if coloured else line, flush=True)

    def _write_run(self, layout: str) -> None:
        run = {
            "description": self.config.job.description,
            "layout": layout,
            "ranks": self.world_size,
            "device": _device_name(self.device),
            "versions": _versions(),
            "git": git_revision(),
            "config": absolute_tables(self.config),
        }
        with self._refusing():
            replace(self.folder / "run.json", json.dumps(run, indent=1) + "\n")

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turns an OSError (a full disk) into a ConfigError, because an end before the first step loses no work."""
        try:
            yield
        except OSError as error:
            raise ConfigError(mistake(self.config, "job.dump_folder", str(error))) from None


NUMBERS: dict[str, Callable[[Metrics, Row], float | None]] = {
    "tokens_per_second": Metrics.tokens_per_second,
    "mfu": lambda metrics, row: metrics.mfu(row, metrics.flops_per_token[0]),
    "mfu_causal": lambda metrics, row: metrics.mfu(row, metrics.flops_per_token[1]),
    "memory_gib": lambda metrics, row: _memory_gib(metrics.device),
    "seconds": lambda metrics, row: time.perf_counter() - metrics.started,
}
"""Numbers added to each logged row, in this order. A function gets the row so far: step, tokens, train.py's values."""


def lock_folder(config: JobConfig) -> None:
    """Make the dump folder and lock it against other runs until this process ends.

    Raises ConfigError if it is locked or cannot be made.
    """
    file = Path(config.job.dump_folder) / RUN_LOCK
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if keep_lock(file):
            return
    except OSError as error:
        raise ConfigError(mistake(config, "job.dump_folder", str(error))) from None
    raise ConfigError(mistake(config, "job.dump_folder", f"another run is writing into it: {holder(file)}"))


def git_revision() -> dict[str, Any]:
    """The repository's commit, and whether the tree differed from it; nulls outside a checkout."""

    def git(*arguments: str) -> str | None:
        try:
            result = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    status = git("status", "--porcelain")
    return {"revision": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def _without_nan(value: Any) -> Any:
    """Replaces numbers that are not finite by None (null), because JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _without_nan(inside) for key, inside in value.items()}
    return value if value is None or math.isfinite(value) else None


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Scalars by name for the trackers, such as loss_by_source/web, and of the dynamics gradient_norm/layers.0."""
    tables = {key: value for key, value in row.items() if isinstance(value, dict)}
    scalars = {key: value for key, value in row.items() if key not in tables}
    tables |= tables.pop("dynamics", {})
    return scalars | {f"{table}/{part}": value for table, parts in tables.items() for part, value in parts.items()}


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in ("torch", "torchdata", "numpy", "tiktoken"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"


def _memory_gib(device: torch.device) -> float:
    """Peak memory of this rank: reserved by CUDA's allocator since the last call, or the process's resident set."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"
