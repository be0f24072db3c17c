"""The observation of a run, and its distance from another run: the figures and their bars."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from components.commands.routing import Routing

Tables = dict[str, dict[str, float]]
"""Nested numbers. Dynamics: table -> part of the model -> number. Losses of sources: step -> source -> loss."""


@dataclass
class Observation:
    """A few steps of one layout; tensors are whole."""

    first_weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    """Gradients of the first step, before clipping."""
    weights: dict[str, Tensor]
    losses: list[float]
    norms: list[list[float]]
    """Gradient norms by rank, then by step."""
    sequences: dict[str, list[str]]
    """Hashes of (tokens, labels) in the order of the global batch, by step."""
    validation_loss: float
    """After the last step; 0 where nothing is validated."""
    sources: Tables = field(default_factory=dict)
    """Step, or validation -> source of a mixture -> loss."""
    expert_rows: dict[str, list[list[int]]] = field(default_factory=dict)
    """Layer with experts -> step -> tokens of each expert."""
    routing: Routing = field(default_factory=Routing)
    """The routing that one process has used; or, in a layout that replays this routing, the number of flips."""
    dynamics: Tables = field(default_factory=dict)
    """The tables of the last step, if it was sampled."""
    extra: Any = None
    """The result of the case's own function on rank 0."""
    seconds: float = 0.0

    def then(self, rest: "Observation") -> "Observation":
        """This run and its resumption, as one run."""
        norms = [[*first, *rest.norms[0]] for first in self.norms] + [self.norms[0] + more for more in rest.norms]
        names = self.expert_rows.keys() | rest.expert_rows
        return replace(
            rest,
            first_weights=self.first_weights,
            gradients=self.gradients,
            losses=self.losses + rest.losses,
            norms=norms,
            sequences=self.sequences | rest.sequences,
            sources={name: table for name, table in self.sources.items() if name != "validation"} | rest.sources,
            expert_rows={name: self.expert_rows.get(name, []) + rest.expert_rows.get(name, []) for name in names},
            routing=Routing(flips=self.routing.flips + rest.routing.flips),
            seconds=self.seconds + rest.seconds,
        )


def figures(observed: Observation, reference: Observation) -> dict[str, float]:
    """Differences between two runs, worst over parameters and steps; 0 for what is equal bit by bit."""
    norms = [abs(norm / right - 1) for norm, right in zip(observed.norms[0], reference.norms[0], strict=True)]
    losses = [abs(loss / right - 1) for loss, right in zip(observed.losses, reference.losses, strict=True)]
    return {
        "weights at step 0": float(not _equal(observed.first_weights, reference.first_weights)),
        "tokens": float(observed.sequences != reference.sequences),
        "loss": _largest(losses),
        "gradient": worst(observed.gradients, reference.gradients),
        "gradient norm": _largest(norms),
        "norm among ranks": float(any(norms != observed.norms[0] for norms in observed.norms)),
        "weights": worst(observed.weights, reference.weights, _zeros(reference.first_weights)),
        "expert rows": float(observed.expert_rows != reference.expert_rows),
        "validation loss": abs(observed.validation_loss - reference.validation_loss) / (reference.validation_loss or 1),
        "loss by source": max(table_errors(observed.sources, reference.sources).values(), default=0.0),
        "dynamics": max(table_errors(observed.dynamics, reference.dynamics).values()) if observed.dynamics else 0.0,
    }


BARS = {
    "weights at step 0": 0.0,
    "tokens": 0.0,
    "loss": 1e-6,
    "gradient": 1e-5,
    "gradient norm": 1e-5,
    "norm among ranks": 0.0,
    "weights": 1e-5,
    "expert rows": 0.0,
    "validation loss": 1e-6,
    "loss by source": 1e-5,
    "dynamics": 1e-5,
}
"""How far a layout may be from one process, in float32."""


def broken_bars(observed: Observation, reference: Observation) -> dict[str, float]:
    """The figures that are over their bars: empty if it is the same run."""
    return {name: value for name, value in figures(observed, reference).items() if not value <= BARS[name]}


def _largest(found: Iterable[float]) -> float:
    """inf if one of them is NaN, which max would pass over."""
    return max(error if error == error else float("inf") for error in found)


def _equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def _zeros(tensors: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if not tensor.any()]


def worst(values: dict[str, Tensor], references: dict[str, Tensor], from_zero: Collection[str] = ()) -> float:
    """The largest of errors; inf if the names differ."""
    if values.keys() != references.keys():
        return float("inf")
    return max(errors(values, references, from_zero).values())


def errors(
    values: dict[str, Tensor], references: dict[str, Tensor], from_zero: Collection[str] = ()
) -> dict[str, float]:
    """Name -> relative error of its tensor, inf for NaN. from_zero: names of what consists of its updates alone.

    Adam divides small gradients, and their errors, by small roots. Other weights have these errors beside 0.02, the
    standard deviation with which they start: so they are compared here too. A tensor of zeros is compared beside the
    norm of all tensors: the gradient of queries whose tokens see only themselves is 0, which a layout may round.
    """
    whole = torch.tensor([right.norm() for right in references.values()]).norm()
    least = {name: 0.02 * references[name].numel() ** 0.5 for name in from_zero}
    found = {
        name: (
            (values[name] - right).norm() / (right.norm() if right.any() else whole).clamp(min=least.get(name, 0))
        ).item()
        for name, right in references.items()
        if right.any() or not values[name].equal(right)
    }
    return {name: error if error == error else float("inf") for name, error in found.items()}


def table_errors(tables: Tables, references: Tables) -> dict[tuple[str, str], float]:
    """(table, part) -> relative error, inf for what is not a number; inf for all if the names or their order differ."""
    values, wanted = _flat(tables), _flat(references)
    if list(values) != list(wanted):
        return dict.fromkeys(values | wanted, float("inf"))
    errors = {name: abs(value - wanted[name]) / (abs(wanted[name]) or 1e-30) for name, value in values.items()}
    return {name: error if error == error else float("inf") for name, error in errors.items()}


def _flat(tables: Tables) -> dict[tuple[str, str], float]:
    return {(table, part): value for table, values in tables.items() for part, value in values.items()}
