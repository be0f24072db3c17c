"""Expert parallel: the experts of a layer are divided over ranks, and rows go to the rank of their expert and back.

The same ranks that data, context and tensor parallel use are divided once more, as efsdp x ep (mesh.py). Tensor
parallel ranks each route their own part of a sequence, so that experts are never cut.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from components.config import Balancing, Parallelism
from models.grouped import ToRows
from models.layers import FeedForward
from models.moe import Balance, Experts, Mixture, MixtureBlock, Router
from parallelize.groups import arrived
from parallelize.mesh import Mesh
from parallelize.sharding import local_part
from parallelize.tensor import partial_sum


def has_experts(model: nn.Module) -> bool:
    return any(isinstance(module, Mixture) for module in model.modules())


def expert_shards(mesh: Mesh, shards: DeviceMesh) -> DeviceMesh:
    """The mesh over whose last dimension FSDP shards the weights of experts. shards: FSDP's mesh for other weights.

    Called by all ranks, also by those whose stages have no layer, because all ranks have to make the meshes of experts.
    """
    _ = mesh["holders"], mesh["ep"]
    if mesh.degrees.tp == mesh.degrees.ep == 1:
        return shards
    return mesh["dp_replicate", "efsdp"] if mesh["dp_replicate"].size() > 1 else mesh["efsdp"]


def apply_expert_parallel(model: nn.Module, mesh: Mesh, config: Balancing, sequences: int, length: int) -> None:
    """Give each rank of ep its part of the experts of every layer, and every rank the whole routers.

    sequences, length: of the global batch.
    """
    for module in model.modules():
        if isinstance(module, Mixture):
            _replicate(module.router, mesh)
            if config.sequence_loss_factor or config.z_loss_factor:
                factors = config.sequence_loss_factor / sequences, config.z_loss_factor / (sequences * length)
                module.router.balance = Balance(*factors, length, partial(_summed, mesh))
            if mesh.degrees.ep > 1:
                _share_out(module.experts, mesh["ep"])
                module.exchange = AllToAll(mesh["ep"].get_group())


def _summed(mesh: Mesh, counts: Tensor) -> Tensor:
    """The sum of counts over the ranks that have parts of the same sequences."""
    for name in ("cp", "tp"):
        if mesh[name].size() > 1:
            dist.all_reduce(counts, group=mesh[name].get_group())
    return counts


def _replicate(router: Router, mesh: Mesh) -> None:
    """Every rank routes its own tokens, so that gradients are partial sums until align_gradients.

    FSDP ignores routers, because it would gather them in bfloat16, in which close scores become equal.
    """
    holders = mesh["holders"]
    if holders.size() == 1:
        return
    for name, weight in list(router.named_parameters()):
        whole = DTensor.from_local(weight.detach(), holders, [Replicate()], run_check=False)
        router.register_parameter(name, nn.Parameter(whole, requires_grad=weight.requires_grad))

    def forward(x_TD: Tensor, sequences_T: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        own = {name: partial_sum(weight) for name, weight in router.named_parameters()}
        return router.route(x_TD, sequences_T, batch, own)

    router.forward = forward  # type: ignore[method-assign]


def _share_out(experts: Experts, ep: DeviceMesh) -> None:
    for name, weight in list(experts.named_parameters()):
        shared = distribute_tensor(weight.detach(), ep, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(shared, requires_grad=weight.requires_grad))

    def forward(rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        # getattr, because the attribute may be a copy in another precision.
        own = {name: getattr(experts, name).to_local() for name, _ in experts.named_parameters()}
        return experts.multiply(rows_RD, counts_E, own)

    experts.forward = forward  # type: ignore[method-assign]


class Sent(NamedTuple):
    """Sizes and order of an exchange of rows, by which combine sends the rows back."""

    sizes: list[int]
    """Rows sent to each rank."""
    received_sizes: list[int]
    """Rows received from each rank."""
    order: Tensor
    """Place among the received rows sorted by expert -> place in the receive buffer."""
    inverse: Tensor


class AllToAll(NamedTuple):
    """An Exchange by two all-to-alls of rows, and one of their counts."""

    group: ProcessGroup

    def dispatch(self, rows_RD: Tensor, counts_E: Tensor, meanwhile: Callable[[], None]) -> tuple[Tensor, Tensor, Sent]:
        """Send rows to the ranks of their experts. The host waits for the counts, which are the sizes of messages."""
        sent = counts_E.view(self.group.size(), -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        sizes, received_sizes = to_host(torch.stack((sent.sum(1), received.sum(1))), len(rows_RD))
        arriving = self._send(rows_RD, sizes, received_sizes)
        meanwhile()
        rows_RD = arrived(arriving)
        experts = torch.arange(received.shape[1], device=received.device).expand_as(received)
        expert_R = experts.flatten().repeat_interleave(received.flatten(), output_size=len(rows_RD))
        order = expert_R.argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        rows_RD = ToRows.apply(rows_RD, order, inverse[:, None])
        return rows_RD, received.sum(0), Sent(sizes, received_sizes, order, inverse)

    def combine(self, rows_RD: Tensor, sent: Sent) -> Tensor:
        rows_RD = ToRows.apply(rows_RD, sent.inverse, sent.order[:, None])
        return arrived(self._send(rows_RD, sent.received_sizes, sent.sizes))

    def _send(self, rows_RD: Tensor, sizes: list[int], received_sizes: list[int]) -> Tensor:
        """The received rows; the transfer may still be under way."""
        from torch.distributed import _functional_collectives as collectives

        return collectives.all_to_all_single_autograd(rows_RD, received_sizes, sizes, self.group)


def balance(stages: list[nn.Module], mesh: Mesh, speed: float, accepted: Tensor) -> Tensor | None:
    """Move biases towards equal loads, by the rows of the whole global batch; called once a step by all ranks.

    Returns the rows of each expert, (layers of these stages, E) int64; None without experts. Biases stay if not
    accepted. A bias moves by the sign of a difference of integers, which is the same at every layout.
    """
    blocks = [module for stage in stages for module in stage.modules() if isinstance(module, MixtureBlock)]
    if not blocks:
        return None
    rows = torch.stack([block.rows_E for block in blocks if block.rows_E is not None])
    if mesh["holders"].size() > 1:
        dist.all_reduce(rows, group=mesh["holders"].get_group())
    for block, rows_E in zip(blocks, rows, strict=True):
        block.rows_E = None
        if speed:
            _, bias = local_part(block.mixture.router.bias.detach())  # the whole bias, which every rank has
            direction = (rows_E.sum() - rows_E * len(rows_E)).sign()
            bias.add_((direction * accepted).to(bias.device), alpha=speed)
    return rows


def to_host(sizes: Tensor, rows: int) -> list[list[int]]:
    """Copy to the host the numbers of rows sent to and received from each rank, (2, ranks). Waits for the device.

    rows: this rank's rows in all.
    """
    return sizes.tolist()


class MixtureOfParts(ParallelStyle):
    """A mixture whose ranks each route their part of the sequence. Shared experts are split like a feed-forward layer.

    Some layers may have a feed-forward instead of a mixture; this style splits the feed-forward too.
    Takes and gives hidden states (B, S, D) in the layout `hidden`: split along S, or the same on all ranks.
    """

    def __init__(self, hidden: Placement) -> None:
        self.hidden = hidden

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, FeedForward):
            self._share_columns(module, device_mesh)
            return module
        assert isinstance(module, Mixture)
        routed = module.routed

        def of_own_part(
            x_BSD: Tensor, padding_BS: Tensor | None, meanwhile: Callable[[], None] = lambda: None
        ) -> Tensor:
            if not isinstance(x_BSD, DTensor):
                x_BSD = DTensor.from_local(x_BSD, device_mesh, [self.hidden], run_check=False)
            part = x_BSD.redistribute(placements=[Shard(1)])
            if padding_BS is not None:
                whole = DTensor.from_local(padding_BS, device_mesh, [Replicate()], run_check=False)
                padding_BS = whole.redistribute(placements=[Shard(1)]).to_local()
            out = routed(part.to_local(), padding_BS, meanwhile)
            # The length of a sequence need not be a multiple of the ranks.
            shape: Any = {"shape": part.shape, "stride": part.stride()}
            parts = DTensor.from_local(out, device_mesh, [Shard(1)], run_check=False, **shape)
            return parts.redistribute(placements=[self.hidden]).to_local()

        module.routed = of_own_part  # type: ignore[method-assign]
        if module.shared is not None:
            self._share_columns(module.shared, device_mesh)
        return module

    def _share_columns(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        whole = PrepareModuleInput(input_layouts=(self.hidden,), desired_input_layouts=(Replicate(),))
        parallelize_module(module, device_mesh, whole)
        styles = {"w[13]": ColwiseParallel(), "w2": RowwiseParallel(output_layouts=self.hidden)}
        parallelize_module(module, device_mesh, styles)


def with_experts(plan: Mapping[str, ParallelStyle], parallelism: Parallelism) -> dict[str, ParallelStyle]:
    """A tensor parallel plan with experts in place of the feed-forward."""
    hidden = Shard(1) if parallelism.sequence_parallel else Replicate()
    rest = {pattern: style for pattern, style in plan.items() if not pattern.startswith("layers.*.feed_forward")}
    return rest | {"layers.*.feed_forward": MixtureOfParts(hidden)}
