"""Finds checkpoints in a folder and verifies them. Nothing here writes, or executes a pickle.

A read error does not mean that a checkpoint is damaged, so the error is raised after some retries. A checkpoint is
damaged only if its bytes could be read and disagree with the manifest.
"""

import json
import os
import re
import stat
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from components.config import Chat, ConfigError, Lora, Model, RopeScaling
from components.config.files import digest, patiently, read_json, refuse_pointer
from parallelize.together import read_together

VERSION = 1
"""Version of state.json. Files without a version count as version 0; they lack branch and ranks."""
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


@dataclass(frozen=True)
class Fault:
    """Why a checkpoint cannot be used."""

    reason: str
    damaged: bool = True
    """Bytes disagree with the manifest. False: unusable for another reason, such as no manifest, or weights only."""

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Branch:
    """A line of checkpoints. A new branch begins where load_step or exclude_from_loading acts; each acts only once."""

    number: int = 0
    began_at: int = 0
    load_step: int = -1
    exclude_from_loading: tuple[str, ...] = ()
    """load_step and exclude_from_loading, as set in the run that wrote the checkpoint, have already acted."""


@dataclass(frozen=True)
class Saved:
    """A step-N folder and its state.json, not yet verified; state is None if there is no such JSON object."""

    step: int
    folder: Path
    state: dict[str, Any] | None

    @property
    def branch(self) -> Branch:
        """The branch in state.json. Raises ConfigError if that entry is not a branch."""
        given = (self.state or {}).get("branch", {})
        try:
            branch = Branch(**given | {"exclude_from_loading": tuple(given.get("exclude_from_loading", ()))})
            if any(type(number) is not int for number in (branch.number, branch.began_at, branch.load_step)):
                raise TypeError("a number is expected")
        except (TypeError, AttributeError) as error:
            raise ConfigError(f"{self.folder}/state.json: branch: {error}") from error
        return branch

    @property
    def order(self) -> tuple[float, int]:
        """Sort key from old to new: branch, then step. A folder without state.json is last, so that it is reported."""
        try:
            return (self.branch.number if self.state is not None else float("inf"), self.step)
        except ConfigError:
            return float("inf"), self.step


@dataclass(frozen=True)
class Copy(Saved):
    """A whole checkpoint of the store checkpoint.remote; folder: where it is, or would be, on this machine."""

    manifest: bytes = field(repr=False)
    files: dict[str, list] = field(repr=False)
    """Name -> size and hash."""


def step_of(name: str) -> int | None:
    """N of the name step-N; None for other names."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """Folders called step-N, in the order of N; none if there is no folder.

    Raises ConfigError if one is a symbolic link, and OSError if the folder cannot be read.
    """
    found = ((step_of(name), folder / name) for name in names_in(folder))
    return sorted((step, path) for step, path in found if step is not None and _is_folder(path))


def names_in(folder: Path) -> list[str]:
    """Sorted names in a folder; empty if there is no folder. Raises OSError if the folder cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError:
        return sorted(patiently(folder, lambda: os.listdir(folder)))


def _is_folder(path: Path) -> bool:
    kind = patiently(path, path.lstat).st_mode
    if stat.S_ISLNK(kind):
        raise ConfigError(f"{path} is refused: a symbolic link")
    return stat.S_ISDIR(kind)


def saved_in(folder: Path) -> list[Saved]:
    """The checkpoints of a folder, oldest first (Saved.order). Raises OSError if one cannot be read."""
    return sorted((Saved(step, path, peek(path)) for step, path in steps_in(folder)), key=lambda saved: saved.order)


def peek(folder: Path) -> dict[str, Any] | None:
    """A checkpoint's state.json, not verified; None if there is none, or no JSON object. Raises OSError."""
    raw = read_inside(folder, "state.json")
    try:
        state = None if raw is None else json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return state if isinstance(state, dict) else None


