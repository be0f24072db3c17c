"""Pipeline parallel: the layers are cut into stages, and micro-batches pass through them by one of torch's schedules.

A stage is the model with only some of its modules, which keep their names. It takes the hidden state of the previous
stage; the last stage, called with labels, gives the summed loss.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from components.config import JobConfig, Parallelism
from models.config import TransformerConfig
from parallelize.mesh import Degrees, Mesh
from parallelize.mtp import mtp_modules
from parallelize.padding import padded_length
from parallelize.parts import PartStage, cut_into_parts
from parallelize.schedules import modules_of_stages, number_of_stages, schedule_of, stages_of_rank, table_of
from parallelize.sharding import local_part, poison_if_not_finite
from parallelize.stage import Stage
from parallelize.tables import Order, written


def split_stages(model: nn.Module, mesh: Mesh, parallelism: Parallelism) -> list[nn.Module]:
    """This rank's stages of a model on the meta device; the model itself without pipeline parallel."""
    pp = mesh["pp"]
    if pp.size() == 1:
        return [model]
    modules = modules_of_stages(parallelism, model.config.n_layers)  # type: ignore[union-attr, arg-type]
    mine = stages_of_rank(parallelism, pp.get_local_rank(), len(modules))
    return [_keep(copy.deepcopy(model), modules[stage]) for stage in mine]


