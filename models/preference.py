"""Losses of pairs: a completion that was chosen beside one that was rejected, both after the same prompt.

A loss of a pair depends on the log-probabilities of both completions. The head therefore makes its product twice. The
first product gives the log-probabilities of all labels. The second gives the loss and its gradient, in chunks, with
the derivative of its pair's loss as the weight of each label.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Settings(Protocol):
    """The table [preference] of a job file."""

    @property
    def loss(self) -> str: ...
    @property
    def beta(self) -> float: ...
    @property
    def label_smoothing(self) -> float: ...
    @property
    def gamma(self) -> float: ...
    def __hash__(self) -> int: ...


class Sides(NamedTuple):
    """The completions of pairs; each tensor is (P, 2) and float64: the chosen one, then the rejected one."""

    log_probability: Tensor
    """The sum over the completion's tokens."""
    reference: Tensor
    """The same under the reference model; 0 for losses without a reference."""
    tokens: Tensor
    """Tokens of the completion, at least 1."""

    @property
    def ratio(self) -> Tensor:
        """log(policy / reference)."""
        return self.log_probability - self.reference

    @property
    def mean(self) -> Tensor:
        """The log-probability of a token."""
        return self.log_probability / self.tokens


def _less_rejected(sides: Tensor) -> Tensor:
    return sides[:, 0] - sides[:, 1]


def _logistic(margin: Tensor, smoothing: float) -> Tensor:
    """-log sigmoid(margin), of labels of which the share `smoothing` is wrong."""
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def dpo(sides: Sides, settings: Settings) -> Tensor:
    """Direct preference optimization (arXiv:2305.18290); with label_smoothing the conservative one."""
    return _logistic(settings.beta * _less_rejected(sides.ratio), settings.label_smoothing)


def ipo(sides: Sides, settings: Settings) -> Tensor:
    """Identity preference optimization (arXiv:2310.12036, equation 17), with the mean ratio of a completion's tokens.

    Sums would grow with the length of completions, and with them the distance to 1 / (2 beta).
    """
    return (_less_rejected(sides.ratio / sides.tokens) - 1 / (2 * settings.beta)).square()


def simpo(sides: Sides, settings: Settings) -> Tensor:
    """Simple preference optimization (arXiv:2405.14734): means of tokens, no reference, and a margin gamma."""
    return _logistic(settings.beta * _less_rejected(sides.mean) - settings.gamma, settings.label_smoothing)


def orpo(sides: Sides, settings: Settings) -> Tensor:
    """Odds ratio preference optimization (arXiv:2403.07691): the chosen completion's loss, and beta times the log odds.

    The odds of a completion are p / (1 - p), where p is the geometric mean of its tokens' probabilities.
    """
    log_odds = sides.mean - _log_of_rest(sides.mean)
    return -sides.mean[:, 0] - settings.beta * F.logsigmoid(_less_rejected(log_odds))


def _log_of_rest(log_probability: Tensor) -> Tensor:
    """log(1 - exp(x)), precise near x = 0 and far from it."""
    # The odds of a probability of 1 are infinite, so it counts as a slightly smaller one.
    x = log_probability.clamp(max=-1e-12)
    near = x > -0.6931471805599453
    return torch.where(near, (-x.expm1()).log(), (-x.where(~near, -1.0).exp()).log1p())


LOSSES: dict[str, Callable[[Sides, Settings], Tensor]] = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "orpo": orpo}
"""preference.loss -> (sides of P pairs, settings) -> losses (P,)."""
WITH_REFERENCE = ("dpo", "ipo")
"""Losses that compare with a reference model."""
LOGGED = ("reward_margin", "reward_accuracy", "logp_chosen", "logp_rejected")
DRIFT = "reference_drift"


def logged_names(settings: Settings) -> tuple[str, ...]:
    """Names of the numbers that a step logs: means over its pairs."""
    return (*LOGGED, *((DRIFT,) if settings.loss in WITH_REFERENCE else ()))


