"""One side of a comparison: a recipe at some layout, settings and git revision, run for some steps; and its curve."""

import io
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from components.commands.start import gpus
from components.config import ROOT, ConfigError, JobConfig, load_config
from components.config.rule import value_of
from components.observe.report import read_rows
from parallelize.layouts import KEYS, Layout, fixed_batch, layout_of, take_degree
from parallelize.mesh import Degrees, draw_layout, minimum_ranks, resolve_degrees
from parallelize.rules import check_layout

_OFF = {
    "validation.enable": False,
    "checkpoint.enable": False,
    "checkpoint.last_save_in_hf": False,
    "checkpoint.hf_repo": "",
    "checkpoint.remote": "",
    "averages.ema_decay": 0.0,
    "averages.export": False,
}
"""What no curve shows."""
DISTURBED = Path(__file__).with_name("disturbed.py")
SERIES = ("loss", "grad_norm")
"""What has to be the same at every step."""
_HELP = (
    f"expected a layout ({', '.join(f'{word} 2' for word in KEYS)}, hsdp 2x2, or own for the recipe's), resume 10, "
    "REVISION@, a recipe or --table.key value"
)


@dataclass(frozen=True)
class Side:
    """What is run; `text` is how a person wrote it, and its name."""

    text: str
    recipe: Path
    degrees: Degrees | None
    """None: the layout that the recipe has."""
    overrides: tuple[str, ...] = ()
    revision: str = ""
    """The full name of a git commit; empty is the working tree."""
    tree: Path = ROOT
    """Where its code is."""
    resume: int = 0
    """Stop after this step, and continue from the checkpoint in new processes."""

    def argv(self, folder: Path, steps: int, settings: tuple[str, ...] = ()) -> list[str]:
        """The command line of this side: `settings` are those of all sides."""
        config = load_config(["--job.config_file", str(self.recipe), *settings, *self.overrides])
        fixed_batch(config)
        schedule = config.lr_scheduler
        # The recipe's whole schedule, made shorter: warm-up, decay and all.
        warmup = max(1, round(schedule.warmup_steps * steps / (schedule.total_steps or config.training.steps)))
        given = {
            "training.steps": steps,
            "lr_scheduler.warmup_steps": min(warmup, schedule.warmup_steps),
            "lr_scheduler.total_steps": steps,
            "metrics.log_freq": 1,
            "job.dump_folder": folder,
        }
        given |= {key: str(off).lower() for key, off in _OFF.items() if value_of(config, key) != off}
        if self.degrees:
            layout = Layout(self.degrees)
            given |= layout.settings
            given["training.local_batch_size"] = layout.given_to(config).training.local_batch_size
        words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
        return ["--job.config_file", str(self.recipe), *words, *settings, *self.overrides]

    @property
    def ranks(self) -> int:
        """Ranks; for the recipe's own layout a guess."""
        return self.degrees.world_size if self.degrees else gpus() or minimum_ranks(self.config(2))

    def config(self, steps: int, settings: tuple[str, ...] = ()) -> JobConfig:
        return load_config(self.argv(Path("unused"), steps, settings))


@dataclass
class Curve:
    """What a side did, by step."""

    text: str
    loss: list[float]
    grad_norm: list[float]
    tokens_per_second: list[float] = field(default_factory=list)
    memory_gib: float = 0.0
    """Peak of rank 0."""
    drawing: str = ""
    """Which rank sits where."""
    about: dict[str, Any] = field(default_factory=dict)
    """Versions, device and git revision."""


def parse(text: str, recipe: Path) -> Side:
    """A side from words as "tp 2 cp 2", "main@ fsdp 2", "own --compile.enable"; with no layout it is one rank.

    Raises:
        ConfigError: a word that is none of these.
    """
    words = shlex.split(text)
    degrees: dict[str, int] = {}
    given: dict[str, Any] = {}
    overrides: list[str] = []
    while words:
        if not overrides and take_degree(words, degrees):
            continue
        word = words.pop(0)
        if overrides or word.startswith("--"):
            overrides.append(word)
        elif word == "resume" and words and words[0].isdecimal():
            given["resume"] = int(words.pop(0))
        elif word == "own":
            given["degrees"] = None
        elif word.endswith("@"):
            given["revision"] = _commit(word[:-1])
            given["tree"] = checkout(given["revision"])
        elif word.endswith(".toml"):
            recipe = Path(word)
        else:
            raise ConfigError(f'side "{text}": {word}: {_HELP}')
    given = {"degrees": layout_of(degrees).degrees} | given
    if "tree" in given and recipe.absolute().is_relative_to(ROOT):
        recipe = given["tree"] / recipe.absolute().relative_to(ROOT)
    return Side(text, recipe, overrides=tuple(overrides), **given)