def _keep(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """The model without the parameters of all other modules; a head keeps what belongs to it.

    These are the table that the head is tied to, and the layers of multi-token prediction with a table.
    """
    sizes: Any = model.config
    if "output" in names:
        names = [*names, *mtp_modules(sizes)]
        if sizes.holds_table_twice and "tok_embeddings" not in names:
            names, model.copies_embedding = [*names, "tok_embeddings"], True  # type: ignore[assignment]
    for name, child in list(model.named_children()):
        if isinstance(child, nn.ModuleDict):
            for key in list(child):
                if f"{name}.{key}" not in names:
                    del child[key]
        elif name not in names and any(True for _ in child.parameters()):
            setattr(model, name, None)
    return model


def _passed_on(dim: int, config: JobConfig, degrees: Degrees) -> tuple[Tensor, Tensor, Tensor]:
    """A micro-batch's tokens, hidden state between stages, and loss: on the meta device, as this rank has them."""
    parallelism, training = config.parallelism, config.training
    size = parallelism.pipeline_parallel_microbatch_size
    length = padded_length(training.seq_len, degrees, parallelism) // degrees.cp
    length //= parallelism.pipeline_parallel_sequence_splits
    tokens = torch.empty(size, length, dtype=torch.int64, device="meta")
    if parallelism.sequence_parallel:
        length //= degrees.tp
    dtype = getattr(torch, training.mixed_precision_param)
    hidden = torch.empty(size, length, dim, dtype=dtype, device="meta", requires_grad=True)
    return tokens, hidden, torch.empty((), device="meta", requires_grad=True)


def _by_table(orders: Order, stages: list[Stage], options: dict[str, Any]) -> Any:
    """torch's schedule that runs these steps of each rank, with the messages between them."""
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    schedule = _PipelineScheduleRuntime(stages, **options)
    schedule._prepare_schedule_with_comms(
        {rank: [_Action.from_str(written(step)) for step in order] for rank, order in enumerate(orders)}
    )
    return schedule


def share_of_loss(loss: Tensor, divisor: int) -> Tensor:
    """A batch's summed loss divided by the divisor of the global batch. Gradients of all batches are then only summed.

    A loss that is not finite makes every gradient NaN, on whichever rank knows the loss.
    """
    return poison_if_not_finite(loss / divisor)


class Pipeline:
    """Runs micro-batches through the stages of all ranks; every rank makes the same calls."""

    def __init__(
        self, stages: list[nn.Module], sizes: TransformerConfig, mesh: Mesh, config: JobConfig, device: torch.device
    ) -> None:
        """sizes: of the whole model."""
        pp, self._device, parallelism = mesh["pp"], device, config.parallelism
        self._group, self._count = pp.get_group(), number_of_stages(parallelism, sizes.n_layers)
        self._owner = {
            stage: rank for rank in range(pp.size()) for stage in stages_of_rank(parallelism, rank, self._count)
        }
        if device.type == "cuda":
            # All ranks make the group's NCCL communicator in its first call, because later calls may be of two ranks.
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        mine = stages_of_rank(parallelism, pp.get_local_rank(), self._count)
        self._modules = dict(zip(mine, stages, strict=True))
        self.micro_batches = config.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
        """Micro-batches of one call of forward_backward. A micro-batch has all parts of its sequences."""
        self._splits = parallelism.pipeline_parallel_sequence_splits
        """Parts of each sequence."""
        self.passes = self.micro_batches * self._splits
        """Forward passes of a stage in one call of forward_backward: what a schedule calls its micro-batches."""
        tokens, hidden, loss = _passed_on(sizes.dim, config, mesh.degrees)
        self._divisor = 1
        stage_class = Stage if self._splits == 1 else PartStage
        # Without input_args and output_args, stages run a forward for shape inference in the first step.
        parts = [
            stage_class(
                module,
                number,
                self._count,
                self._device,
                input_args=hidden if number else tokens,
                output_args=hidden if number < self._count - 1 else loss,
                group=self._group,
            )
            for number, module in self._modules.items()
        ]
        options: dict[str, Any] = {
            "n_microbatches": self.passes,
            # The last stage gives the summed loss.
            "loss_fn": lambda loss, _: share_of_loss(loss, self._divisor),
            "scale_grads": False,  # torch would divide by the number of micro-batches
        }
        # One schedule object for the life of these stages: with a second one DualPipeV's gradients are wrong.
        schedule = schedule_of(parallelism)
        if orders := table_of(parallelism, self.micro_batches):
            self._schedule = _by_table(orders, parts, options)
        else:
            self._schedule = schedule.load()(parts[0] if schedule.one_stage else parts, **options)
        self._hidden: dict[torch.Size, tuple[torch.Size, torch.dtype]] = {}
        self._tables: dict[int, Any] = {}
        """Stage -> embedding table, if the first and the last stage have it."""
        for number, module in self._modules.items():
            if module.config.holds_table_twice and number in (0, self._count - 1):  # type: ignore[union-attr]
                # From parameters(), because .weight may be a copy in bfloat16.
                (self._tables[number],) = module.get_submodule("tok_embeddings").parameters()
                self._tables[number].copied_from_another_stage = module.copies_embedding

    def forward_backward(self, batch: dict[str, Tensor], divisor: int, last: bool) -> Tensor:
        """Add the gradients of summed loss / divisor; returns the quotient on the last stage's rank, else 0.

        last: whether it is the last batch of an optimizer step.
        """
        self._divisor = divisor
        losses: list[Tensor] = []
        if self._splits > 1:
            batch = {name: cut_into_parts(tensor, self.micro_batches, self._splits) for name, tensor in batch.items()}
        more = {name: tensor for name, tensor in batch.items() if name != "tokens"}
        inputs = (batch["tokens"],) if 0 in self._modules else ()
        target = batch["labels"] if self._count - 1 in self._modules else None
        self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False, **more)
        if last:
            self._add_up_tables()
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self._device)

    def _add_up_tables(self) -> None:
        """Give both copies of a table the sum of their gradients. Both add the same two, so bits are equal."""
        own = [local_part(table.grad)[1] for table in self._tables.values() if table.grad is not None]
        if len(own) == 2:
            own[1].copy_(own[0].add_(own[1]))
        elif own and own[0].numel():
            other = self._owner[self._count - 1 if 0 in self._tables else 0]
            sent = own[0].to(self._device).contiguous()
            received = torch.empty_like(sent)
            messages = [
                dist.P2POp(dist.isend, sent, group=self._group, group_peer=other),
                dist.P2POp(dist.irecv, received, group=self._group, group_peer=other),
            ]
            for work in dist.batch_isend_irecv(messages):
                work.wait()
            own[0].add_(received.to(own[0].device))

    def summed_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The batch's summed loss on the last stage's rank, 0 on others; forward only."""
        found = self._forward(batch)
        return torch.zeros((), device=self._device) if found is None else found

    def scores(self, batch: dict[str, Tensor], columns: int) -> Tensor:
        """The last stage's scores (B, S, columns), on every rank."""
        found = self._forward(batch)
        if found is None:
            found = torch.empty(*batch["tokens"].shape, columns, dtype=torch.float64, device=self._device)
        dist.broadcast(found, group=self._group, group_src=self._owner[self._count - 1])
        return found

    def _forward(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Forward only, stage by stage: gives the last stage's output on its rank, None on others.

        torch's own forward-only mode fails with V-shaped schedules.
        """
        hidden, more = batch["tokens"], {name: tensor for name, tensor in batch.items() if name != "tokens"}
        for number in range(self._count):
            if number in self._modules:
                hidden = self._modules[number](hidden, **more)
            if number < self._count - 1:
                hidden = self._broadcast(hidden, number, batch["tokens"].shape)
        return hidden if self._count - 1 in self._modules else None

    def _broadcast(self, hidden: Tensor, stage: int, batch_shape: torch.Size) -> Tensor:
        """Send a stage's hidden state to all ranks. Its shape is sent only for the first batch of each batch_shape."""
        source = self._owner[stage]
        if batch_shape not in self._hidden:
            told: list[Any] = [(hidden.shape, hidden.dtype)]
            dist.broadcast_object_list(told, group=self._group, group_src=source, device=torch.device("cpu"))
            self._hidden[batch_shape] = told[0]
        if stage not in self._modules:
            shape, dtype = self._hidden[batch_shape]
            hidden = torch.empty(shape, dtype=dtype, device=self._device)
        hidden = hidden.contiguous()
        dist.broadcast(hidden, group=self._group, group_src=source)
        return hidden
