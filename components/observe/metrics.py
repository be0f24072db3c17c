"""Outputs of a run: metrics.jsonl, run.json, the console line, loss.png."""

import contextlib
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from components.config import ROOT, ConfigError, JobConfig, absolute_tables, mistake
from components.config.files import replace
from components.config.keys import short
from components.launch.locks import RUN_LOCK, holder, keep_lock
from components.observe.report import draw_loss, read_rows
from components.observe.rows import Rows
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
        self.rows = Rows(self.folder / "metrics.jsonl")
        self.samples, self.evaluation = Rows(self.folder / "samples.jsonl"), Rows(self.folder / "evaluation.jsonl")
        self.started = self.last_time = time.perf_counter()
        self.last_step = self.last_tokens = self.first_step = 0
        if rank == 0:
            self._write_run(layout)

    def resume(self, step: int, tokens: int, looks_again: bool = False) -> None:
        """Continue after this step. An earlier run's rows of what runs again are dropped."""
        self.last_step, self.last_tokens, self.first_step = step, tokens, step
        self.started = self.last_time = time.perf_counter()
        if self.rank:
            return
        with self._refusing():
            for rows in (self.rows, self.samples, self.evaluation):
                if rows is self.rows or rows.path.exists():
                    rows.resume(step, looks_again, beside=self.config.checkpoint.load_only)
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

    def log_validation(self, step: int, loss: float, tokens: int, more: Mapping[str, Any] | None = None) -> None:
        """Write the row of a validation, with what the objective logs beside the loss."""
        if self.rank:
            return
        more = more or {}
        row: Row = {"step": step, "validation_loss": loss, "validation_tokens": tokens}
        # A validation has no terms, so its loss is the unregularized one.
        named = {f"validation_{name}": each for name, each in more.items() if name != "unregularized_loss"}
        self._write(row | {name: value for name, value in named.items() if value != {}})
        ema = f", of the average {more['loss_ema']:.4f}" if "loss_ema" in more else ""
        accuracy = f"  reward accuracy {more['reward_accuracy']:.1%}" if "reward_accuracy" in more else ""
        self._print(f"step {step}  validation loss {loss:.4f}{ema}{accuracy}  ({tokens:,} tokens)", colour="32")

    def log_text_loss(self, step: int, seen: tuple[float, int]) -> None:
        """Write the row of the loss of validation.text_path; seen: the loss, and the number of labels."""
        if self.rank:
            return
        loss, tokens = seen
        self._write({"step": step, "validation_text_loss": loss, "validation_text_tokens": tokens})
        self._print(f"step {step}  loss of the text {loss:.4f}  ({tokens:,} tokens)", colour="32")

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Write what the model says: a row of prompt, text and tokens for each prompt."""
        if self.rank:
            return
        for sample in samples:
            self.samples.write({"step": step, **sample})
            self._print(f"step {step}  {short(sample['prompt'], 60)} → {short(sample['text'], 120)}", colour="35")
        self._track({"step": step} | {f"samples/{number}": said(each) for number, each in enumerate(samples, 1)})

    def log_evaluation(self, step: int, results: dict[str, dict[str, Any]]) -> None:
        """Write the numbers of each task: a row of evaluation.jsonl each, and one of metrics.jsonl for all."""
        if self.rank:
            return
        for task, numbers in results.items():
            self.evaluation.write({"step": step, "task": task, **numbers})
            shown = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items() if isinstance(value, float))
            self._print(f"step {step}  {task}  {shown}", colour="32")
        flat = {f"{task}/{name}": value for task, numbers in results.items() for name, value in numbers.items()}
        self._write(
            {"step": step, "evaluation": {name: each for name, each in flat.items() if isinstance(each, float)}}
        )

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
            draw_loss(read_rows(self.rows.path), self.folder / "loss.png", self.config.job.description)
        except Exception as error:  # a picture must not hide how the run ended
            print(f"loss.png could not be drawn: {error}", file=sys.stderr)

    def _write(self, row: dict[str, Any]) -> None:
        self._track(_flat(self.rows.write(row)))

    def _track(self, row: dict[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.write(row)

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


def lock_folder(config: JobConfig, rank: int) -> None:
    """On rank 0: make the dump folder and lock it against other runs until this process ends.

    Raises ConfigError if it is locked or cannot be made.
    """
    if rank:
        return
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


def said(sample: dict[str, Any]) -> str:
    """A sample as one text, for trackers."""
    return f"{sample['prompt']} → {sample['text']}"


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