def check(side: Side, steps: int, settings: tuple[str, ...]) -> None:
    """Refuse what could not run, before anything does; another revision checks its own sides.

    Raises:
        ConfigError: a mistake in the recipe or the settings, or a layout that is refused.
    """
    if side.revision:
        return
    try:
        config = side.config(steps, settings)
        if side.degrees:
            check_layout(config, resolve_degrees(config, side.degrees.world_size))
        if not 0 <= side.resume < steps:
            raise ConfigError(f"resume {side.resume}: expected a step before the last, {steps}")
    except ConfigError as error:
        raise ConfigError([f'side "{side.text}": {message}' for message in error.messages]) from None


def run(side: Side, steps: int, settings: tuple[str, ...], folder: Path, disturbance: str = "") -> Curve:
    """Run a side as ./run_train.sh would, in `folder`; returns its curve.

    disturbance: what disturbed.py does to it; empty runs train.py as it is.

    Raises:
        RuntimeError: it did not end well; with its last lines.
    """
    shutil.rmtree(folder, ignore_errors=True)  # an earlier run's checkpoint would be continued
    folder.mkdir(parents=True)
    # One thread a rank, if nothing else is said: threads that wait for each other on a busy machine take minutes.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHON": sys.executable}
    environment |= {"PYTHONPATH": str(side.tree), "DISTURB": disturbance}
    if side.degrees:
        environment["NGPU"] = str(side.degrees.world_size)
    # Not a module of ours: another revision has its launcher elsewhere.
    start = [sys.executable, "-P", str(DISTURBED)] if disturbance else [str(side.tree / "run_train.sh")]
    argv = side.argv(folder.absolute(), steps, settings)
    launches = [argv]
    if side.resume:
        saving = ["--checkpoint.enable", "true", "--checkpoint.interval", str(steps)]
        launches = [[*argv, *saving, "--training.steps", str(side.resume)], [*argv, *saving]]
    for words in launches:
        with open(folder / "console.log", "a", encoding="utf-8") as console:
            process = subprocess.Popen([*start, *words], env=environment, stdout=console, stderr=console)
            try:
                code = process.wait()
            except KeyboardInterrupt:
                process.terminate()  # not killed: it ends its ranks
                process.wait()
                raise
        if code:
            last = (folder / "console.log").read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
            raise RuntimeError("\n".join([f"exit code {code}; the end of {folder / 'console.log'}:", *last]))
    return read_curve(side, folder)


def read_curve(side: Side, folder: Path) -> Curve:
    """The curve of a run that has ended. What was not finite is NaN."""
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "loss" in row]
    about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    if side.revision:
        about["git"] = {"revision": side.revision, "dirty": False}
    columns = {name: [math.nan if row[name] is None else row[name] for row in rows] for name in SERIES}
    parallelism = about["config"]["parallelism"]
    degrees = side.degrees or Degrees(*(parallelism[key] for key in KEYS.values()))
    return Curve(
        side.text,
        **columns,
        tokens_per_second=[row["tokens_per_second"] for row in rows],
        memory_gib=max(row["memory_gib"] for row in rows),
        drawing=draw_layout(degrees, parallelism["pipeline_first"]) if -1 not in astuple(degrees) else about["layout"],
        about=about,
    )


def checkout(commit: str) -> Path:
    """The files of a commit, in a folder of their own; the working tree and git's index stay as they are."""
    folder = ROOT / ".cache" / "revisions" / commit
    if not folder.exists():
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True).stdout
        partial = folder.with_name(f"{commit}.{os.getpid()}")
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(partial, filter="data")
        partial.rename(folder)
    return folder


def _commit(revision: str) -> str:
    """The full name of a git revision. Raises ConfigError if there is none."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        raise ConfigError(f"{revision}@: git knows no such revision; `git log --oneline` and `git branch -a` list them")
    return found.stdout.strip()
