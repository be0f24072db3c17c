"""The objective: what a run minimises. training.objective names a row of OBJECTIVES."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Derivative = Tensor | float


class Terms(NamedTuple):
    """The loss of each token, and its derivatives; tensors are (T, 1) and float32."""

    loss: Tensor
    by_log_total: Derivative
    by_label_logit: Derivative
    logged: tuple[Tensor, ...] = ()
    """The numbers that Objective.logged names."""


@dataclass(frozen=True)
class Objective:
    """A token loss, what it needs, and how the step's loss is divided."""

    terms: Callable[..., Terms]
    """(log_total (T, 1), label_logit (T, 1), **columns (T, 1)) -> Terms.

    log_total is the log of the sum of exponentials of a token's logits, label_logit the logit of its label. Both are of
    the whole vocabulary at every layout.
    """
    columns: tuple[str, ...] = ()
    """Columns (B, S) of a batch beside tokens, labels, positions and document_ids: rows of COLUMNS in the loader."""
    divisor: str = "labels"
    """The count over the global batch that divides the step's loss: a row of DIVISORS in components/data/loader.py."""
    logged: tuple[str, ...] = ()
    """Names of further numbers of a logged step: sums over tokens, divided like the loss."""


def _next_token(log_total: Tensor, label_logit: Tensor) -> Terms:
    """Cross-entropy."""
    return Terms(log_total - label_logit, 1.0, -1.0)


OBJECTIVES: dict[str, Objective] = {
    "next_token": Objective(_next_token),
}
"""training.objective -> Objective."""


def with_objective(model: nn.Module, name: str) -> nn.Module:
    """Sets the model's objective to a row of OBJECTIVES; returns the model. Called before the layout is applied."""
    for module in model.modules():
        if hasattr(module, "objective"):
            vars(module)["objective"] = OBJECTIVES[name]
    return model


def take_logged(
    stages: Sequence[nn.Module], names: Sequence[str], device: torch.device, divisor: int
) -> dict[str, Tensor]:
    """Sums over this rank's tokens since the last call, divided by `divisor`; zeros on a rank without the head."""
    if not names:
        return {}
    found = torch.zeros(len(names), device=device)
    heads: list[Any] = [module for stage in stages for module in stage.modules() if hasattr(module, "objective")]
    for head in heads:
        if head.logged is not None:
            found, head.logged = found + head.logged, None
    return dict(zip(names, found / divisor, strict=True))
