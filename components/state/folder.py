"""Finds checkpoints in a folder and verifies them. Nothing here writes, or executes a pickle."""

import io
import pickle
import re
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from components.config import ConfigError
from components.files import digest, read_json
from parallelize.groups import gather

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """Folders called step-N, in the order of N."""
    if not folder.is_dir():
        return []
    found = ((_STEP.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in found if match)


def find_checkpoint(run: Path, step: int | None) -> tuple[dict[str, Any], Path]:
    """A run's job file by tables, and its checkpoint of that step or the newest that verifies. Called by all ranks.

    Raises ConfigError if run is not a dump_folder, or has no such checkpoint.
    """
    try:
        config = read_json(run / "run.json")["config"]
        folder = run / config["checkpoint"]["folder"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{run}: not the dump_folder of a run: {error}") from error
    there = dict(steps_in(folder))
    chosen = [step] if step is not None else sorted(there, reverse=True)
    checkpoint = next((there[step] for step in chosen if step in there and not fault(there[step])), None)
    if checkpoint is None:
        steps, asked = ", ".join(map(str, there)) or "none", "any step" if step is None else f"step {step}"
        raise ConfigError(f"{folder}: no good checkpoint of {asked}. Steps there: {steps}")
    return config, checkpoint


def fault(folder: Path, hashes: bool = True) -> str | None:
    """The fault of a checkpoint, None if it verifies; the same on every rank. Ranks share the hashing of files.

    With hashes=False only this rank checks, and only sizes.
    """
    reason = None
    try:
        files = read_json(folder / "manifest.json")
        if missing := {".metadata", "state.json"} - files.keys():
            reason = f"manifest.json does not list {', '.join(sorted(missing))}"
        for number, (name, (size, expected)) in enumerate(sorted(files.items())):
            actual = (folder / name).stat().st_size
            if actual != size:
                reason = reason or f"{name} has {actual} bytes, not {size}"
            elif hashes and number % dist.get_world_size() == dist.get_rank() and digest(folder / name)[1] != expected:
                reason = reason or f"{name} is corrupt"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        reason = f"manifest or file unreadable: {error}"
    if not hashes:
        return reason
    return next((found for found in gather(reason) if found), None)


def incomplete(folder: Path) -> str | None:
    """The reason why a verified checkpoint cannot continue a run, or None."""
    return "it holds only weights" if read_json(folder / "state.json")["model_only"] else None


class _Unpickler(pickle.Unpickler):
    """Reads a .metadata file: knows only the classes below, which hold sizes, offsets and file names."""

    _SIZES = ("ChunkStorageMetadata", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")
    _ALLOWED: ClassVar = {
        "torch": ("Size",),
        "torch.serialization": ("_get_layout",),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
        "torch.distributed.checkpoint.metadata": ("Metadata", "MetadataIndex", *_SIZES),
    }

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in self._ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its .metadata asks for {module}.{name}, which no checkpoint needs")


class Reader(dcp.FileSystemReader):
    """torch's reader, but with the unpickler above."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return _Unpickler(io.BytesIO((Path(self.path) / ".metadata").read_bytes())).load()
