"""A step of one rank on fake tensors in a fake process group: what it would hold and send, before any GPU is paid for.

    NGPU=512 ./run_train.sh --job.config_file recipes/llama405b.toml --comm.mode fake_backend

train.py builds and steps as always; nothing is computed, no message leaves, and neither the tokenizer, the data nor the
device that the recipe names is needed. Layers are not compiled.
"""

import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallelize.mesh import Mesh

_COLLECTIVES = {
    "_allgather_base_": "gather",
    "all_gather_into_tensor": "gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
    "send": "send",
}
"""Operations of torch, in the names that docs/ use."""


def init_fake_group() -> torch.device:
    """Be the rank that RANK says, of WORLD_SIZE that are not there; returns the device of the fake tensors."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    return torch.device("cpu")


@cache
def _fake_mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)  # the mesh's own tensors are real


def fake_tensors(mode: str) -> AbstractContextManager[Any]:
    """Where tensors are fake if comm.mode is "fake_backend"; gives None where they are real."""
    return _fake_mode() if mode == "fake_backend" else nullcontext()


class Meter(TorchDispatchMode):
    """Counts the bytes of live tensors, and those that collectives send in each dimension of the mesh.

    Of a collective it counts the whole buffer that it fills or sums, on this rank.
    """

    def __init__(self, mesh: Mesh | None, tensors: Any = ()) -> None:
        """tensors: those that are there before, in lists of lists. Without a mesh no message is counted."""
        super().__init__()
        groups = mesh.groups() if mesh else {}
        # dp_shard or cp alone is fsdp too.
        order = ("pp", "tp", "cp", "dp_shard", "fsdp", "dp_replicate")
        self._dimensions = {groups[name].group_name: name for name in order if mesh and groups[name].size() > 1}
        self.bytes = self.peak = self.peak_before_update = 0
        self.sent: dict[tuple[str, str], list[int]] = {}
        """(dimension, kind): number and bytes."""
        self._sizes: dict[int, int] = {}
        self._keep(tensors)

    def __enter__(self) -> "Meter":
        # FSDP frees what it has gathered by resizing it to nothing.
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = self._resize(storage, size)
            self._set(storage._cdata, storage.nbytes() if storage._cdata in self._sizes else None)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
        return super().__enter__()

    def __exit__(self, *failure: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*failure)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as what it does to local tensors
        result = function(*args, **(kwargs or {}))
        self._keep(result)
        space, _, name = function._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and name in _COLLECTIVES:
            self._count(_COLLECTIVES[name], space, function._schema, args, result)
        return result

    def note_update(self, *args: object) -> None:
        """Before the optimizer's step, which on fake tensors copies all that it changes."""
        self.peak_before_update = self.peak

    def _keep(self, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                storage = getattr(value, "_local_tensor", value).untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = 0
                    self._set(storage._cdata, storage.nbytes())
                    weakref.finalize(storage, self._drop, storage._cdata)

    def _set(self, key: int, size: int | None) -> None:
        if size is not None:
            self.bytes += size - self._sizes[key]
            self._sizes[key] = size
            self.peak = max(self.peak, self.bytes)

    def _drop(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key, 0)

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


@contextmanager
def stages_that_agree() -> Iterator[None]:
    """Where stages of a pipeline, which in the first step ask each other whether all know their shapes, are told so."""
    from torch.distributed.pipelining.stage import PipelineStage

    votes = {name: getattr(PipelineStage, name) for name in ("_warmup_forward_vote", "_warmup_backward_result")}
    all_known = SimpleNamespace(item=lambda: 1)
    for name in votes:
        setattr(PipelineStage, name, lambda *args, **kwargs: all_known)
    try:
        yield
    finally:
        for name, vote in votes.items():
            setattr(PipelineStage, name, vote)


def report(meter: Meter, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> str:
    """What this rank would hold at the highest point of any step but the first, and send in it, as lines of text."""
    weights, gradients = _bytes(parameters), _bytes(p.grad for p in parameters if p.grad is not None)
    moments = _bytes(value for state in optimizer.state.values() for value in state.values() if value.ndim)
    kept = {
        "weights": weights,
        "gradients": gradients,
        "optimizer state": moments,
        "activations, gathered weights, buffers": max(0, meter.peak_before_update - weights - gradients),
    }
    kept["in all, at the highest point"] = sum(kept.values())
    lines = [f"  {name:40}{size / 2**30:9.2f} GiB" for name, size in kept.items()]
    lines.append("  a step sends" if meter.sent else "  a step sends nothing")
    for (dimension, kind), (number, size) in sorted(meter.sent.items()):
        lines.append(f"    {f'{dimension}: {number:,} x {kind}':38}{size / 2**30:9.2f} GiB")
    return "\n".join(lines)


def _bytes(tensors: Iterable[Tensor]) -> int:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in local)
