"""Outputs of a run: metrics.jsonl, run.json, the console line, loss.png, Weights & Biases, TensorBoard."""

import json
import math
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from components.config import ROOT, ConfigError, JobConfig, absolute_tables, mistake, to_dict
from components.config.files import replace
from components.observe.report import Panel, draw, points, read_rows

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
    """The first of PEAK_FLOPS whose name is in the device's, as words of it."""
    return next((peak for name, peak in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


Row = dict[str, Any]
"""A line of metrics.jsonl."""


class Metrics:
    """Writes a row for each logged step. Only rank 0 writes; on other ranks every method does nothing."""

    def __init__(
        self, config: JobConfig, rank: int, device: torch.device, flops_per_token: tuple[int, int], layout: str
    ) -> None:
        self.config, self.device, self.flops_per_token = config, device, flops_per_token
        self.folder = Path(config.job.dump_folder)
        self.rank = rank
        self.peak = peak_flops(_device_name(device))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.writers: list[Writer] = []
        self.rows = self.folder / "metrics.jsonl"
        self.started = self.last_time = time.perf_counter()
        self.last_step = self.last_tokens = self.first_step = 0
        self.torn = self.told = False
        if rank == 0:
            self._write_run(layout)

    def resume(self, step: int, tokens: int) -> None:
        """Continue after this step; an earlier run's rows beyond it are dropped, since they will come again."""
        self.last_step, self.last_tokens, self.first_step = step, tokens, step
        self.started = self.last_time = time.perf_counter()
        if self.rank:
            return
        if not step and self.rows.exists():  # another run's
            self.rows.replace(self.folder / f"metrics-until-{time.strftime('%Y-%m-%d_%H-%M-%S')}.jsonl")
        rows = read_rows(self.rows)
        replace(self.rows, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))
        if self.config.metrics.enable_tensorboard:
            self.writers.append(_tensorboard(self.folder / self.config.metrics.save_tb_folder, step))
        if self.config.metrics.enable_wandb:
            self.writers.append(_wandb(self.folder, self.config, step))

    def log(self, step: int, tokens: int, **values: float | None) -> None:
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

    def log_validation(self, step: int, loss: float, tokens: int) -> None:
        """Write the row of a validation."""
        if self.rank:
            return
        self._write({"step": step, "validation_loss": loss, "validation_tokens": tokens})
        self._print(f"step {step}  validation loss {loss:.4f}  ({tokens:,} tokens)", colour="32")

    def log_dynamics(self, step: int, tables: dict[str, dict[str, float]]) -> None:
        """Write the row of a step whose dynamics were sampled: table -> part of the model -> number."""
        if not self.rank:
            self._write({"step": step, "dynamics": tables})

    def restart_clock(self, step: int, tokens: int) -> None:
        """Measure speed from here on, so that validation and saving are left out."""
        self.last_time, self.last_step, self.last_tokens = time.perf_counter(), step, tokens

    def close(self) -> None:
        """Draw loss.png and close the writers."""
        if self.rank:
            return
        for _, close in self.writers:
            close()
        self.writers = []
        try:
            draw_loss(read_rows(self.rows), self.folder / "loss.png", self.config.job.description)
        except Exception as error:  # a picture must not hide how the run ended
            print(f"loss.png could not be drawn: {error}", file=sys.stderr)

    def _write(self, row: dict[str, Any]) -> None:
        row = _without_nan(row)
        try:
            with self.rows.open("a") as file:
                file.write("\n" * self.torn + json.dumps(row) + "\n")  # after what is left of a row that was lost
            self.torn = False
            for write, _ in self.writers:
                write(_flat(row))
        except OSError as error:  # a disk that is full: the run is worth more than its rows
            if not self.told:
                print(f"step {row['step']}: rows are lost: {self.rows}: {error.strerror}", file=sys.stderr, flush=True)
            self.torn = self.told = True

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
        (self.folder / "run.json").write_text(json.dumps(run, indent=1) + "\n")


NUMBERS: dict[str, Callable[[Metrics, Row], float | None]] = {
    "tokens_per_second": Metrics.tokens_per_second,
    "mfu": lambda metrics, row: metrics.mfu(row, metrics.flops_per_token[0]),
    "mfu_causal": lambda metrics, row: metrics.mfu(row, metrics.flops_per_token[1]),
    "memory_gib": lambda metrics, row: _memory_gib(metrics.device),
    "seconds": lambda metrics, row: time.perf_counter() - metrics.started,
}
"""Numbers added to each logged row, in this order, from the row so far: step, tokens, values of train.py's log."""


Writer = tuple[Callable[[Row], None], Callable[[], None]]
"""Writes a row of scalars; closes."""


def _tensorboard(folder: Path, step: int) -> Writer:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def write(row: Row) -> None:
        for key, value in row.items():
            if key != "step" and value is not None:
                writer.add_scalar(key, value, row["step"])

    return write, writer.close


def _wandb(folder: Path, config: JobConfig, step: int) -> Writer:
    """A run whose id is kept in the dump folder, so that a resumed job continues the curve."""
    import wandb

    file = folder / "wandb_run_id"
    known = file.read_text().strip() if step and file.exists() else None
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "meshwright",
        entity=os.environ.get("WANDB_TEAM") or None,  # torchtitan's name of WANDB_ENTITY
        dir=str(folder),
        id=known,
        resume="allow" if known else None,
        notes=config.job.description,
        config=to_dict(config),
    )
    file.write_text(run.id)
    return lambda row: run.log({key: row[key] for key in row if key != "step"}, step=row["step"]), run.finish


def lock_folder(config: JobConfig) -> FileLock:
    """Make the dump folder and lock it against other runs; raises ConfigError if it is locked or cannot be made."""
    folder = Path(config.job.dump_folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", blocking=False)
        lock.acquire()
    except Timeout:
        raise ConfigError(mistake(config, "job.dump_folder", "another run is writing into it")) from None
    except OSError as error:
        raise ConfigError(mistake(config, "job.dump_folder", str(error))) from None
    return lock


def draw_loss(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Training and validation loss by step, as a PNG."""
    lines = {}
    for key, label in (("loss", "training"), ("validation_loss", "validation")):
        steps, losses = points(rows, key)
        if steps:
            lines[f"{label}: {losses[-1]:.3f}"] = (steps, losses)
    draw([Panel(title, "loss (nats a token)", lines, named=True)], path)


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
    """Numbers that are not finite as null: JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _without_nan(inside) for key, inside in value.items()}
    return value if value is None or math.isfinite(value) else None


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Scalars by name for the writers; dynamics get names as gradient_norm/layers.0."""
    tables = row.get("dynamics", {}).items()
    dynamics = {f"{table}/{part}": value for table, parts in tables for part, value in parts.items()}
    return {key: value for key, value in row.items() if key != "dynamics"} | dynamics


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
