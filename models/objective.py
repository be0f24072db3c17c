"""The objective: what a run minimises. training.objective names a row of OBJECTIVES."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    """The numbers that Objective.logged names; also (T, N) for N names."""


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
    sources: tuple[str, ...] = ()
    """Names of a mixture's sources, by their number in the column `sources`. Each source logs its loss and labels."""


def _next_token(log_total: Tensor, label_logit: Tensor) -> Terms:
    """Cross-entropy."""
    return Terms(log_total - label_logit, 1.0, -1.0)


OBJECTIVES: dict[str, Objective] = {
    "next_token": Objective(_next_token),
}
"""training.objective -> Objective."""


def objective_of(name: str, sources: tuple[str, ...] = ()) -> Objective:
    """A row of OBJECTIVES, which also logs the loss of each source of a mixture."""
    return _by_source(OBJECTIVES[name], sources) if sources else OBJECTIVES[name]


@functools.cache  # torch.compile would compile each new function again
def _by_source(objective: Objective, names: tuple[str, ...]) -> Objective:
    def terms(log_total: Tensor, label_logit: Tensor, sources: Tensor, **columns: Tensor) -> Terms:
        found = objective.terms(log_total, label_logit, **columns)
        is_of_source = sources == torch.arange(len(names), device=sources.device)
        losses = torch.where(is_of_source, found.loss, 0.0)  # a product would spread NaN to all sources
        return found._replace(logged=(*found.logged, losses, is_of_source))

    logged = (f"{what}/{name}" for what in ("loss", "labels") for name in names)
    more: dict[str, Any] = {"columns": (*objective.columns, "sources"), "logged": (*objective.logged, *logged)}
    return replace(objective, terms=terms, sources=names, **more)


def with_objective(model: nn.Module, objective: Objective) -> nn.Module:
    """Sets the model's objective; returns the model. Called before the layout is applied."""
    for module in model.modules():
        if hasattr(module, "objective"):
            vars(module)["objective"] = objective
    return model


def take_logged(
    stages: Sequence[nn.Module], names: Sequence[str], device: torch.device, divisor: int
) -> dict[str, Tensor]:
    """Float64 sums over this rank's tokens since the last call, divided by `divisor`; 0 on a rank without the head."""
    if not names:
        return {}
    found = torch.zeros(len(names), dtype=torch.float64, device=device)
    heads: list[Any] = [module for stage in stages for module in stage.modules() if hasattr(module, "objective")]
    for head in heads:
        if head.logged is not None:
            found, head.logged = found + head.logged, None
    return dict(zip(names, found / divisor, strict=True))
