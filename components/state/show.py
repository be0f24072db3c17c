"""Checkpoints as text: a list, whether files are whole, and how two checkpoints differ. Runs no pickle."""

import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from components.config import ConfigError
from components.config.files import read_json
from components.state.choice import ABANDONED, DAMAGED
from components.state.folder import Saved, fault, find_checkpoint, names_in, peek, saved_in
from components.state.tensors import Reader, open_reader
from components.state.torchtitan import is_foreign

_ASIDE = re.compile(rf"(?:{DAMAGED}|{ABANDONED})step-(\d+)(?:-\d+)?")


def folder_of(run: Path) -> Path:
    """The folder of checkpoints of a run. `run` may also be a folder of checkpoints itself."""
    try:
        return run / read_json(run / "run.json")["config"]["checkpoint"]["folder"]
    except FileNotFoundError:
        if not run.exists():
            raise ConfigError(f"{run}: no such folder") from None
        return run
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{run}/run.json: {error}") from error


def ls(run: Path) -> Iterator[str]:
    """A line for each checkpoint, with those that were put aside. Raises ConfigError."""
    folder = folder_of(run)
    rows = [_row(saved) for saved in [*saved_in(folder), *_aside(folder)]]
    head = ("name", "MiB", "saved", "ranks", "branch", "")
    yield from _table([head, *rows]) if rows else [f"{folder}: no checkpoint in it"]


def _aside(folder: Path) -> list[Saved]:
    found = ((_ASIDE.fullmatch(name), folder / name) for name in names_in(folder))
    return [Saved(int(match[1]), path, peek(path)) for match, path in found if match]


def _row(saved: Saved) -> tuple[str, ...]:
    state, files = saved.state or {}, [path for path in saved.folder.iterdir() if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 2**20
    when = datetime.datetime.fromtimestamp(max((path.stat().st_mtime for path in files), default=0))
    reason = fault(saved.folder, hashes=False)
    notes = [str(reason)] if reason else ["weights only"] * bool(state.get("model_only"))
    notes += ["saved while steps were skipped"] * bool(state.get("in_doubt"))
    branch = saved.branch
    line = f"{branch.number}, from step {branch.began_at}" if branch.number else "0"
    # Each rank writes files of its own. Their names give the number of ranks if state.json does not have it.
    writers = len({path.name.split("_")[2] for path in files if path.name.startswith("__")})
    return saved.folder.name, f"{size:.1f}", f"{when:%Y-%m-%d %H:%M}", str(state.get("ranks", writers)), line, *notes


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    rows = [(*row[:5], "; ".join(row[5:])) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def verify(run: Path, step: int | None) -> tuple[list[str], bool]:
    """A line for each checkpoint whose files were read and hashed; and whether all are whole. Raises ConfigError."""
    lines, good = [], True
    for saved in saved_in(folder_of(run)):
        if step in (None, saved.step):
            reason = fault(saved.folder)
            lines.append(f"{saved.folder}: {reason or 'whole'}")
            good = good and reason is None
    if not lines:
        raise ConfigError(f"{folder_of(run)}: no checkpoint of {'any step' if step is None else f'step {step}'} in it")
    return lines, good


def open_checkpoint(path: Path) -> Reader:
    """A reader of a run's newest good checkpoint, or of a checkpoint's own folder. Raises ConfigError."""
    folder = find_checkpoint(path, None)[1] if (path / "run.json").exists() else path
    saved = Saved(0, folder, peek(folder))
    if is_foreign(saved):
        return open_reader(folder, foreign=True)
    if reason := fault(folder):
        raise ConfigError(f"{folder}: {reason}")
    return open_reader(folder)


def diff(left: Reader, right: Reader) -> tuple[list[str], bool]:
    """The tensors in which two checkpoints differ: names, sizes, dtypes, largest difference; and whether all are equal.

    Holds one tensor of each at a time.
    """
    entries = [_tensors(reader) for reader in (left, right)]
    names, lines = sorted({*entries[0], *entries[1]}), []
    for name in names:
        kinds = [f"{tuple(entry[name].size)} {entry[name].properties.dtype}" for entry in entries if name in entry]
        if len(kinds) == 1:
            lines.append(f"{name}: only in {(left if name in entries[0] else right).path}")
        elif kinds[0] != kinds[1]:
            lines.append(f"{name}: {kinds[0]} and {kinds[1]}")
        elif not torch.equal(*(pair := (_read(left, name), _read(right, name)))):
            lines.append(f"{name}: {_difference(*pair)}")
    return [*lines, f"{len(names) - len(lines)} of {len(names)} tensors are equal"], not lines


def _difference(left: Tensor, right: Tensor) -> str:
    differs = (left != right).sum()
    largest = (left.double() - right.double()).abs().max()
    return f"{int(differs)} of {left.numel()} numbers differ, by up to {largest.item():.3g}"


def _tensors(reader: Reader) -> dict[str, Any]:
    entries = reader.metadata.state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _read(reader: Reader, name: str) -> Tensor:
    entry = _tensors(reader)[name]
    tensors: dict[str, Any] = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
    dcp.load(tensors, storage_reader=reader)
    return tensors[name]
