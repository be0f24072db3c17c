"""The objective: what a run minimises. training.objective names a row of OBJECTIVES."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.preference import WITH_REFERENCE, Settings, logged_names

Derivative = Tensor | float


class Terms(NamedTuple):
    """The loss of each token, and its derivatives; tensors are (T, 1) and float32."""

    loss: Tensor
    by_log_total: Derivative
    by_label_logit: Derivative
    logged: tuple[Tensor, ...] = ()
    """The numbers that Objective.logged names; also (T, N) for N names."""
    by_mean_logit: Derivative = 0.0
    by_divergence: float = 0.0


@dataclass(frozen=True)
class Objective:
    """A token loss, what it needs, and how the step's loss is divided."""

    terms: Callable[..., Terms]
    """(log_total (T, 1), label_logit (T, 1), **columns (T, 1)) -> Terms.

    log_total is the log of the sum of exponentials of a token's logits, label_logit the logit of its label. Both are of
    the whole vocabulary at every layout. An objective that asks for the mean of the logits gets it as mean_logit.
    """
    columns: tuple[str, ...] = ()
    """Columns (B, S) of a batch beside tokens, labels, positions and document_ids: rows of COLUMNS in the loader."""
    divisor: str = "labels"
    """The count over the global batch that divides the step's loss: a row of DIVISORS in components/data/loader.py."""
    logged: tuple[str, ...] = ()
    """Names of further numbers of a logged step: sums over tokens, divided like the loss."""
    sources: tuple[str, ...] = ()
    """Names of a mixture's sources, by their number in the column `sources`. Each source logs its loss and labels."""
    with_mean: bool = False
    """Whether terms gets mean_logit (T, 1)."""
    temperature: float = 0.0
    """Temperature of the divergence (T, 1) from a teacher (models/divergence.py), which terms then gets; 0: none.

    A batch then has the columns teacher_ids and teacher_log_probabilities, (B, S, K) each.
    """
    pairs: Settings | None = None
    """The loss of pairs, whose weights the head computes first (models/preference.py); None for losses of tokens."""
    plain: "Objective | None" = None
    """The objective of a validation, with the same divisor; None for this objective."""

    @property
    def validated(self) -> "Objective":
        return self.plain or self


def _next_token(log_total: Tensor, label_logit: Tensor) -> Terms:
    """Cross-entropy."""
    return Terms(log_total - label_logit, 1.0, -1.0)


def _weighted(log_total: Tensor, label_logit: Tensor, weights: Tensor, losses: Tensor) -> Terms:
    """A loss that is known already, with its derivative by each label's log-probability."""
    return Terms(losses, weights, -weights)


OBJECTIVES: dict[str, Objective] = {
    "next_token": Objective(_next_token),
}
"""training.objective -> Objective."""


def objective_of(
    name: str,
    sources: tuple[str, ...] = (),
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    mtp: float = 0.0,
    alpha: float = 0.0,
    temperature: float = 1.0,
    preference: Settings | None = None,
) -> Objective:
    """A row of OBJECTIVES, with further terms, which also logs the loss of each source of a mixture.

    mtp: factor of the loss of multi-token prediction; 0 if the model has no layers for it. alpha: the share of a
    teacher in the loss, with the temperature of both distributions. preference: settings of the loss of pairs, which
    is then the objective.
    """
    if preference is not None:
        return _of_pairs(preference)
    objective = OBJECTIVES[name]
    if alpha:
        objective = _with_teacher(objective, alpha, temperature)
    if z_loss or label_smoothing:
        objective = _with_terms(objective, z_loss, label_smoothing)
    objective = _by_source(objective, sources) if sources else objective
    return _with_mtp(objective, mtp) if mtp else objective


@functools.cache
def _with_teacher(objective: Objective, alpha: float, temperature: float) -> Objective:
    """(1 - alpha) loss + alpha temperature^2 KL(teacher || student), arXiv:1503.02531, section 2.

    The factor temperature^2 keeps the size of the divergence's gradient, which shrinks with 1 / temperature^2. A
    validation's loss is the loss of the labels; the divergence is logged beside it.
    """
    factor = alpha * temperature**2

    def plain(log_total: Tensor, label_logit: Tensor, divergence: Tensor, **columns: Tensor) -> Terms:
        found = objective.terms(log_total, label_logit, **columns)
        return found._replace(logged=(*found.logged, found.loss, divergence))

    def terms(log_total: Tensor, label_logit: Tensor, divergence: Tensor, **columns: Tensor) -> Terms:
        found = plain(log_total, label_logit, divergence, **columns)
        return found._replace(
            loss=(1 - alpha) * found.loss + factor * divergence,
            by_log_total=(1 - alpha) * found.by_log_total,
            by_label_logit=(1 - alpha) * found.by_label_logit,
            by_divergence=factor,
        )

    logged = (*objective.logged, "label_loss", "teacher_divergence")
    plainly = replace(objective, terms=plain, logged=logged, temperature=temperature)
    return replace(plainly, terms=terms, plain=plainly)


