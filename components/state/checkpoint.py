"""Checkpoints that any layout can load: tensors by torch.distributed.checkpoint, the rest as JSON.

    <dump_folder>/checkpoint/step-20/
        .metadata, __0_0.distcp, ...   tensors: model.<name>, optimizer.<name>.<moment>
        state.json                     step, sequences consumed, what the data order depends on
        manifest.json                  size and hash of every file

A save is written to a staging folder, made durable, and published by one rename. So a folder called step-N is complete,
and its manifest shows later damage. A background save runs in a thread: the thread ends with its process and cannot
publish anything after a restart. Loading executes no pickle: torch's .metadata, which is one, is read by an unpickler
that knows only the classes of a checkpoint's table of contents.
"""

import pickle
import secrets
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from components.config import Checkpoint, ConfigError
from components.files import digest, read_json, sync, write_json
from components.launch.signals import Agreement
from components.state.folder import Reader, fault, incomplete, steps_in
from parallelize.groups import cpu_backend, gather

STAGING = ".staging-"
REPLACED = ".replaced-"
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""How Python numbers in an optimizer's state are saved."""
_TIMEOUT = timedelta(hours=1)  # ranks wait while others write, and while the first rank makes files durable


class Checkpointer:
    """Saves and loads one run's checkpoints. Every method is called by all ranks together."""

    def __init__(
        self, folder: Path, config: Checkpoint, stages: list[nn.Module], optimizer: torch.optim.Optimizer
    ) -> None:
        self.folder, self.config, self.stages, self.optimizer = folder, config, stages, optimizer
        # A separate group: collectives of a background save must not mix with those of training.
        self._group = dist.new_group(backend=cpu_backend(), timeout=_TIMEOUT)
        self._background = ThreadPoolExecutor(max_workers=1) if config.async_mode == "async" else None
        self._pending: Future[None] | None = None
        self._all_done = Agreement(dist.ReduceOp.MIN)

    def save(self, step: int, state: dict[str, Any], model_only: bool = False, prune: bool = True) -> None:
        """Write step-<step>, publish it, and if prune remove checkpoints beyond keep_latest_k.

        With async_mode = "async" this waits only for the previous save and for a copy of the tensors. Raises OSError on
        every rank if any rank cannot write; older checkpoints are untouched.
        """
        self.wait()
        tensors = self._tensors(with_optimizer=not model_only)
        state = {**state, "step": step, "model_only": model_only}
        if self._background is None:
            self._save(tensors, state, prune)
        else:
            copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            self._pending = self._background.submit(self._save, copies, state, prune)

    def wait(self) -> None:
        """Wait until the background save, if any, is published. Raises as save does."""
        pending, self._pending, self._all_done = self._pending, None, Agreement(dist.ReduceOp.MIN)
        if pending is not None:
            pending.result()

    def poll(self) -> None:
        """Raise a background save's error on every rank at the same step. Called each step; never waits."""
        if self._pending is None:
            return
        if self._all_done(self._pending.done()):
            self.wait()

    def load(self, step: int = -1) -> dict[str, Any] | None:
        """Resume from the newest checkpoint that verifies, or from the given step; returns its state, None without one.

        Raises ConfigError if the given step is missing or does not verify, or if the tensors do not fit the model.
        """
        # Only the first rank lists the folders, since it renames some at the same time.
        steps = self._together(self._tidy, first_only=True)[0]
        if step != -1:
            folder = self.folder / f"step-{step}"
            if reason := fault(folder) or incomplete(folder):
                there = ", ".join(str(number) for number, _ in steps) or "none"
                raise ConfigError(f"checkpoint.load_step = {step}: {folder}: {reason}. Steps there: {there}")
            return self.load_folder(folder)
        for _, folder in reversed(steps):
            corrupt = fault(folder)
            reason = corrupt or incomplete(folder)
            if reason is None:
                return self.load_folder(folder)
            _say(f"checkpoint {folder} passed over: {reason}")
            if corrupt:
                self._together(partial(_quarantine, folder), first_only=True)
        return None

    def load_initial(self) -> dict[str, Any] | None:
        """Start from checkpoint.initial_load_path; returns its state, or None if only the weights are taken.

        Raises ConfigError if nothing there verifies, or if the tensors do not fit the model.
        """
        path, model_only = Path(self.config.initial_load_path or ""), self.config.initial_load_model_only
        steps = self._together(lambda: steps_in(path), first_only=True)[0]
        reasons = [] if steps else [f"{path}: no step-N folder in it"]
        for folder in [folder for _, folder in reversed(steps)] or [path]:
            reason = fault(folder) or (None if model_only else incomplete(folder))
            if reason is None:
                state = self.load_folder(folder, model_only)
                return None if model_only else state
            reasons.append(f"{folder}: {reason}")
            _say(f"checkpoint {folder} passed over: {reason}")
        raise ConfigError(f"checkpoint.initial_load_path: {'; '.join(reasons)}")

    def load_folder(self, folder: Path, model_only: bool = False) -> dict[str, Any]:
        """Load one verified checkpoint into model and optimizer, whatever layout wrote it; returns its state."""
        with_optimizer = not (model_only or "optimizer" in self.config.exclude_from_loading)
        if with_optimizer:
            _allocate_state(self.optimizer)
        tensors = self._tensors(with_optimizer)
        load_tensors(tensors, folder, self._group)
        for name, state, key in self._kept() if with_optimizer else ():
            if not isinstance(state[key], Tensor):
                state[key] = type(state[key])(tensors[name].item())
        return read_json(folder / "state.json")

    def _tensors(self, with_optimizer: bool) -> dict[str, Tensor]:
        """The saved tensors by layout-free names; loading writes into the same tensors."""
        tensors: dict[str, Tensor] = {}
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                tensors[f"model.{name}"] = parameter.detach()
        for name, state, key in self._kept() if with_optimizer else ():
            value = state[key]
            tensors[name] = value if isinstance(value, Tensor) else torch.tensor(value, dtype=_NUMBERS[type(value)])
        return tensors

    def _kept(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """The optimizer's state of trained parameters: (name in the checkpoint, dict that holds the value, its key)."""
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                state = self.optimizer.state.get(parameter, {})
                missing = parameter.requires_grad and self.optimizer.state and not state
                assert not missing, f"{name} is trained, and the optimizer keeps nothing of it"
                yield from ((f"optimizer.{name}.{key}", state, key) for key in state if state[key] is not None)

    def _together(self, action: Callable[[], Any], first_only: bool = False) -> list:
        return together(action, first_only, self._group)

    def _save(self, tensors: dict[str, Tensor], state: dict[str, Any], prune: bool) -> None:
        """All of a save except for the copy; runs in the background with async_mode = "async"."""
        name, staging = f"step-{state['step']}", None
        try:
            staging = self._together(self._prepare, first_only=True)[0]
            parts = self._together(lambda: self._write(staging, tensors))
            files = {file: digest for part in parts for file, digest in part.items()}
            self._together(lambda: self._publish(staging, self.folder / name, files, state), first_only=True)
            if prune:
                self._together(lambda: self._prune(self.folder / name), first_only=True)
        except OSError as error:
            if staging and dist.get_rank() == 0:
                shutil.rmtree(staging, ignore_errors=True)
            raise OSError(f"{self.folder / name} could not be saved: {error}") from error

    def _prepare(self) -> Path:
        """A staging folder with a new name, so that a writer from before a restart cannot disturb it."""
        self._tidy()
        staging = self.folder / f"{STAGING}{secrets.token_hex(4)}"
        staging.mkdir(parents=True)
        return staging

    def _write(self, staging: Path, tensors: dict[str, Tensor]) -> dict[str, list]:
        """Write this rank's part; returns file name -> size and hash."""
        dcp.save(tensors, storage_writer=_Writer(staging), process_group=self._group)
        return {path.name: digest(path) for path in staging.glob(f"__{dist.get_rank()}_*")}

    def _publish(self, staging: Path, target: Path, files: dict[str, list], state: dict[str, Any]) -> None:
        """Make the staged files durable, then publish them by one rename."""
        write_json(staging / "state.json", state)
        files |= {name: digest(staging / name) for name in (".metadata", "state.json")}
        write_json(staging / "manifest.json", files)
        if reason := fault(staging, hashes=False):
            raise OSError(f"{reason}; do all ranks see the same folder?")
        # torch syncs its files too, but flushes .metadata after its fsync.
        for path in (*staging.iterdir(), staging):
            sync(path)
        replaced = self.folder / f"{REPLACED}{target.name}"
        if target.exists():
            target.rename(replaced)
        staging.rename(target)
        sync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self, saved: Path) -> None:
        """Keep the checkpoint just saved and the newest other complete ones; foreign or torn folders are left alone."""
        if self.config.keep_latest_k:
            steps = [folder for _, folder in steps_in(self.folder) if folder != saved]
            whole = [folder for folder in steps if fault(folder, hashes=False) is None]
            for folder in whole[: max(0, len(whole) + 1 - self.config.keep_latest_k)]:
                # Renamed first: a half removed folder would look like a torn checkpoint.
                shutil.rmtree(folder.rename(self.folder / f"{STAGING}{folder.name}"), ignore_errors=True)

    def _tidy(self) -> list[tuple[int, Path]]:
        """Remove the rest of a killed save, restore the folder that it was replacing, and list the checkpoints."""
        for path in self.folder.glob(f"{STAGING}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(f"{REPLACED}*"):
            target = self.folder / path.name.removeprefix(REPLACED)
            if target.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(target)
        return steps_in(self.folder)


def together(action: Callable[[], Any], first_only: bool = False, group: dist.ProcessGroup | None = None) -> list:
    """Run action on every rank, or on the first alone; returns all ranks' results to every rank.

    Raises OSError on every rank if action fails on any rank, so that none waits for the others.
    """
    value, error = None, None
    if dist.get_rank() == 0 or not first_only:
        try:
            value = action()
        except (Exception, dcp.CheckpointException) as failure:
            own = _failures(failure).get(dist.get_rank())
            error = _cause(own) if own else None
    reports: list = [None] * dist.get_world_size()
    dist.all_gather_object(reports, (value, error), group=group)
    if errors := [f"rank {rank}: {error}" for rank, (_, error) in enumerate(reports) if error]:
        raise OSError("; ".join(errors))
    return [value for value, _ in reports]


def load_tensors(
    tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None = None, convert: bool = False
) -> None:
    """Fill tensors, by the names of Checkpointer._tensors, from a verified checkpoint. Called by all ranks.

    Raises ConfigError with every misfit of names, shapes and, unless convert, dtypes.
    """
    reader = Reader(folder)
    try:
        metadata = reader.read_metadata()
        # Each pipeline stage has its own tensors: a saved tensor that no stage has is not in the model.
        names = set().union(*gather(set(tensors)))
        misfits = [misfit for found in gather([*_misfits(tensors, names, metadata, convert)]) for misfit in found]
        if misfits:
            raise ConfigError([f"{folder} does not fit this model: {misfit}" for misfit in dict.fromkeys(misfits)])
        dcp.load(tensors, storage_reader=reader, process_group=group)
    except (dcp.CheckpointException, pickle.UnpicklingError) as failure:
        reasons = [_cause(error) for error in _failures(failure).values()]
        raise ConfigError([f"{folder} is refused: {reason}" for reason in dict.fromkeys(reasons)]) from failure


def _quarantine(folder: Path) -> None:
    names = (f"corrupt-{folder.name}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
    folder.rename(next(path for name in names if not (path := folder.with_name(name)).exists()))


def _failures(failure: BaseException) -> dict[int, BaseException]:
    """Failures by rank: torch raises the wrapped failures of all ranks on each rank."""
    if isinstance(failure, dcp.CheckpointException):
        return {rank: error for rank, (error, _) in failure.failures.items()}
    return {dist.get_rank(): failure}


def _cause(failure: BaseException) -> str:
    return next(iter(str(failure).splitlines()), repr(failure))


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def _allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the optimizer's moments, to load into: a step with zero gradients and zero rate."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _misfits(tensors: dict[str, Tensor], names: set[str], metadata: Metadata, convert: bool) -> Iterator[str]:
    """Misfits of this rank's tensors, and saved tensors that no rank has; names: those of all ranks' tensors."""
    saved: dict[str, Any] = dict(metadata.state_dict_metadata)
    for name, tensor in tensors.items():
        if name not in saved:
            yield f"{name} is missing"
        elif saved[name].size != tensor.shape:
            yield f"{name} is {tuple(saved[name].size)} there and {tuple(tensor.shape)} here"
        elif saved[name].properties.dtype != tensor.dtype and not convert:
            yield f"{name} is {saved[name].properties.dtype} there and {tensor.dtype} here"
    kinds = {name.partition(".")[0] for name in names}
    for name in sorted(saved.keys() - names):
        if name.partition(".")[0] in kinds:
            yield f"{name} is not in this model"


class _Writer(dcp.FileSystemWriter):
    """torch's writer, but it keeps the cause of an error, and notes no path (each Python pickles paths differently)."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as failure:
            # On a full disk torch.save fails with "unexpected pos", which hides the cause from other ranks.
            raise failure.__context__ or failure from None

    def storage_meta(self) -> None:
        return None
