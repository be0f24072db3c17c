"""Runs of one recipe over a grid of settings and seeds, and one report of them (docs/sweeps.md).

python -m components.sweep recipes/mine.toml --grid optimizer.lr=1e-3,2e-3 --grid model.sizes.dim=256,512 --seeds 3
python -m components.sweep recipes/mine.toml --grid optimizer.lr=1e-3,2e-3 -- --training.steps 100
"""

import argparse
import itertools
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from components.commands.start import check, run_alone
from components.commands.sweep_report import Result, as_text, result_of, write_report
from components.commands.sweep_tasks import run_in_ray, write_slurm
from components.config import ROOT, ConfigError, JobConfig, by_key, load_config, to_dict
from components.config.bounds import path_argument
from components.config.files import read_json_if_whole, writable
from components.config.files import replace as replace_file
from components.config.rule import value_of
from components.launch.exit_codes import ExitCode
from components.launch.locks import RUN_LOCK, holder, is_held, locked
from components.launch.settings import with_variables
from components.launch.signals import STOP_SIGNALS

LOCK, STATE = ".sweep.lock", "sweep.json"
ENDED = (ExitCode.DONE, ExitCode.NONFINITE)
"""Exit codes of runs that are not started again. A run that diverges has a result too."""
_OWN = {
    "debug.seed": "--seeds",
    "job.dump_folder": "--to",
    "job.config_file": "the recipe",
    "checkpoint.enable": "nothing: a run that is stopped goes on from its checkpoint",
}
"""Keys that the sweep sets itself, and where their values are given instead."""
_STOPS = {*(128 + number for number in STOP_SIGNALS), ExitCode.UNSAVED}
"""Exit codes of a run that a signal has stopped, which stops the sweep too."""
_MOST_RUNS = 10_000
_LONGEST_NAME = 255
"""Bytes of a folder's name."""
Point = tuple[tuple[str, str], ...]
"""(key, value as text) of each key of the grid."""


@dataclass(frozen=True)
class Run:
    """One run of a sweep."""

    name: str
    point: Point
    seed: int
    folder: Path
    argv: tuple[str, ...]

    @cached_property
    def config(self) -> JobConfig:
        """The job, as its recipe was at the first look. Raises ConfigError."""
        return load_config([*self.argv])

    @property
    def state(self) -> dict[str, Any]:
        """The folder's sweep.json: the job, starts, seconds, and the exit code of a run that has ended."""
        return read_json_if_whole(self.folder / STATE) if (self.folder / STATE).exists() else {}

    @property
    def ended(self) -> bool:
        return self.state.get("code") in ENDED

    @property
    def said(self) -> str:
        """The result of a run that has ended, in a few words."""
        return self.result().said if self.ended else f"failed with exit code {self.state.get('code')}"

    def result(self) -> Result:
        """The run's row of the report."""
        code, log_freq = self.state.get("code"), self.config.metrics.log_freq
        return result_of(self.name, self.point, self.seed, self.folder, code, log_freq)

    def check_job(self) -> None:
        """Raises ConfigError if the folder has a run of another job."""
        if changed := _changed(self.state.get("job"), _job(self.config)):
            reason = f"{self.folder} has a run of another job: {changed}; use another --to, or remove the folder"
            raise ConfigError(reason)