@functools.cache
def _of_pairs(settings: Settings) -> Objective:
    columns = ("sides", *(("reference",) if settings.loss in WITH_REFERENCE else ()))
    return Objective(_weighted, columns, "pairs", logged_names(settings), pairs=settings)


@functools.cache  # torch.compile would compile each new function again
def _with_terms(objective: Objective, z_loss: float, label_smoothing: float) -> Objective:
    """Adds z_loss log_total^2 (arXiv:2204.02311, section 5), and moves a share of the label to the whole vocabulary.

    Label smoothing (arXiv:1512.00567, section 7) is label_smoothing (label_logit - mean_logit). A validation has
    neither term.
    """

    def plain(log_total: Tensor, label_logit: Tensor, **columns: Tensor) -> Terms:
        found = objective.validated.terms(log_total, label_logit, **columns)
        return found._replace(logged=(*found.logged, found.loss))

    def terms(log_total: Tensor, label_logit: Tensor, mean_logit: Tensor | None = None, **columns: Tensor) -> Terms:
        found = objective.terms(log_total, label_logit, **columns)
        unregularized = (*found.logged, found.loss)
        loss = found.loss + z_loss * log_total.square()
        if mean_logit is not None:
            loss = loss + label_smoothing * (label_logit - mean_logit)
        return found._replace(
            loss=loss,
            by_log_total=found.by_log_total + 2 * z_loss * log_total,
            by_label_logit=found.by_label_logit + label_smoothing,
            logged=unregularized,
            by_mean_logit=-label_smoothing,
        )

    plainly = replace(objective, terms=plain, logged=(*objective.logged, "unregularized_loss"))
    return replace(plainly, terms=terms, with_mean=label_smoothing > 0, plain=plainly)


@functools.cache
def _by_source(objective: Objective, names: tuple[str, ...]) -> Objective:
    def terms(log_total: Tensor, label_logit: Tensor, sources: Tensor, **columns: Tensor) -> Terms:
        found = objective.terms(log_total, label_logit, **columns)
        is_of_source = sources == torch.arange(len(names), device=sources.device)
        losses = torch.where(is_of_source, found.loss, 0.0)  # a product would spread NaN to all sources
        return found._replace(logged=(*found.logged, losses, is_of_source))

    plain = objective.plain and _by_source(objective.plain, names)
    logged = (f"{what}/{name}" for what in ("loss", "labels") for name in names)
    more: dict[str, Any] = {"columns": (*objective.columns, "sources"), "logged": (*objective.logged, *logged)}
    return replace(objective, terms=terms, sources=names, plain=plain, **more)


@functools.cache
def _with_mtp(objective: Objective, factor: float) -> Objective:
    """Adds factor / D times the losses of D layers of multi-token prediction (arXiv:2412.19437, section 2.2).

    Their tokens are those with mtp_share = 1 / D (models/mtp.py). They have the same divisor, T in the paper, and every
    term of the objective; other logged numbers leave them out. A validation has no such tokens.
    """
    logs_plain = "unregularized_loss" in objective.logged

    def terms(log_total: Tensor, label_logit: Tensor, mtp_share: Tensor, **columns: Tensor) -> Terms:
        found, is_ahead = objective.terms(log_total, label_logit, **columns), mtp_share > 0
        scale = torch.where(is_ahead, factor * mtp_share, 1.0)
        plain = log_total - label_logit
        logged = (*found.logged, *(() if logs_plain else (plain,)))
        return Terms(
            found.loss * scale,
            found.by_log_total * scale,
            found.by_label_logit * scale,
            (*(torch.where(is_ahead, 0.0, each) for each in logged), plain * mtp_share),
            found.by_mean_logit * scale,
        )

    names = (*objective.logged, *(() if logs_plain else ("unregularized_loss",)), "mtp_loss")
    return replace(objective, terms=terms, logged=names, plain=objective.validated)


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
