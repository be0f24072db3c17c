"""The runner of a rank: the whole model in one process, or a pipeline. Both answer the same two calls."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from components.config import JobConfig
from models.config import TransformerConfig
from models.objective import Objective
from parallelize.mesh import Mesh, sum_over_token_ranks
from parallelize.pipeline import Pipeline, share_of_loss

Batch = dict[str, Tensor]
"""Columns (B, S) by name, as train.py's own_part gives them."""


class Runner(Protocol):
    """Runs batches through the model."""

    passes: int
    """Forward passes of a stage in one call of forward_backward."""

    def forward_backward(self, batch: Batch, divisor: int, last: bool) -> Tensor:
        """Add the gradients of summed loss / divisor; returns the quotient on ranks that know a loss, else 0.

        last: whether it is the last batch of an optimizer step.
        """

    def summed_loss(self, batch: Batch) -> Tensor:
        """The batch's summed loss on ranks that know a loss, else 0; forward only."""

    def scores(self, batch: Batch, columns: int) -> Tensor:
        """The head's scores instead of a loss (parallelize/scores.py): (B, S, columns) on every rank."""


class Whole:
    """The whole model, on this rank."""

    passes = 1

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def forward_backward(self, batch: Batch, divisor: int, last: bool) -> Tensor:
        loss = share_of_loss(self._model(**batch), divisor)
        loss.backward()
        return loss.detach()

    def summed_loss(self, batch: Batch) -> Tensor:
        return self._model(**batch)

    def scores(self, batch: Batch, columns: int) -> Tensor:
        return self._model(**batch)


def build_runner(
    stages: list[nn.Module], sizes: TransformerConfig, mesh: Mesh, config: JobConfig, device: torch.device
) -> Runner:
    """The runner of this rank's stages; sizes are those of the whole model."""
    if mesh.degrees.pp == 1:
        return Whole(*stages)
    return Pipeline(stages, sizes, mesh, config, device)


def row_of(loss: Tensor, logged: dict[str, Tensor], objective: Objective, mesh: Mesh) -> dict[str, Any]:
    """The loss and the numbers that the objective logs, of the parts of all ranks; the host waits for them.

    A mixture's row has loss_by_source: the mean loss of the labels of each source that has labels.
    """
    parts = {"loss": loss, **logged}
    values = sum_over_token_ranks(torch.stack([part.double() for part in parts.values()]), mesh).tolist()
    row: dict[str, Any] = dict(zip(parts, values, strict=True))
    if objective.sources:
        own = {name: (row.pop(f"loss/{name}"), row.pop(f"labels/{name}")) for name in objective.sources}
        row["loss_by_source"] = {name: total / labels for name, (total, labels) in own.items() if labels}
    return row