def find_checkpoint(run: Path, step: int | None) -> tuple[dict[str, Any], Path]:
    """A run's job file by tables, and its checkpoint of that step or the newest that verifies. Called by all ranks.

    Raises ConfigError if run is not a dump_folder, or has no such checkpoint.
    """
    try:
        config = read_json(run / "run.json")["config"]
        folder = run / config["checkpoint"]["folder"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{run}: not the dump_folder of a run: {error}") from error
    there = read_together(lambda: saved_in(folder), first_only=True)[0]
    asked = [saved for saved in reversed(there) if step in (None, saved.step)]
    checkpoint = next((saved.folder for saved in asked if not fault(saved.folder)), None)
    if checkpoint is None:
        steps, wanted = listed(there), "any step" if step is None else f"step {step}"
        raise ConfigError(f"{folder}: no good checkpoint of {wanted}. Steps there: {steps}")
    return config, checkpoint


def chosen_model(config: dict[str, Any]) -> Model:
    """The table [model] of a run's job file: only the keys that decide which model it is."""
    model = config["model"]
    rope = {key: value for key, value in model.get("rope_scaling", {}).items() if hasattr(RopeScaling, key)}
    lora = {key: value for key, value in model.get("lora", {}).items() if hasattr(Lora, key)}
    # Older runs have a key for the vocabulary, 0 for the flavor's.
    sizes = model.get("sizes", {"vocab_size": model["vocab_size"]} if model.get("vocab_size") else {})
    chosen = {"name": model["name"], "flavor": model["flavor"], "sizes": sizes}
    return Model(**chosen, rope_scaling=RopeScaling(**rope), lora=Lora(**lora))


def separator_of(config: dict[str, Any]) -> str:
    """training.dataset_separator of a run's job file, which older runs lack."""
    return str(config["training"].get("dataset_separator", "auto"))


def chat_of(config: dict[str, Any]) -> Chat | None:
    """The table chat of a run's job file; None for a run that was not trained on chats."""
    return Chat(**config["chat"]) if config["training"].get("dataset_format") in ("chat", "preference") else None


def listed(there: list[Saved]) -> str:
    """The steps of these checkpoints, as text."""
    return ", ".join(str(saved.step) for saved in sorted(there, key=lambda saved: saved.step)) or "none"


def path_inside(folder: Path, name: str) -> Path:
    """The path of a file in a folder. Raises ConfigError if it is no plain file of that folder; may raise OSError."""
    path = folder / plain_name(folder, name)
    kind = patiently(path, path.lstat).st_mode
    if not stat.S_ISREG(kind):
        what = "a symbolic link" if stat.S_ISLNK(kind) else "no plain file"
        raise ConfigError(f"{folder} is refused: {name} is {what}")
    return path


def plain_name(folder: Path, name: str) -> str:
    """The name. Raises ConfigError if it could be the name of something outside of the folder."""
    if Path(name).name != name or name == ".." or "\0" in name:
        raise ConfigError(f"{folder} is refused: {name!r} is not the name of a file in it")
    return name


def read_inside(folder: Path, name: str) -> bytes | None:
    """A file's bytes; None if the folder has no such file. Raises ConfigError as path_inside does, or OSError."""
    try:
        path = path_inside(folder, name)
        content = patiently(path, path.read_bytes)
        refuse_pointer(path, content)
        return content
    except FileNotFoundError:
        if name in patiently(folder, lambda: os.listdir(folder)):
            raise
        return None


def manifest(folder: Path) -> dict[str, list] | Fault:
    """Name -> size and hash of a checkpoint's files. Raises OSError; ConfigError if the manifest is no plain file."""
    raw = read_inside(folder, "manifest.json")
    return Fault("no manifest.json in it", damaged=False) if raw is None else parse_manifest(raw)


def parse_manifest(raw: bytes) -> dict[str, list] | Fault:
    """Name -> size and hash of a checkpoint's files, from the content of its manifest."""
    try:
        files = {str(name): [int(size), str(expected)] for name, (size, expected) in json.loads(raw).items()}
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        return Fault(f"manifest.json unreadable: {error}")
    if missing := {".metadata", "state.json"} - files.keys():
        return Fault(f"manifest.json does not list {', '.join(sorted(missing))}")
    return files


def fault(folder: Path, hashes: bool = True, parts: bool = False) -> Fault | None:
    """The fault of a checkpoint, None if it verifies; the same on every rank. Ranks share the hashing of files.

    With hashes=False only this rank checks, and only sizes. Raises ConfigError for files outside the folder. A file
    that cannot be read raises ConfigError too, but OSError with hashes=False. With parts, ranks of other nodes may have
    written files that are not in this folder.
    """
    if not hashes:
        files = manifest(folder)
        if parts and not isinstance(files, Fault):
            there = {*names_in(folder)}
            files = {name: value for name, value in files.items() if name in there or not name.startswith("__")}
        return files if isinstance(files, Fault) else _first_fault(folder, files, [*files], hashes=False)
    files = read_together(lambda: manifest(folder), first_only=True)[0]
    if isinstance(files, Fault):
        return files
    own = sorted(files)[dist.get_rank() :: dist.get_world_size()]
    return next(filter(None, read_together(lambda: _first_fault(folder, files, own))), None)


def _first_fault(folder: Path, files: dict[str, list], names: list[str], hashes: bool = True) -> Fault | None:
    for name in names:
        size, expected = files[name]
        try:
            path = path_inside(folder, name)
            actual, found = patiently(path, partial(digest, path)) if hashes else (path.stat().st_size, expected)
        except FileNotFoundError:
            if name in patiently(folder, lambda: os.listdir(folder)):
                raise
            return Fault(f"{name} is missing")
        if actual != size:
            refuse_pointer(path)
            return Fault(f"{name} has {actual} bytes, not {size}")
        if found != expected:
            return Fault(f"{name} is corrupt")
    return None


def beyond(branch: Branch, there: list[Saved]) -> list[Saved]:
    """Checkpoints of older branches with steps after the start of this branch."""
    old = [saved for saved in there if saved.state is not None and saved.branch.number < branch.number]
    return [saved for saved in old if saved.step > branch.began_at]


def surplus(whole: list[Saved], just_saved: Saved, keep: int) -> list[Saved]:
    """Whole checkpoints to remove after one was saved: all but this one and the newest others that are not in doubt.

    keep: checkpoint.keep_latest_k. Nothing is removed if keep is 0, or while the checkpoint just saved is in doubt.
    """
    if not keep or (just_saved.state or {}).get("in_doubt"):
        return []
    others = [saved for saved in whole if saved.order != just_saved.order]
    good = sorted(saved.step for saved in others if not (saved.state or {}).get("in_doubt"))
    kept = good[max(0, len(good) + 1 - keep) :]
    return [saved for saved in others if saved.step not in kept]


def unusable(saved: Saved, steps: int = sys.maxsize) -> Fault | None:
    """Why a verified checkpoint cannot continue a run, or None. Raises ConfigError if another version wrote it.

    steps: those of the run. Weights alone do for a run of which no step is left.
    """
    check_state(saved)
    assert saved.state is not None
    misses = saved.state["model_only"] and saved.step < steps
    return Fault("it holds only weights", damaged=False) if misses else None


def check_state(saved: Saved) -> None:
    """Raises ConfigError if a newer version wrote state.json, or if the content of state.json is not valid."""
    state, where = saved.state or {}, f"{saved.folder}/state.json"
    version = state.get("version", 0)
    if type(version) is not int or version > VERSION:
        reason = f"version {version!r}, and this code reads versions up to {VERSION}: use the newer code that wrote it"
        raise ConfigError(f"{where}: {reason}")
    counts = {"step": state.get("step"), **{name: state.get(name, 0) for name in ("sequences", "tokens")}}
    wrong = [name for name, value in counts.items() if type(value) is not int or value < 0]
    wrong += [] if type(state.get("model_only")) is bool else ["model_only"]
    if wrong:
        raise ConfigError(f"{where}: {', '.join(wrong)}: not what a checkpoint has there")
    assert saved.branch
