"""This rank's shard of a tensor: its slice, its gradients, its bytes."""

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def own_slice(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's slice of a parameter, and the index of its first element in the full tensor."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), offset


def split_like(parameter: Tensor, local: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of `shape`, split like the parameter, from each rank's `local`; `local` itself if there is no split."""
    if not isinstance(parameter, DTensor):
        return local
    size = torch.Size(shape)
    mesh, stride = parameter.device_mesh, torch.empty(size, device="meta").stride()
    whole = DTensor.from_local(local, mesh, parameter.placements, run_check=False, shape=size, stride=stride)
    return whole.to(local.device)  # from_local moves a tensor on the host to the mesh's device


class Slice(NamedTuple):
    """The part of a tensor that a rank holds."""

    start: tuple[int, ...]
    """Index of the first element in the full tensor."""
    shape: tuple[int, ...]

    def of(self, full: Tensor) -> Tensor:
        return full[tuple(slice(first, first + size) for first, size in zip(self.start, self.shape, strict=True))]


def slices_of(parameter: Tensor) -> tuple[Slice, ...]:
    """The slice that each rank of the parameter's mesh holds, in the order of ranks."""
    if not isinstance(parameter, DTensor):
        return (Slice((0,) * parameter.ndim, tuple(parameter.shape)),)
    return _slices(tuple(parameter.shape), tuple(parameter.device_mesh.shape), parameter.placements)


@cache
def _slices(shape: tuple[int, ...], mesh: tuple[int, ...], placements: Any) -> tuple[Slice, ...]:
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    found = []
    for place in itertools.product(*map(range, mesh)):
        own, start = _compute_local_shape_and_global_offset(shape, mesh, [*place], placements)
        found.append(Slice(tuple(start), tuple(own)))
    return tuple(found)


@cache
def knows_slices(rows: int, tp: int, shards: int) -> bool:
    """Whether torch knows which rows a rank holds if tp ranks split a table unevenly, and FSDP splits each part again.

    If parts differ in size, torch computes wrong slices for some ranks, and slices overlap (seen with torch 2.13).
    """
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    placements = (_StridedShard(0, split_factor=tp), Shard(0))
    part = -(-rows // tp)
    for at_tp in range(tp):
        first, last = min(rows, at_tp * part), min(rows, (at_tp + 1) * part)
        shard = -(-(last - first) // shards)
        for at_shard in range(shards):
            start, stop = (min(last, first + place * shard) for place in (at_shard, at_shard + 1))
            (size,), (found,) = _compute_local_shape_and_global_offset(
                (rows,), (shards, tp), [at_shard, at_tp], placements
            )
            if size != stop - start or (size and found != start):
                return False
    return True


def local_part(tensor: Tensor) -> tuple[tuple[dist.ProcessGroup, ...], Tensor]:
    """The groups over whose ranks a tensor is split, and this rank's part."""
    if not isinstance(tensor, DTensor):
        return (), tensor
    mesh = tensor.device_mesh
    split = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return tuple(mesh.get_group(dim) for dim in split if mesh.size(dim) > 1), tensor.to_local()


@torch.no_grad()
def on_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, split as the tensor is; pinned if it comes from a GPU."""
    copy = tensor.to("cpu", copy=True)
    if tensor.is_cuda:
        _, local = local_part(copy)  # with gradients enabled, to_local would return a view
        local.set_(local.pin_memory())  # type: ignore[call-overload]
    return copy


def settle() -> None:
    """Wait until the device has written all that it writes into the host's memory."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def block_of(columns: int) -> int:
    """Size of the blocks of a row, a power of 2 up to 256, that no split over up to 16 tensor parallel ranks cuts.

    columns: of the full tensor. The size is 1 if no block of 4 or more columns fits.
    """
    part = columns // 16 if columns % 16 == 0 else 0
    block = min(part & -part, 256)
    return block if block >= 4 else 1


def exact_norms(tensors: list[Tensor]) -> list[Tensor]:
    """The norm of each tensor, float64.

    On a CPU the float32 sum of a million squares is off by 1e-5, and the error depends on how ranks split the tensor.
    Float32 sums over one row are accurate. Float64 squares are as good, but a CPU converts the whole tensor first.
    """
    if tensors[0].device.type == "cpu":
        rows = (torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32) for tensor in tensors)
        return [torch.linalg.vector_norm(norms, dtype=torch.float64) for norms in rows]
    return list(torch._foreach_norm(tensors, dtype=torch.float64))


def poison_if_not_finite(loss: Tensor) -> Tensor:
    """The loss, with NaN as gradients if the loss is not finite, so that the gradient norm tells every rank."""
    return loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)


def is_copy(parameter: Tensor) -> bool:
    """Whether another pipeline stage holds this parameter and counts it, as for the tied table of the last stage."""
    return getattr(parameter, "copied_from_another_stage", False)


def align_gradients(parameters: list[nn.Parameter]) -> None:
    """Give each gradient its parameter's placement. Gradients of norms are partial sums until here."""
    for parameter in parameters:
        gradient = parameter.grad
        if not (isinstance(parameter, DTensor) and isinstance(gradient, DTensor)):
            continue
        if gradient.placements != parameter.placements:
            gradient = cast(DTensor, gradient.to(torch.float32))
            parameter.grad = gradient.redistribute(placements=parameter.placements).to(parameter.dtype)


def describe_memory(
    parameters: Sequence[Tensor], state_bytes: int, batches: int, state_on_host: bool = False, average_bytes: int = 0
) -> str:
    """The bytes that this rank keeps, as a line of text.

    state_bytes: of the optimizer; batches: accumulation steps or micro-batches of one reduction; average_bytes: of
    averages of weights.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    # Several batches add up unsharded gradients, which are reduced once.
    whole = batches > 1
    gradients = sum(_unsharded_bytes(each) if whole else local_part(each)[1].nbytes for each in trained)
    weights = sum(local_part(parameter)[1].nbytes for parameter in parameters)
    state = "optimizer state on the host" if state_on_host else "optimizer state"
    kept = {"weights": weights, "gradients": gradients, state: state_bytes}
    kept |= {"the average of the weights": average_bytes} if average_bytes else {}
    return "a rank keeps " + ", ".join(f"{_size(size)} of {name}" for name, size in kept.items())


def _unsharded_bytes(parameter: Tensor) -> int:
    """Bytes of the float32 gradient of a parameter that FSDP has gathered; tp or ep may still split it."""
    if not isinstance(parameter, DTensor):
        return parameter.nbytes
    names = parameter.device_mesh.mesh_dim_names or ()
    dims = [dim for dim, name in enumerate(names) if name in ("tp", "ep")]
    split = [dim for dim in dims if not parameter.placements[dim].is_replicate()]
    return 4 * parameter.numel() // math.prod(parameter.device_mesh.size(dim) for dim in split)


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
