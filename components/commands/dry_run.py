"""A step of one rank on fake tensors in a fake process group: what it would hold and send, before any GPU is paid for.

    NGPU=512 ./run_train.sh --job.config_file recipes/llama405b.toml --comm.mode fake_backend

train.py's own functions build the run and step; nothing is computed, no message leaves, and neither the tokenizer, the
data nor the device that the recipe names is needed. Layers are not compiled.
"""

import itertools
import json
import math
import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from components.config import JobConfig, from_json, load_config
from components.data.tokenizer import with_rows
from components.launch.ending import run_to_exit
from components.launch.exit_codes import ExitCode
from components.observe.describe import describe
from components.optim import counter_hash
from components.optim.optimizer import staged_bytes
from components.state.init import give_memory
from models import loss, meta_model
from parallelize import expert, parallelize_model
from parallelize.mesh import Mesh, resolve_degrees
from parallelize.plan.auto import filled
from parallelize.rules import check_layout
from parallelize.rules.chosen import resolved

_COLLECTIVES = {
    "_allgather_base_": "gather",
    "all_gather_into_tensor": "gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
    "alltoall_base_": "all-to-all",
    "send": "send",
}
"""Operations of torch, in the names that docs/ use."""
_FILLS = ("copy_", "split_with_sizes_copy")
"""Operations that write a gathered weight to its place, in FSDP's first gather and in all later ones."""


HIGHEST = "in all, at the highest point"


