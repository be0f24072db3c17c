"""Checkpoints that any layout can load: tensors by torch.distributed.checkpoint, the rest as JSON.

    <dump_folder>/checkpoint/step-20/
        .metadata, __0_0.distcp, ...   tensors: model.<name>, optimizer.<name>.<moment>, averages.<name>
        state.json                     step, sequences consumed, what the data order depends on
        manifest.json                  size and hash of every file

A save is written to a staging folder, made durable, and published by one rename. So a folder called step-N is complete,
and its manifest shows later damage. A background save runs in a thread: the thread ends with its process and cannot
publish anything after a restart. Loading executes no pickle: torch's .metadata, which is one, is read by an unpickler
that knows only the classes of a checkpoint's table of contents.
"""

import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from components.config import Checkpoint, ConfigError
from components.config.files import REPLACED, STAGING, digest, patiently, publish, write_json
from components.launch.signals import Agreement
from components.optim.averages import WeightAverages
from components.state.choice import ABANDONED, DAMAGED, Choice, choose, put_aside
from components.state.copies import HostCopies
from components.state.folder import (
    VERSION,
    Branch,
    Copy,
    Fault,
    Saved,
    beyond,
    check_state,
    fault,
    names_in,
    peek,
    saved_in,
    surplus,
    unusable,
)
from components.state.remote import Remote
from components.state.tensors import fill_copies, load_tensors
from components.state.torchtitan import is_foreign, load_torchtitan
from components.state.weights import left_out_of_stages, load_weights
from models.parameters import is_adapter
from parallelize.groups import patient_group, print_on_rank_0
from parallelize.sharding import settle
from parallelize.together import read_together, together

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""How Python numbers in an optimizer's state are saved."""
MAY_CHANGE = ("rope_scaling", "context_length")
"""Fields of a model's configuration: a run may go on with longer sequences."""
_MAY_START_OTHERWISE = ("rope_theta", "window_rope_theta", "window", "full_every", "frozen")
"""Fields that may differ, too, in a run that starts from the weights of another."""
_MOST_SPARED = 3
"""Checkpoints beyond keep_latest_k that stay while they are copied to checkpoint.remote."""