def _numbers(sides: Sides, settings: Settings) -> Tensor:
    """The logged numbers of each pair, (P, N) for the N logged_names.

    A completion's reward is beta times its log ratio; without a reference, beta times the mean of its tokens. Its drift
    is the size of its log ratio, in nats, whose mean over both completions is the pair's.
    """
    with_reference = settings.loss in WITH_REFERENCE
    margin = settings.beta * _less_rejected(sides.ratio if with_reference else sides.mean)
    found = [margin, (margin > 0).double(), sides.log_probability[:, 0], sides.log_probability[:, 1]]
    return torch.stack([*found, *([sides.ratio.abs().mean(1)] if with_reference else [])], dim=1)


class Pairs(NamedTuple):
    """Weights, losses and logged numbers of this rank's tokens."""

    weights: Tensor
    """(B, S) float32: minus the derivative of the loss by the log-probability of each label."""
    losses: Tensor
    """(B, S) float32: each chosen label's share of its pair's loss, which the labels of all ranks add up to."""
    logged: Tensor
    """(N,) float64: this rank's part of the sums over pairs of what is logged."""


def weigh(
    log_probability_BS: Tensor,
    labels_BS: Tensor,
    sides_BS: Tensor,
    reference_BS: Tensor | None,
    settings: Settings,
    whole: Callable[[Tensor], Tensor],
) -> Pairs:
    """The Pairs of this rank's part of each sequence. Pairs of which a side has no label are left out.

    - log_probability_BS: float64, by label
    - sides_BS: 2 p + 1 for labels of the chosen completion of a sequence's pair p, 2 p + 2 for the rejected one, else 0
    - reference_BS: numbers that add up to each completion's log-probability under the reference model
    - whole: (B, S, C) of this rank's part of sequences -> (B, S', C) of whole sequences, with tokens in any order
    """
    own = torch.where(labels_BS == -100, 0, sides_BS)
    reference_BS = torch.zeros_like(log_probability_BS) if reference_BS is None else reference_BS.double()
    values = whole(torch.stack([own.double(), log_probability_BS, reference_BS], dim=2))
    # A completion has at least one label, and a token before it. Column 0 of `sums` is what belongs to no pair.
    rows, length, _ = values.shape
    columns = 2 * (length // 4 + 1) + 1
    place = torch.arange(rows, device=own.device)[:, None] * columns
    counted = torch.cat([values[..., 1:], torch.ones_like(values[..., :1])], dim=2)
    sums = values.new_zeros(rows * columns, 3)
    sums.index_add_(0, (place + values[..., 0].long()).flatten(), counted.flatten(0, 1))
    log_probability, reference, tokens = (
        sums.view(rows, columns, 3)[:, 1:].unflatten(1, (-1, 2)).flatten(0, 1).unbind(2)
    )
    is_pair = (tokens > 0).all(1, keepdim=True)
    tokens = tokens.clamp(min=1)
    with torch.enable_grad():
        asked = log_probability.detach().requires_grad_()
        sides = Sides(asked, reference, tokens)
        losses = torch.where(is_pair[:, 0], LOSSES[settings.loss](sides, settings), 0.0)
        (gradient,) = torch.autograd.grad(losses.sum(), asked)
    sides, losses = Sides(log_probability, reference, tokens), losses.detach()
    # Each chosen label has an equal share of what its pair adds: so the ranks that share a sequence share it too.
    shares = torch.stack([is_pair[:, 0] / tokens[:, 0], torch.zeros_like(losses)], dim=1)

    def of_labels(values_P2: Tensor) -> Tensor:
        """(B, S): the values of the labels' completions, 0 for tokens without."""
        padded = F.pad(values_P2.reshape(rows, -1), (1, 0))
        return padded.gather(1, own)

    numbers = F.pad(_numbers(sides, settings).unflatten(0, (rows, -1)), (0, 0, 1, 0))
    pair_BS = (own + 1) // 2
    share_BS = of_labels(shares)
    logged = (numbers.gather(1, pair_BS[..., None].expand(-1, -1, numbers.shape[2])) * share_BS[..., None]).sum((0, 1))
    return Pairs(-of_labels(gradient).float(), of_labels(shares * losses[:, None]).float(), logged)