def init_fake_group() -> torch.device:
    """Join a fake group of WORLD_SIZE ranks as the rank RANK; returns the device of the fake tensors."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    return torch.device("cpu")


class Meter(TorchDispatchMode):
    """Counts the bytes of live tensors, and those that collectives send in each dimension of the mesh.

    The bytes of a collective are those of the whole buffer that it fills or sums on this rank.
    """

    def __init__(self, mesh: Mesh | None, tensors: Any = ()) -> None:
        """tensors: those that exist already, in nested lists. Without a mesh no message is counted."""
        super().__init__()
        groups = mesh.groups() if mesh else {}
        # If only one of dp_shard and cp is above 1, fsdp has the same group, which takes the name fsdp.
        order = ("holders", "ep", "efsdp", "pp", "tp", "cp", "dp_shard", "fsdp", "dp_replicate")
        named = ((name, groups[name]) for name in order if name in groups)
        self._dimensions = {group.group_name: name for name, group in named if group.size() > 1}
        self.bytes = self.peak = self.peak_before_update = 0
        self.paused = False
        self.sent: dict[tuple[str, str], list[int]] = {}
        """(dimension, kind): number and bytes."""
        self._sizes: dict[int, int] = {}
        self._filled: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages of gathered weights, which FSDP frees without an operation: it resizes them to 0."""
        self._keep(tensors)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches the operation again, on local tensors
        result = function(*args, **(kwargs or {}))
        if self.paused:
            return result
        self._keep(result)
        space, _, name = function._schema.name.partition("::")
        if name in _FILLS:
            self._keep((kwargs or {}).get("out", args[0]), may_be_freed=True)
        if space in ("c10d", "_c10d_functional") and name in _COLLECTIVES:
            self._count(_COLLECTIVES[name], space, function._schema, args, result)
        return result

    def note_update(self, *args: object) -> None:
        """Notes the peak before the optimizer's step, because this step copies all fake tensors that it changes."""
        self.peak_before_update = self.peak

    def _keep(self, values: Any, may_be_freed: bool = False) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                storage = getattr(value, "_local_tensor", value).untyped_storage()
                key = storage._cdata
                is_new = key not in self._sizes  # and not a view of a known storage
                if is_new:
                    self._sizes[key] = 0
                    weakref.finalize(storage, self._drop, key)
                if may_be_freed:
                    self._filled[key] = weakref.ref(storage)
                if is_new or may_be_freed:
                    self._set(key, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.bytes += size - self._sizes[key]
        self._sizes[key] = size
        if self.bytes > self.peak:
            self._forget_freed()
            self.peak = max(self.peak, self.bytes)

    def _forget_freed(self) -> None:
        for key, reference in list(self._filled.items()):
            storage = reference()
            if storage is None or not storage.nbytes():
                del self._filled[key]
                self.bytes -= self._sizes[key]
                self._sizes[key] = 0

    def _drop(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key, 0)
        self._filled.pop(key, None)

    def _count(self, kind: str, space: str, schema: Any, args: Any, result: Any) -> None:
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
        if space == "c10d":
            group = dist.ProcessGroup.unbox(given["process_group"]).group_name
            buffer = args[1] if kind == "reduce-scatter" else args[0]
        else:
            group, buffer = given["group_name"], given["input"] if kind == "reduce-scatter" else result
        tensor = buffer[0] if isinstance(buffer, list | tuple) else buffer
        if group in self._dimensions and tensor.numel() > 1:  # not the gradient norm
            count = self.sent.setdefault((self._dimensions[group], kind), [0, 0])
            count[0] += 1
            count[1] += tensor.numel() * tensor.element_size()


class _Rehearsal(Meter):
    """Answers when a step reads values of tensors: every pipeline stage knows its shapes, and no token is padding."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1
        if function is torch.ops.aten.nonzero.default:
            return torch.arange(len(args[0])).unsqueeze(1)
        return super().__torch_dispatch__(function, types, args, kwargs)


@dataclass
class NoData:
    """Stands for the training set: every token has a label."""

    seq_len: int

    def at(self, positions: np.ndarray, seed: int) -> np.ndarray:
        return positions

    def count_valid(self, numbers: np.ndarray) -> int:
        return len(numbers) * self.seq_len

    def count_pairs(self, numbers: np.ndarray) -> int:
        return len(numbers)


@dataclass
class _Pause:
    """A context in which the meter counts nothing."""

    meter: Meter

    def __enter__(self) -> None:
        self.meter.paused = True

    def __exit__(self, *error: object) -> None:
        self.meter.paused = False


@contextmanager
def _pretences(meter: Meter) -> Iterator[None]:
    """A context in which a step on fake tensors has few operations, and a GPU's memory.

    - Updates are not split into a CPU's chunks, because a large model's chunks would be a million operations.
    - Experts are balanced.
    - The loss takes a GPU's chunks of tokens, because a CPU's chunks take less memory.
    - DTensor learns the shape of a new operation's result on fake tensors of global shapes. The meter does not count
      these tensors, because in a run they have no memory.
    """
    of_update, of_loss = counter_hash.CHUNK["cpu"], loss.CHUNK["cpu"]
    to_host, lock = expert.to_host, ShardingPropagator._fake_mode_lock
    counter_hash.CHUNK["cpu"], loss.CHUNK["cpu"] = sys.maxsize, loss.CHUNK["cuda"]
    expert.to_host = lambda sizes, rows: [[rows // sizes.shape[1]] * sizes.shape[1]] * 2
    ShardingPropagator._fake_mode_lock = _Pause(meter)  # type: ignore[assignment]
    yield
    counter_hash.CHUNK["cpu"], loss.CHUNK["cpu"] = of_update, of_loss
    expert.to_host = to_host
    ShardingPropagator._fake_mode_lock = lock


def rehearse(config: JobConfig) -> tuple[train.Run, Meter]:
    """Build and step on fake tensors as the rank RANK of WORLD_SIZE; the Meter has its bytes and messages."""
    device, training = init_fake_group(), config.training
    config = replace(config, compile=replace(config.compile, enable=False))
    degrees = resolve_degrees(config, dist.get_world_size())
    check_layout(config, degrees)
    mesh = Mesh(degrees, device.type, config.parallelism.pipeline_first)
    whole = meta_model(config.model, config.training.dtype)
    stages = parallelize_model(config.model.name)(whole, mesh, config)
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # the mesh's own tensors are real
    with fake:
        give_memory(stages, device)
    run = train.assemble(config, device, mesh, stages, NoData(training.seq_len), None)
    with fake, _Rehearsal(run.mesh, run.parameters) as meter, _pretences(meter):
        run.optimizer.register_step_pre_hook(meter.note_update)
        names = ["tokens", "labels", "positions", *(["document_ids"] if training.masks_documents else [])]
        names += [*run.objective.columns, *(["dropout_keys"] if config.model.lora.dropout else [])]
        batch = {name: torch.zeros(training.local_batch_size, training.seq_len, dtype=torch.int64) for name in names}
        if run.objective.temperature:
            shape = *batch["tokens"].shape, config.distill.top
            batch["teacher_ids"] = torch.zeros(shape, dtype=torch.int32)
            batch["teacher_log_probabilities"] = torch.zeros(shape)
        train.train_step(run, itertools.repeat(batch), train.divisor(run))
    return run, meter


def held(run: train.Run, meter: Meter) -> dict[str, int]:
    """Bytes that this rank would hold at the highest point of any step but the first, by kind and in total.

    Bytes that are only in the host's memory come last.
    """
    weights, gradients = _bytes(run.parameters), _bytes(p.grad for p in run.parameters if p.grad is not None)
    moments = _bytes(value for state in run.optimizer.state.values() for value in state.values() if value.ndim)
    on_host = run.config.optimizer.state_offload
    kept = {
        "weights": weights,
        "gradients": gradients,
        "optimizer state": staged_bytes(run.optimizer) if on_host else moments,
        **({"average of the weights": _bytes(run.averages.kept.values())} if run.averages.kept else {}),
        "activations, gathered weights, buffers": max(0, meter.peak_before_update - weights - gradients),
    }
    kept[HIGHEST] = sum(kept.values())
    return kept | {"optimizer state on the host": moments} if on_host else kept


@dataclass(frozen=True)
class DryRun:
    """Memory and messages of one rank."""

    rank: int
    ranks: int
    memory: dict[str, int]
    """Bytes at the highest point of a step, by kind. HIGHEST is the sum. The host's memory, if any, is not summed."""
    messages: list[tuple[str, str, int, int]]
    """(dimension of the mesh, kind, number, bytes) in a step."""

    def __str__(self) -> str:
        lines = [f"  {name:40}{size / 2**30:9.2f} GiB" for name, size in self.memory.items()]
        lines.append("  a step sends" if self.messages else "  a step sends nothing")
        for dimension, kind, number, size in self.messages:
            lines.append(f"    {f'{dimension}: {number:,} x {kind}':38}{size / 2**30:9.2f} GiB")
        return "\n".join(lines)


def dry_run(config: JobConfig) -> DryRun:
    """The dry run of the rank RANK of WORLD_SIZE."""
    run, meter = rehearse(config)
    messages = [(*place, number, size) for place, (number, size) in sorted(meter.sent.items())]
    return DryRun(dist.get_rank(), dist.get_world_size(), held(run, meter), messages)


def _bytes(tensors: Iterable[Tensor]) -> int:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in local)


def main(argv: list[str]) -> int:
    """One rank's dry run, printed, or as a line of JSON with --json; returns its exit code.

    argv: the usual words, or a resolved job as JSON.
    """
    words = [word for word in argv if word != "--json"]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if words and words[0].startswith("{"):
        config = from_json(words[0])
    else:
        config = filled(resolved(with_rows(load_config(words))), ranks, 1, on_gpu=True)
    found = dry_run(config)
    if "--json" in argv:
        print(json.dumps(asdict(found) | {"highest": found.memory[HIGHEST]}))
        return ExitCode.DONE
    said = describe(config, resolve_degrees(config, found.ranks))
    print(f"rank {found.rank} of {found.ranks}: {said}", found, sep="\n")
    return ExitCode.DONE


if __name__ == "__main__":
    run_to_exit(main, sys.argv[1:])