def main(argv: list[str]) -> int:
    """Run what has not ended yet, and write the report; returns an ExitCode, 1 if a run has failed."""
    options, settings = _parse(argv)
    try:
        grid = parse_grid(options.grid)
        folder = options.to or ROOT / "outputs" / "sweeps" / options.recipe.stem
        runs = runs_of(options.recipe, grid, options.seeds, folder, settings)
        if not writable(folder):
            raise ConfigError(f"{folder} cannot be written; use --to FOLDER")
        if options.report:
            return _report(runs, grid, folder)
        if options.only is not None:
            return _run_one(runs, options.only)
        check_runs(runs, here=options.slurm is None and options.ray is None)
        folder.mkdir(parents=True, exist_ok=True)
        words = [str(options.recipe.absolute()), *(word for each in options.grid for word in ("--grid", each))]
        words += ["--seeds", str(options.seeds), "--to", str(folder.absolute())]
        if options.slurm is not None:
            return write_slurm(len(runs), folder.absolute(), words, settings, options.slurm)
        if options.ray is not None:
            codes = run_in_ray([run.ended for run in runs], words, settings, options.ray)
            return _report(runs, grid, folder) or (ExitCode.ERROR if any(codes) else ExitCode.DONE)
        with locked(folder / LOCK, None) as own:
            if not own:
                raise ConfigError(f"--to {folder}: another sweep is running there: {holder(folder / LOCK)}")
            code = run_all(runs)
            return _report(runs, grid, folder) or code
    except ConfigError as error:
        print(*error.messages, sep="\n", file=sys.stderr)
        return ExitCode.CONFIG
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the settings of all runs, which follow a lone --."""
    parser = argparse.ArgumentParser(
        prog="python -m components.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=path_argument, metavar="RECIPE")
    parser.add_argument("--grid", action="append", default=[], metavar="KEY=A,B", help="values of a key of the recipe")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each point (default 1)")
    parser.add_argument("--to", type=path_argument, metavar="FOLDER", help="default: outputs/sweeps/RECIPE")
    parser.add_argument("--report", action="store_true", help="start nothing; write the report of what has ended")
    parser.add_argument("--only", type=int, metavar="I", help="only run I, counted from 0, as a task of an array does")
    how = parser.add_mutually_exclusive_group()
    lines = "write a job array of Slurm instead; OPTIONS, in one word, are sbatch's"
    how.add_argument("--slurm", nargs="?", const="", metavar="OPTIONS", help=lines)
    how.add_argument(
        "--ray", nargs="?", const=0, type=int, metavar="GPUS", help="tasks of Ray, each with this number of GPUs"
    )
    cut = argv.index("--") if "--" in argv else len(argv)
    options, unknown = parser.parse_known_args(argv[:cut])
    if unknown:
        parser.error(f"{unknown[0]}: settings of all runs follow a lone --, and a grid is KEY=A,B in one word")
    return options, argv[cut + 1 :]


def parse_grid(words: Iterable[str]) -> dict[str, list[str]]:
    """Key -> values as text, of words as optimizer.lr=1e-3,2e-3. Raises ConfigError with every mistake."""
    grid: dict[str, list[str]] = {}
    mistakes = []
    for word in words:
        key, _, text = word.partition("=")
        key, values = key.replace("-", "_"), _split(text)
        if not re.fullmatch(r"[\w.\[\]]+", key) or not all(values):
            mistakes.append(f"--grid {word}: expected KEY=VALUE,VALUE, as optimizer.lr=1e-3,2e-3")
        elif key in grid:
            mistakes.append(f"--grid {word}: {key} has a grid already; give all its values in one")
        elif key in _OWN:
            mistakes.append(f"--grid {word}: {_set_here(key)}")
        elif key == "validation.enable":
            mistakes.append(f"--grid {word}: runs without validations have no validation loss to be compared by")
        elif len({*values}) < len(values):
            mistakes.append(f"--grid {word}: a value occurs twice")
        grid.setdefault(key, values)
    if mistakes:
        raise ConfigError(mistakes)
    return grid


def _set_here(key: str) -> str:
    return f"the sweep sets {key} itself; use {_OWN[key]}"


def _split(text: str) -> list[str]:
    """The parts between commas that are outside of brackets, braces and quotes. Quotes around a whole part go."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        quote = ("" if letter == quote else quote) if quote else letter if letter in "\"'" else ""
        depth += 0 if quote else (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [re.sub(r"""^(["'])([^"']*)\1$""", r"\2", part.strip()) for part in parts]


def runs_of(
    recipe: Path, grid: Mapping[str, Sequence[str]], seeds: int, folder: Path, settings: Sequence[str]
) -> list[Run]:
    """The product of the grid's values and the seeds, seeds fastest. Raises ConfigError."""
    count = seeds * math.prod(map(len, grid.values()))
    if seeds < 1 or count > _MOST_RUNS:
        raise ConfigError(f"--seeds {seeds}: use 1 or more, and at most {_MOST_RUNS:,} runs in all, not {count:,}")
    base = ("--job.config_file", str(recipe), *settings)
    last = [key.rpartition(".")[2] for key in grid]
    labels = dict(zip(grid, last if len({*last}) == len(last) else grid, strict=True))
    found = []
    for values in itertools.product(*grid.values()):
        point = tuple(zip(grid, values, strict=True))
        words = [f"--{key}={value}" for key, value in point]
        try:
            given = load_config([*base, *words])
        except ConfigError:
            given = JobConfig()  # check_runs says why
        for key in ("job.dump_folder", "checkpoint.enable"):
            if given.origins.get(key) == "command line":
                raise ConfigError(f"-- --{key}: {_set_here(key)}")
        if given.origins and Path(given.job.config_file or "").absolute() != recipe.absolute():
            raise ConfigError(f"-- --job.config_file: {_set_here('job.config_file')}")
        for seed in range(given.debug.seed, given.debug.seed + seeds):
            parts = [*((labels[key], value) for key, value in point), ("seed", str(seed))]
            name = re.sub(r"[^\w.+=,-]", "_", ",".join(map("=".join, parts)))
            own = folder / name
            # A run that is stopped goes on from its checkpoint.
            set_here = ("--debug.seed", str(seed), "--job.dump_folder", str(own), "--checkpoint.enable", "true")
            found.append(Run(name, point, seed, own, (*base, *words, *set_here)))
    return found


def check_runs(runs: Sequence[Run], here: bool = True) -> None:
    """Raises ConfigError, before anything starts, with every run that cannot be, and why.

    here: the runs are this machine's, so that its devices count too.
    """
    refused: dict[str, list[str]] = {}
    jobs: dict[str, str] = {}
    for run in runs:
        try:
            config = load_config(with_variables([*run.argv], os.environ))
            for key, reason in _REFUSED.items():
                if value_of(config, key) != value_of(JobConfig(), key):
                    raise ConfigError(f"{key}: {reason}: leave it out")
            if len(os.fsencode(run.name)) > _LONGEST_NAME:
                raise ConfigError(f"--grid: the folder's name is longer than {_LONGEST_NAME} bytes; use shorter values")
            run.check_job()
            if here:
                check([*run.argv], os.environ)
            same = jobs.setdefault(json.dumps(_job(run.config), sort_keys=True), run.name)
            if same != run.name:
                raise ConfigError(f"the same job as {same}")
        except ConfigError as error:
            for message in error.messages:
                refused.setdefault(message, []).append(run.name)
    if refused:
        raise ConfigError([f"{_named(names, len(runs))}: {message}" for message, names in refused.items()])
    if twice := [name for name in {run.name for run in runs} if sum(run.name == name for run in runs) > 1]:
        raise ConfigError(f"--grid: several runs would have the folder {twice[0]}; use values that differ in letters")


_REFUSED = {
    "checkpoint.remote": "all runs of a sweep would write there",
    "checkpoint.hf_repo": "all runs of a sweep would write there",
    "checkpoint.last_save_model_only": "a sweep that was killed could not go on from such a checkpoint",
    "comm.mode": "a dry run has no loss",
}
"""Keys that no run of a sweep may set, and why."""


def _named(names: Sequence[str], runs: int) -> str:
    if len(names) == runs > 1:
        return "all runs"
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _job(config: JobConfig) -> dict[str, Any]:
    """The job as run.json would have it, without its folder and the recipe's path."""
    found = to_dict(replace(config, job=replace(config.job, dump_folder="", config_file="")))
    return dict(json.loads(json.dumps(found)))


def _changed(before: dict[str, Any] | None, now: dict[str, Any]) -> str:
    """The first keys that differ, with both values; empty if none does, or if there is no run yet."""
    if before is None:
        return ""
    old, new = (dict(by_key(each)) for each in (before, now))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return ", ".join(f"{key} was {old.get(key)} and is {new.get(key)}" for key in keys[:3])


def run_all(runs: Sequence[Run]) -> int:
    """Run what has not ended, one after another; returns 0, 1 if one has failed, or the code of a stop by a signal."""
    failed = 0
    for number, run in enumerate(runs, 1):
        if run.ended:
            continue
        code = start(run)
        if code in _STOPS:
            return code
        failed += code not in ENDED
        seconds = [each.state["seconds"] for each in runs if each.ended]
        left = sum(not each.ended for each in runs[number:])
        rest = sum(seconds) / max(1, len(seconds)) * left
        eta = f"  eta {rest / 60:.0f} min" if left else ""
        print(f"{number}/{len(runs)}  {run.name}  {run.said}  {run.state['seconds']:.0f} s{eta}", flush=True)
    return ExitCode.ERROR if failed else ExitCode.DONE


def start(run: Run) -> int:
    """Start or continue a run, and wait for its end; returns its exit code.

    If an earlier sweep was killed, its run may still be going on. The run is waited for, and then started once more:
    it goes on from its last checkpoint, or ends at once. Raises ConfigError if the recipe has changed meanwhile.
    """
    if changed := _changed(_job(run.config), _job(load_config([*run.argv]))):
        raise ConfigError(f"{run.name}: the recipe has changed since the sweep began: {changed}")
    run.folder.mkdir(parents=True, exist_ok=True)
    with locked(run.folder / LOCK, None) as own:
        if not own:
            raise ConfigError(f"{run.name}: another sweep has it: {holder(run.folder / LOCK)}")
        code = _start(run)
        # The run of a sweep that was killed takes its lock only after its data is tokenized.
        return _start(run) if code == ExitCode.CONFIG and is_held(run.folder / RUN_LOCK) else code


def _start(run: Run) -> int:
    lock = run.folder / RUN_LOCK
    if is_held(lock):
        print(f"{run.name}: still running, and waited for: {holder(lock)}", flush=True)
        while is_held(lock):
            time.sleep(0.5)
    before, started = run.state, time.monotonic()
    state = {"job": _job(run.config), "starts": before.get("starts", 0) + 1, "seconds": before.get("seconds", 0.0)}
    replace_file(run.folder / STATE, json.dumps(state))
    with open(run.folder / "console.log", "a", encoding="utf-8") as console:
        code = run_alone("components.commands.start", [*run.argv], {}, console)
    state["seconds"] += time.monotonic() - started
    replace_file(run.folder / STATE, json.dumps(state | {"code": code}))
    if code not in (ExitCode.DONE, *_STOPS):
        print(f"{run.name}: exit code {code}; {run.folder / 'console.log'} says why", file=sys.stderr, flush=True)
    return code


def _run_one(runs: Sequence[Run], number: int) -> int:
    """A task of an array."""
    if not 0 <= number < len(runs):
        raise ConfigError(f"--only {number}: the sweep has the runs 0 to {len(runs) - 1}")
    run = runs[number]
    check_runs([run])
    code = ExitCode.DONE if run.ended else start(run)
    return ExitCode.DONE if code in ENDED else code


def _report(runs: Sequence[Run], grid: Mapping[str, Sequence[str]], folder: Path) -> int:
    """Print the table of the runs that have ended, and write the page and the picture. Raises ConfigError."""
    for run in runs:
        run.check_job()
    results = [run.result() for run in runs if run.ended]
    if not results:
        print("no run has ended")
        return ExitCode.DONE
    print(f"\n{as_text(results)}\n")
    left = len(runs) - len(results)
    write_report(results, grid, folder, f"{left} of {len(runs)} runs have not ended yet." if left else "")
    print(folder / "report.html", flush=True)
    return ExitCode.DONE
