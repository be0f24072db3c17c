"""A pipeline stage that frees each receive buffer once forward or backward has used it.

torch's stage allocates receive buffers for the activations and gradients of every micro-batch and keeps them for its
life, so memory grows with the number of micro-batches (pytorch issue 136380).

Before FSDP reduces gradients, the stage also gives them one precision.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import GraphExecGroup


class Stage(PipelineStage):
    """Makes a buffer when its message is about to come, and lets go of it when the message is used."""

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        for expected in self.args_recv_info.values():
            _let_go(expected)

    def _create_grad_recv_info(self, act_send_info: dict[Any, Any]) -> tuple[Any, ...]:
        expected = super()._create_grad_recv_info(act_send_info)
        _let_go(expected)
        return expected

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        self._make_buffers(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        self._make_buffers(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        _let_go(self.args_recv_info[fwd_chunk_id])
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        _let_go(self.grad_recv_info[bwd_chunk_id])
        return received

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None and full_backward:
            loss.detach_()  # the schedule keeps it to the end of the step, and its graph would keep the message

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Recomputes a checkpointed layer once for all of its weights; torch calls autograd for each weight."""
        with GraphExecGroup():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduces in float32 also gradients that a split backward made after FSDP's own sum of this micro-batch.

        FSDP refuses weights of one group of which only some have a sum in float32.
        """
        if isinstance(self.submod, FSDPModule):
            for state in fully_shard.state(self.submod)._state_ctx.all_states:  # type: ignore[attr-defined]
                for weight in (weight for group in state._fsdp_param_groups for weight in group.fsdp_params):
                    weight.accumulate_unsharded_grad_if_needed()
                    weight.to_accumulated_grad_if_needed()
        super().perform_reduce_grad(grad_scale_factor)

    def _make_buffers(self, expected: Iterable[Any]) -> None:
        for message in expected:
            if message.tensor_meta is not None and not message.is_root_arg:
                shape, dtype = message.tensor_meta.shape, message.tensor_meta.dtype
                message.buffer = torch.empty(shape, dtype=dtype, device=self.device)


def _let_go(expected: Iterable[Any]) -> None:
    for message in expected:
        message.buffer = None
