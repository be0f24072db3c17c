"""An exponential moving average of the weights (EMA), which often has a lower loss than the weights themselves.

The average of a parameter is float32 and sharded as the parameter is. Each element depends on one element of the
parameter alone, so equal weights have bit-equal averages at every layout.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from components.optim.optimizer import trained
from parallelize.sharding import local_part


class WeightAverages:
    """Averages of all trained parameters of this rank. They start as the weights after the first update."""

    def __init__(self, decay: float, stages: Sequence[nn.Module]) -> None:
        """decay: averages.ema_decay; 0 for none."""
        self.decay, self._stages = decay, stages
        self.kept: dict[nn.Parameter, Tensor] = {}
        """Parameter -> its average; empty before the first update. Frozen parameters have none."""
        self.started = False
        """Whether there are averages on any rank; a rank of a pipeline may train no parameter."""

    def decay_at(self, step: int) -> float:
        """The decay of a step, counted from 1; it rises to its maximum, so that the first weights are soon forgotten.

        The formula is that of TensorFlow's ExponentialMovingAverage with num_updates.
        """
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int, accepted: Tensor) -> None:
        """Move the averages towards the weights after a step; they stay where `accepted` is false. No host wait."""
        if not self.decay:
            return
        if not self.started:
            self.start()
            return
        share = accepted.to(torch.float32) * (1 - self.decay_at(step))
        for parameter, average in self.kept.items():
            weight = local_part(parameter)[1].to(torch.float32)
            share = share.to(weight.device)  # offloaded weights are on the host
            local_part(average)[1].lerp_(weight, share)

    @torch.no_grad()
    def start(self) -> None:
        """Let every average be its parameter's present value."""
        self.started = True
        for _, _, parameter in trained(self._stages):
            self.kept[parameter] = torch.empty_like(parameter.detach(), dtype=torch.float32)
            local_part(self.kept[parameter])[1].copy_(local_part(parameter)[1])

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (layout-free name of the parameter, its average)."""
        for _, name, parameter in trained(self._stages) if self.started else ():
            yield name, self.kept[parameter]

    def validated(self, validate: Callable[[], tuple[float, int, dict[str, Any]]]) -> tuple[float, int, dict[str, Any]]:
        """The result of `validate` with the weights; loss_ema is its loss with the averages, if there are any."""
        loss, tokens, more = validate()
        with self.swapped() as swapped:
            return loss, tokens, more | ({"loss_ema": validate()[0]} if swapped else {})

    @contextmanager
    def swapped(self) -> Iterator[bool]:
        """A context in which parameters hold their averages; afterwards they have their own bits again.

        Yields whether there are averages on any rank. float32 weights change places with their averages, one tensor at
        a time. bfloat16 weights are copied, and hold rounded averages. No parameter may be gathered when the context is
        entered or left.
        """
        with torch.no_grad(), ExitStack() as back:
            pairs = [(local_part(each)[1], local_part(average)[1]) for each, average in self.kept.items()]
            largest = max((mean.numel() for weight, mean in pairs if weight.dtype == mean.dtype), default=0)
            # Memory that the way back needs is there before the first weight changes.
            buffer = torch.empty(largest, device=pairs[0][0].device) if pairs else torch.empty(0)
            for weight, mean in pairs:
                if weight.dtype == mean.dtype:
                    _exchange(weight, mean, buffer)
                    back.callback(_exchange, weight, mean, buffer)
                else:
                    back.callback(weight.copy_, weight.clone())
                    weight.copy_(mean)
            yield self.started


def _exchange(left: Tensor, right: Tensor, buffer: Tensor) -> None:
    kept = buffer[: left.numel()].view(left.shape).copy_(left)
    left.copy_(right)
    right.copy_(kept)


def average_bytes(stages: Sequence[nn.Module], decay: float) -> int:
    """Bytes of the averages of this rank's parts of all trained parameters."""
    return sum(4 * local_part(parameter)[1].numel() for _, _, parameter in trained(stages)) if decay else 0
