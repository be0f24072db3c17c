"""The divergence of a model from a teacher, KL(teacher || student), by the teacher's K likeliest tokens.

The K tokens are K classes, and all other tokens together are one more class. Both distributions are those of logits
divided by a temperature (arXiv:1503.02531). With K = the whole vocabulary it is the divergence of the distributions.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from models.loss import Probabilities


def all_here(ids: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """(ids (T, K), number of this rank's columns) -> each token's column, and whether this rank has it."""
    return ids, torch.ones_like(ids, dtype=torch.bool)


def divergence(
    logits: Tensor,
    found: Probabilities,
    softmax: Callable[[Tensor], Probabilities],
    ids_TK: Tensor,
    log_probabilities_TK: Tensor,
    temperature: float,
    columns_of: Callable[[Tensor, int], tuple[Tensor, Tensor]] = all_here,
    total: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> tuple[Tensor, Tensor]:
    """The divergence (T, 1), and its gradient in the logits (T, V), or (T, V / tp) with a split vocabulary; float32.

    found: the softmax of the logits, which is not changed.
    ids_TK, log_probabilities_TK: the teacher's tokens, with their log-probabilities at the temperature.
    total: adds up the shares of ranks that split the vocabulary.

    The gradient in a logit / temperature is q - t for one of the K tokens, where t is the teacher's probability and q
    the student's. Another token has q (1 - t_R / q_R), where t_R and q_R are the probabilities of all other tokens.
    q_R is summed over these tokens, because 1 - (sum of K) would cancel.
    """
    own = found if temperature == 1 else softmax(logits.float() / temperature)
    column, is_here = columns_of(ids_TK.long(), logits.shape[1])
    taught = log_probabilities_TK.exp()
    taught_rest = (1 - taught.sum(dim=1, keepdim=True)).clamp(min=0)
    own_log = logits.gather(1, column).float() / temperature - own.log_total
    # An infinity leaves a column as it is: another rank has the token.
    erased = torch.where(is_here, 0.0, torch.inf)
    rest = own.values.scatter_reduce(1, column, erased, "amin")
    cross = (taught * own_log).where(is_here, 0).sum(dim=1)
    cross, rest_total = total(torch.stack((cross, rest.sum(dim=1))))[..., None]
    rest_total = rest_total.clamp(min=torch.finfo(torch.float32).tiny)  # its logarithm and quotient are finite
    known = (taught * log_probabilities_TK).sum(dim=1, keepdim=True) + torch.special.xlogy(taught_rest, taught_rest)
    gradient = rest.mul_(1 - taught_rest / rest_total)
    gradient.scatter_add_(1, column, (own_log.exp() - taught).where(is_here, 0))
    return known - cross - taught_rest * rest_total.log(), gradient.div_(temperature)
