"""One layer on one rank, measured: forward and backward on fake tensors, as the family's own module lays it out.

Nothing is computed and no message is sent: ranks are those of a fake process group. Tensor, context and expert parallel
are the run's own code, so no formula follows a family or a method. FSDP, which memory.py adds, is left out.
"""

import copy
import logging
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import GraphExecGroup

from components.config import ActivationCheckpoint, JobConfig
from models.attention import choose_kernel
from models.moe import Router
from models.nf4 import is_packed
from parallelize import expert, order, parallelize_model
from parallelize.activation import apply_activation_checkpoint
from parallelize.mesh import Degrees, Mesh
from parallelize.sharding import local_part

logging.getLogger("torchao").addFilter(lambda record: "Failed to load" not in record.getMessage())
"""torchao names each kernel that this machine cannot load; a plan calls none of them."""


@dataclass(frozen=True)
class Part:
    """The part of a layer that a rank computes."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    method: str = "ring"
    """parallelism.context_parallel_method."""


class Layer(NamedTuple):
    """Bytes of a layer for one sequence, its weights left out."""

    input: float = 0
    """The layer's input, which is all that full checkpointing keeps."""
    keeps_input: bool = False
    """Without checkpointing, the input is kept from forward to backward."""
    kept: float = 0
    """Kept from forward to backward, without the input."""
    forward: float = 0
    """Highest point of forward, without the input."""
    backward: float = 0
    """Highest point of backward above what is kept, without gradients of weights."""
    gradients: float = 0
    """Gradients of weights at that point."""
    between: float = 0
    """Kept from the backward of inputs to that of weights, without `kept`; 0 unless backward is split."""
    weights: float = 0
    """Highest point of a split backward of weights above what is kept before it, without `gradients`."""
    left: float = 0
    """Kept from it until all layers of the stage have had theirs, without gradients of weights."""

    def times(self, count: float) -> "Layer":
        """The layer for several sequences; gradients are those of one."""
        scaled = Layer(*(count * float(value) for value in self))  # type: ignore[arg-type]
        return scaled._replace(keeps_input=self.keeps_input, gradients=self.gradients)


@contextmanager
def laid_out(
    job: JobConfig, model: nn.Module, part: Part, checkpointing: str = "none", splits: bool = False
) -> Iterator[Any]:
    """A copy of a model on the meta device as the first rank of a part holds it, in a fake group, without FSDP.

    Weights have the precision of forward and backward, except packed ones and routers.
    checkpointing: "none", "full", or "op" for selective checkpointing per operation. splits: backward is split.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    span, dtype = part.tp * part.cp, getattr(torch, job.training.mixed_precision_param)
    degrees = Degrees(dp_shard=part.ep // math.gcd(part.ep, span), cp=part.cp, tp=part.tp, ep=part.ep)
    settings: dict[str, Any] = {
        "tensor_parallel_degree": part.tp,
        "context_parallel_degree": part.cp,
        "context_parallel_method": part.method,
        "pipeline_parallel_degree": 1,
        "pipeline_parallel_sequence_splits": 1,
    }
    local = replace(
        job,
        parallelism=replace(job.parallelism, **settings),
        activation_checkpoint=ActivationCheckpoint(mode="none"),
        compile=replace(job.compile, enable=False),
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=degrees.world_size)
    try:
        with mock.patch.object(order, "apply_data_parallel", _nothing):
            (stage,) = parallelize_model(job.model.name)(copy.deepcopy(model), Mesh(degrees, "cpu"), local)
        mode: Any = "selective" if checkpointing == "op" else checkpointing
        apply_activation_checkpoint(stage, ActivationCheckpoint(mode=mode, selective_ac_option="op"), splits)
        for module in stage.modules():
            for name, weight in module.named_parameters(recurse=False):
                if not (is_packed(weight) or isinstance(module, Router)):
                    module.register_parameter(name, nn.Parameter(weight.detach().to(dtype), weight.requires_grad))
        stage.tie_weights()
        yield stage
    finally:
        dist.destroy_process_group()


def measure(
    job: JobConfig,
    model: nn.Module,
    number: int,
    part: Part,
    tokens: int,
    kernels: str,
    checkpointing: str,
    splits: bool,
) -> Layer:
    """Measure a layer of a model on the meta device.

    tokens: of a sequence on this rank, before tensor parallel splits it. kernels: "cuda" or "cpu"; a GPU's norms and
    attention keep less. checkpointing, splits: as laid_out's.
    """
    dtype = getattr(torch, job.training.mixed_precision_param)
    with laid_out(job, model, part, checkpointing, splits) as stage, FakeTensorMode(allow_non_fake_inputs=True):
        layer = stage.layers[str(number)]
        if kernels == "cuda":
            choose_kernel(stage, "sdpa")
            for norm in (module for module in layer.modules() if isinstance(module, nn.RMSNorm)):
                norm.forward = partial(_fused_norm, norm)  # type: ignore[method-assign]
        layer.to_empty(device="cpu")
        split = part.tp if job.parallelism.sequence_parallel else 1
        width = stage.config.dim * (2 if layer.mtp else 1)
        leaf = torch.empty(1, -(-tokens // split), width, dtype=dtype, requires_grad=True)
        live = _Live([*(local_part(weight)[1] for weight in layer.parameters()), leaf])
        with live, live.pretences():
            windowed, rotated = stage.config.has_window(number), stage.config.has_rope(number)
            positions = torch.zeros(1, tokens, dtype=torch.int64)
            angles = stage._rotation(positions, windowed, rotated)
            visible = stage._visible(positions, positions if job.training.masks_documents else None, windowed)
            live.bytes = live.peak = 0
            hidden = leaf.clone()
            size = live.bytes
            out = layer(hidden, *angles, visible)
            forward, before = live.peak - size, live.bytes
            del hidden
            keeps_input = live.bytes == before
            kept = live.bytes - out.untyped_storage().nbytes()
            found = Layer(size, keeps_input, kept - size * keeps_input, forward)
            live.peak, live.weights = live.bytes, [*layer.parameters()]
            if splits:
                return found._replace(**_split_backward(live, layer, out, leaf, kept))
            out.backward(torch.empty_like(out))
    return found._replace(backward=live.peak - kept - live.gradients_at_peak, gradients=live.gradients_at_peak)


def _split_backward(live: "_Live", layer: nn.Module, out: Tensor, leaf: Tensor, kept: float) -> dict[str, Any]:
    """Fields of a Layer, by the functions with which torch's stages split backward."""
    graph, own = out.grad_fn, out.untyped_storage().nbytes()
    _, groups = stage_backward_input([out], [torch.empty_like(out)], [leaf], layer.parameters())
    backward, leaf.grad = live.peak - kept, None
    before = live.peak = live.bytes
    with GraphExecGroup():  # as parallelize/stage.py
        stage_backward_weight(layer.parameters(), groups)
    assert graph, "a stage's later layers keep the graph of the earlier ones"
    return {
        "backward": backward,
        "gradients": live.gradients_at_peak,
        "between": before - own - kept,
        "weights": live.peak - before - live.gradients_at_peak,
        "left": live.bytes - before - live.gradients(),
    }