class Checkpointer:
    """Saves and loads one run's checkpoints. Every method is called by all ranks together."""

    def __init__(
        self,
        folder: Path,
        config: Checkpoint,
        stages: list[nn.Module],
        optimizer: torch.optim.Optimizer,
        averages: WeightAverages | None = None,
    ) -> None:
        self.folder, self.config, self.stages, self.optimizer = folder, config, stages, optimizer
        self.averages = averages or WeightAverages(0.0, stages)
        # A separate group: collectives of a background save must not mix with those of training.
        self._group = patient_group()
        self._background = _thread() if config.async_mode == "async" else None
        self._copies = HostCopies()
        self._pending: Future[None] | None = None
        self._all_done = Agreement(dist.ReduceOp.MIN)
        self.remote: Remote | None = None
        self.leads = dist.get_rank() == 0
        """Whether this rank publishes checkpoints in the folder that it sees."""
        if config.remote:
            self._join_remote()
        self.branch = Branch()
        self.adapted = any(getattr(stage, "adapted", False) for stage in stages)
        self.adapter_scale = max(getattr(stage, "adapter_scale", 0.0) for stage in stages)
        self.base = ""
        """Hash of the base's weights, because checkpoints of adapters lack these weights; empty without adapters."""
        self.excluded: frozenset[str] = frozenset(config.exclude_from_loading)
        """Parts that this start does not load: those of exclude_from_loading that no earlier start has left out."""

    def _join_remote(self) -> None:
        """Number the nodes that have folders of their own: the first rank of each writes there, and copies it.

        Raises ConfigError if a shared folder is needed.
        """
        seen = self.folder.with_name(f".{self.folder.name}-{self._together(secrets.token_hex, first_only=True)[0]}")
        self._together(partial(_touch, seen), first_only=True)
        alone = not self._together(partial(_sees, seen))[dist.get_rank()] and os.environ.get("LOCAL_RANK", "0") == "0"
        firsts = [rank for rank, first in enumerate(self._together(lambda: alone or dist.get_rank() == 0)) if first]
        self._together(partial(seen.unlink, missing_ok=True), first_only=True)
        self.leads = dist.get_rank() in firsts
        node = firsts.index(dist.get_rank()) if self.leads else 0
        if len(firsts) > 1 and self.config.last_save_in_hf:
            reason = f"{len(firsts)} nodes have a {self.folder} of their own; an export needs one that they share"
            raise ConfigError(f"checkpoint.last_save_in_hf = true: {reason}")
        self.remote = Remote(self.folder, self.config, node, len(firsts))

    @property
    def apart(self) -> bool:
        """Whether nodes have folders of their own, each with the files of its ranks."""
        return self.remote is not None and self.remote.nodes > 1

    def save(self, step: int, state: dict[str, Any], model_only: bool = False, prune: bool = True) -> None:
        """Write step-<step>, publish it, and remove checkpoints beyond keep_latest_k.

        prune=False is for saves while steps are skipped: it removes nothing, and marks this checkpoint as in doubt.
        Later saves that prune do not count those in doubt among keep_latest_k. With async_mode = "async" this waits
        only for the previous save and for a copy of the tensors. Raises OSError on every rank if any rank cannot write;
        older checkpoints are untouched.
        """
        self.wait()
        tensors = self._tensors(with_optimizer=not model_only) | dict(self._averages())
        lineage = {"version": VERSION, "branch": asdict(self.branch), "ranks": dist.get_world_size()}
        lineage["model"] = self._model()
        lineage |= {"base": self.base, "adapter_scale": self.adapter_scale} if self.base else {}
        # Without moments, no step has been accepted so far.
        lineage["has_moments"] = any(self._together(lambda: bool(self.optimizer.state)))
        lineage["has_averages"] = self.averages.started
        state = {**state, **lineage, "step": step, "model_only": model_only, "in_doubt": not prune}
        if self._background is None:
            settle()
            self._save(tensors, state)
        else:
            self._pending = self._background.submit(self._save, self._copies.of(tensors), state)

    def wait(self) -> None:
        """Wait until the background save, if any, is published. Raises as save does."""
        pending, self._pending, self._all_done = self._pending, None, Agreement(dist.ReduceOp.MIN)
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait until all is published, and at most remote_timeout_seconds for copies in the store. Raises as save."""
        self.wait()
        if self.remote:
            self._by_firsts(self.remote.finish)

    def poll(self) -> None:
        """Raise a background save's error on every rank at the same step. Called each step; never waits."""
        if self._pending is None:
            return
        if self._all_done(self._pending.done()):
            self.wait()

    def load(self, steps: int = sys.maxsize) -> dict[str, Any] | None:
        """Resume from the checkpoint that choose finds, and return its state; None if the run starts from elsewhere.

        steps: those of the run. If none is left, the weights alone are loaded of a checkpoint that has no more.
        Raises ConfigError as choose does, or if the tensors do not fit the model.
        """
        read_together(lambda: self._tidy() if self.leads else None)
        copies = self._offered()
        choice = choose(self.folder, self.config, steps, copies, self._bring, self.apart)
        if copies and choice.base and choice.base.order != (newest := max(copy.order for copy in copies)):
            choice.said.append(
                f"step-{choice.base.step} is taken: the newest in {self.config.remote} is step-{newest[1]}"
            )
        for line in choice.said:
            print_on_rank_0(line)
        self.branch, self.excluded = choice.branch, choice.excluded
        state = self.load_folder(choice.base) if choice.base else None
        if not self.config.load_only:
            self._by_firsts(partial(_settle, choice))
            if self.remote and self.leads:
                self.remote.wake()
        return state

    def _offered(self) -> list[Copy]:
        """The whole checkpoints in the store. If the store does not answer, none, and a run with local ones goes on.

        Raises ConfigError if the store does not answer and no checkpoint is here: the run may have been saved there.
        """
        remote = self.remote
        if remote is None:
            return []
        if self.apart and not self.config.load_only:
            # nodes bring together what each of them has, and then node 0 writes the manifest
            for first_only in (False, True):
                read_together(lambda: remote.sync(newest_only=True) if self.leads else None, first_only)
        try:
            copies, said = self._together(remote.offered, first_only=True)[0]
        except OSError as error:
            here = read_together(lambda: saved_in(self.folder), first_only=True)[0]
            if self.apart or not here:
                reason = f"{error}; the run may have been saved there, and no checkpoint is here"
                remedy = "start again when the store answers, or remove the key to begin anew"
                raise ConfigError(f"checkpoint.remote: {reason}: {remedy}") from None
            print_on_rank_0(f"checkpoint.remote: {error}; the checkpoints of {self.folder} are taken")
            return []
        for line in said:
            print_on_rank_0(line)
        return copies

    def _bring(self, copy: Copy) -> Fault | None:
        assert self.remote
        remote = self.remote
        faults = read_together(lambda: remote.bring(copy) if self.leads else None)
        reason = next(filter(None, faults), None)
        if reason is None:
            print_on_rank_0(f"{copy.folder.name} was taken from {remote.store.url}")
        return reason

    def load_initial(self) -> dict[str, Any] | None:
        """Start from checkpoint.initial_load_path; returns its state; None if only weights, or nothing, is loaded.

        Raises ConfigError if nothing there verifies, or if the tensors do not fit the model.
        """
        if not self.config.initial_load_path:
            return None
        path, model_only = Path(self.config.initial_load_path), self.config.initial_load_model_only
        more = ""
        if self.config.initial_load_in_hf:
            load_weights(self.stages, path, self.config.initial_load_new_rows)
            more = left_out_of_stages(self.stages, path)
        state = None if self.config.initial_load_in_hf else self._load_checkpoint(path, model_only)
        if state is None:
            print_on_rank_0(f"weights from {path}{more}")
        return state

    def _load_checkpoint(self, path: Path, model_only: bool) -> dict[str, Any] | None:
        """Load the newest good checkpoint of a folder, or a step-N folder itself; returns what load_initial does."""
        there = read_together(lambda: saved_in(path) or [Saved(0, path, peek(path))], first_only=True)[0]
        reasons = [] if there[0].folder != path else [f"{path}: no step-N folder in it"]
        for saved in reversed(there):
            if model_only and is_foreign(saved):
                load_torchtitan(self.stages, saved.folder)
                return None
            reason = fault(saved.folder) or (None if model_only else unusable(saved))
            if reason is None:
                state = self.load_folder(saved, model_only)
                return None if model_only else state
            reasons.append(f"{saved.folder}: {reason}")
            print_on_rank_0(f"checkpoint {saved.folder} passed over: {reason}")
        raise ConfigError(f"checkpoint.initial_load_path: {'; '.join(reasons)}")

    def load_folder(self, saved: Saved, model_only: bool = False) -> dict[str, Any]:
        """Load one verified checkpoint into model and optimizer, whatever layout wrote it; returns its state.

        model_only: load only weights, and for a model with adapters only the base.
        """
        check_state(saved)
        state = saved.state or {}
        self._check_model(saved.folder, state.get("model") or {}, MAY_CHANGE + _MAY_START_OTHERWISE * model_only)
        if self.base and not state.get("base"):
            reason = "all weights were trained, and lora.rank trains adapters: use another job.dump_folder, with"
            raise ConfigError(f"{saved.folder} is refused: {reason} checkpoint.initial_load_path = {saved.folder}")
        if self.base and (there := state.get("base")) != self.base:
            reason = f"its adapters were trained on another base, {there}; this one is {self.base}"
            raise ConfigError(f"{saved.folder} is refused: {reason}: look at checkpoint.initial_load_path")
        if self.base and (scale := state.get("adapter_scale", self.adapter_scale)) != self.adapter_scale:
            reason = f"its adapters count {scale:g} times, and {self.adapter_scale:g} times in this run"
            raise ConfigError(f"{saved.folder} is refused: {reason}: look at lora.alpha and lora.use_rslora")
        weights_only = model_only or state.get("model_only") or "optimizer" in self.excluded
        with_optimizer = not weights_only and state.get("has_moments", True)
        if with_optimizer:
            _allocate_state(self.optimizer)
        if not model_only:
            self._begin_averages(saved.folder, state.get("has_averages", False))
        named = [*self._named_tensors(with_optimizer, of_base=model_only)]
        named += self._averages()
        tensors = dict(named)
        load_tensors(tensors, saved.folder, self._group, convert=model_only)
        fill_copies(named, tensors)
        for name, kept, key in self._kept() if with_optimizer else ():
            if not isinstance(kept[key], Tensor):
                kept[key] = type(kept[key])(tensors[name].item())
        return state

    def _model(self) -> dict[str, Any]:
        """The model's configuration, as JSON has it."""
        config = getattr(self.stages[0], "config", None)
        return json.loads(json.dumps({**asdict(config), "head_size": config.head_dim})) if config else {}

    def _check_model(self, folder: Path, theirs: dict[str, Any], may_change: tuple[str, ...]) -> None:
        """Raises ConfigError if the checkpoint is of another model. Prints changes of fields that may change."""
        ours = self._model()
        changes = {
            name: f"{name} = {theirs[name]} there and {ours[name]} here"
            for name in ours
            if theirs.get(name, ours[name]) != ours[name]
        }
        if other := [change for name, change in changes.items() if name not in may_change]:
            reason = ", ".join(other)
            raise ConfigError(f"{folder} is of another model: {reason}: look at model.flavor and model.sizes")
        if changes:
            print_on_rank_0(f"the model changes after {folder}: {', '.join(changes.values())}")

    def _tensors(self, with_optimizer: bool) -> dict[str, Tensor]:
        return dict(self._named_tensors(with_optimizer))

    def _named_tensors(self, with_optimizer: bool, of_base: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yields (layout-free name, tensor) of all that is saved; loading writes into the same tensors.

        Adapted models: adapters only; with of_base, the base only.

        A rank with both ends of a pipeline has a tied table, and its moments, twice.
        """
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                if not self.adapted or is_adapter(name) != of_base:
                    yield f"model.{name}", parameter.detach()
        for name, state, key in self._kept() if with_optimizer else ():
            value = state[key]
            yield name, value if isinstance(value, Tensor) else torch.tensor(value, dtype=_NUMBERS[type(value)])

    def _averages(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name in the checkpoint, average) of each trained parameter."""
        return ((f"averages.{name}", average) for name, average in self.averages.named())

    def _begin_averages(self, folder: Path, there: bool) -> None:
        """Allocate the averages, to load into, if run and checkpoint have them; says if only one of the two has."""
        if self.averages.decay and there and "averages" not in self.excluded:
            self.averages.start()
        elif self.averages.decay:
            why = "checkpoint.exclude_from_loading has averages" if there else f"{folder} has no average"
            print_on_rank_0(f"{why}: the average of the weights starts anew, from the weights after the next step")
        elif there:
            print_on_rank_0(f"averages.ema_decay = 0: the average of the weights in {folder} is not loaded")

    def _kept(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """The optimizer's state of trained parameters: (name in the checkpoint, dict that holds the value, its key)."""
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                state = self.optimizer.state.get(parameter, {})
                missing = parameter.requires_grad and self.optimizer.state and not state
                assert not missing, f"{name} is trained, and the optimizer keeps nothing of it"
                yield from ((f"optimizer.{name}.{key}", state, key) for key in state if state[key] is not None)

    def _by_firsts(self, action: Callable[[], Any]) -> list:
        """Together, on the first rank of each folder."""
        return self._together(lambda: action() if self.leads else None)

    def _together(self, action: Callable[[], Any], first_only: bool = False) -> list:
        return together(action, first_only, self._group)

    def _save(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """All of a save except for the copy; runs in the background with async_mode = "async"."""
        name, staging = f"step-{state['step']}", None
        try:
            token = self._together(partial(secrets.token_hex, 4), first_only=True)[0]
            staging = self.folder / f"{STAGING}{token}"  # a new name: a writer from before a restart cannot disturb it
            self._by_firsts(partial(self._prepare, staging))
            parts = self._together(lambda: self._write(staging, tensors))
            files = {file: digest for part in parts for file, digest in part.items()}
            heads = self._together(lambda: self._write_heads(staging, files, state), first_only=True)[0]
            self._by_firsts(lambda: self._publish(staging, self.folder / name, heads, state))
        except OSError as error:
            if staging and self.leads:
                shutil.rmtree(staging, ignore_errors=True)
            raise OSError(f"{self.folder / name} could not be saved: {error}") from error

    def _prepare(self, staging: Path) -> None:
        self._tidy()
        staging.mkdir(parents=True)

    def _write(self, staging: Path, tensors: dict[str, Tensor]) -> dict[str, list]:
        """Write this rank's part; returns file name -> size and hash."""
        dcp.save(tensors, storage_writer=_Writer(staging), process_group=self._group)
        return {path.name: digest(path) for path in staging.glob(f"__{dist.get_rank()}_*")}

    def _write_heads(self, staging: Path, files: dict[str, list], state: dict[str, Any]) -> dict[str, bytes]:
        """Write state.json and the manifest; returns what other nodes need of them and of .metadata."""
        write_json(staging / "state.json", state)
        files |= {name: digest(staging / name) for name in (".metadata", "state.json")}
        write_json(staging / "manifest.json", files)
        names = (".metadata", "state.json", "manifest.json") if self.apart else ()
        return {name: (staging / name).read_bytes() for name in names}

    def _publish(self, staging: Path, target: Path, heads: dict[str, bytes], state: dict[str, Any]) -> None:
        """Make the staged files durable, then publish them by one rename."""
        for name, content in heads.items():
            (staging / name).write_bytes(content)
        if reason := fault(staging, hashes=False, parts=self.apart):
            raise OSError(f"{reason}; do all ranks see the same folder?")
        with self.remote.lock if self.remote else nullcontext():
            publish(staging, target)  # torch syncs its files too, but flushes .metadata after its fsync
            try:
                self._clean_up(Saved(state["step"], target, state), prune=not state["in_doubt"])
            except (OSError, ConfigError) as error:
                print_on_rank_0(
                    f"{target} is saved; nothing older was put aside or pruned, since it cannot be read: {error}"
                )
        if self.remote:
            self.remote.wake()

    def _clean_up(self, just_saved: Saved, prune: bool) -> None:
        """Put aside checkpoints of older branches with steps after the start of this branch; then prune."""
        self._tidy()
        for saved in beyond(self.branch, saved_in(self.folder)):
            put_aside(saved.folder, f"{ABANDONED}{saved.folder.name}")
        if prune and self.config.keep_latest_k:
            self._prune(just_saved)

    def _prune(self, just_saved: Saved) -> None:
        """Keep the checkpoint just saved and the newest other good ones; foreign or torn folders are left alone."""
        others = [saved for saved in saved_in(self.folder) if saved.folder != just_saved.folder]
        whole = [saved for saved in others if fault(saved.folder, hashes=False, parts=self.apart) is None]
        removed = surplus(whole, just_saved, self.config.keep_latest_k)
        spared = [saved for saved in removed if self.remote and saved.folder in self.remote.held][-_MOST_SPARED:]
        for saved in removed:
            if saved not in spared:
                self._remove(saved.folder)

    def _remove(self, folder: Path) -> None:
        """Remove a checkpoint; renamed first, because a half removed one looks torn, or like another program's."""
        shutil.rmtree(folder.rename(self.folder / f"{STAGING}{folder.name}"), ignore_errors=True)

    def _tidy(self) -> None:
        """Remove what a killed save left: its staging folder, and the checkpoint that it was replacing.

        A replaced checkpoint is restored if nothing has its name, and put aside if it belongs to another branch, or
        if no run of ours has written it.
        """
        names = names_in(self.folder)
        for name in [name for name in names if name.startswith(STAGING)]:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in [name for name in names if name.startswith(REPLACED)]:
            path, target = self.folder / name, self.folder / name.removeprefix(REPLACED)
            if target.name not in names:
                path.rename(target)
                continue
            before, now = (Saved(0, each, peek(each)) for each in (path, target))
            if before.state is not None and before.branch.number == now.branch.number:
                self._remove(path)
            else:
                put_aside(path, f"{ABANDONED}{target.name}")


def _thread() -> ThreadPoolExecutor:
    """A thread on this rank's GPU. By default torch's writer opens a context on the first GPU, and waits for it."""
    if not torch.cuda.is_available():
        return ThreadPoolExecutor(1)
    return ThreadPoolExecutor(1, initializer=partial(torch.cuda.set_device, torch.cuda.current_device()))


def _settle(choice: Choice) -> None:
    """Rename a choice's damaged checkpoints, and its checkpoints of other branches with later steps."""
    for prefix, moved in ((DAMAGED, choice.damaged), (ABANDONED, choice.later)):
        for saved in moved:
            if saved.folder.exists():  # a node with a folder of its own may lack it
                put_aside(saved.folder, f"{prefix}{saved.folder.name}")


def _touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def _sees(path: Path) -> bool:
    """Whether a file is there. A shared file system may show a new file late."""
    with suppress(OSError):
        patiently(path, path.stat)
        return True
    return False


def _allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the optimizer's moments, to load into, by a step with zero gradients and zero rate."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    settle()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


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