def _nothing(*_: object) -> None:
    pass


class _Live(TorchDispatchMode):
    """Counts the bytes of live tensors, and answers when values of tensors are read."""

    def __init__(self, known: list[Tensor]) -> None:
        """known: tensors that do not count."""
        super().__init__()
        self.bytes = self.peak = self.gradients_at_peak = 0
        self.weights: list[Tensor] = []
        """Weights whose gradients at the peak are counted."""
        self._sizes, self.counts = {tensor.untyped_storage()._cdata: 0 for tensor in known}, True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches the operation again, on local tensors
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1
        if function is torch.ops.aten.nonzero.default:  # no token is padding
            return torch.arange(len(args[0])).unsqueeze(1)
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result) if self.counts else ():
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self._sizes:
                storage = tensor.untyped_storage()
                self._sizes[key] = storage.nbytes()
                self.bytes += storage.nbytes()
                if self.bytes > self.peak:
                    self.peak, self.gradients_at_peak = self.bytes, self.gradients()
                weakref.finalize(storage, self._drop, key)
        return result

    def _drop(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)

    def gradients(self) -> int:
        return sum(local_part(weight.grad)[1].nbytes for weight in self.weights if weight.grad is not None)

    @contextmanager
    def pretences(self) -> Iterator[None]:
        """Experts are balanced, and tensors by which DTensor learns a global shape do not count."""
        with (
            mock.patch.object(expert, "to_host", lambda sizes, rows: [[rows // sizes.shape[1]] * sizes.shape[1]] * 2),
            mock.patch.object(ShardingPropagator, "_fake_mode_lock", _Uncounted(self)),
        ):
            yield


class _Uncounted(NamedTuple):
    """A context in which no tensor counts."""

    live: _Live

    def __enter__(self) -> None:
        self.live.counts = False

    def __exit__(self, *error: object) -> None:
        self.live.counts = True


class _FusedNorm(torch.autograd.Function):
    """Keeps what a GPU's kernel keeps: the input, and a float32 number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _fused_norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    plain = type(norm).forward is nn.RMSNorm.forward  # a family's own norm is in float32
    return _FusedNorm.apply(x if plain else x.float(), norm.weight).type_as(x)
