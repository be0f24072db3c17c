"""The loss of the head's logits, in chunks of tokens, so that memory never holds all logits.

Logits are the largest activation of a model with a large vocabulary. Forward makes one chunk of logits at a time,
computes the chunk's loss and the gradients of hidden states and weights, and frees the chunk. Backward only scales the
gradients (arXiv:2410.10989, section 3.2).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.objective import Terms


class Probabilities(NamedTuple):
    """The softmax of a chunk of logits, of this rank's columns of the vocabulary; float32."""

    values: Tensor
    """(T, V), or (T, V / tp) with a split vocabulary. The loss overwrites it with the gradient."""
    log_total: Tensor
    """(T, 1): log of the sum of exponentials over the whole vocabulary."""
    label_logit: Tensor
    """(T, 1)"""
    column: Tensor
    """(T, 1): the label's column among this rank's; 0 where another rank has it."""
    is_here: Tensor
    """(T, 1): whether this rank has the label's column."""
    mean_logit: Tensor | None = None
    """(T, 1): the mean of a token's logits over the whole vocabulary, if asked for."""
    vocabulary: int = 0
    """V, if the mean is asked for."""


Softmax = Callable[[Tensor, Tensor, bool], Probabilities]
"""(logits (T, V), labels (T,), -100 for no label, whether mean_logit is asked for) -> Probabilities."""
Likeliest = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""(logits (T, V), K, N) -> the K largest logits of the first N tokens in falling order, and their tokens: (T, K)."""
ChunkLoss = Callable[..., tuple[list[Tensor], Tensor]]
"""(logits (T, V), labels (T,), **columns (T,)) -> [summed loss, *logged sums], and the loss's gradient (T, V)."""

CHUNK = {"cpu": (256, 2**23), "cuda": (2048, 2**29)}
"""Device type -> (fewest tokens of a chunk, bytes of float32 logits). More tokens are taken if they fit the bytes.

On a CPU the bytes are about one cache (tests/benchmarks/loss.py). On a GPU the bytes keep the device busy; smaller
chunks would add to the weight's gradient more often.
"""


def chunk_tokens(device_type: str, vocabulary: int) -> int:
    """Tokens of a chunk, for the vocabulary size of this rank's shard."""
    least, size = CHUNK[device_type]
    return max(least, size // (4 * vocabulary))


def linear_loss(
    hidden_BSD: Tensor,
    weight_VD: Tensor,
    labels_BS: Tensor,
    chunk_loss: ChunkLoss,
    columns: dict[str, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Float32 sums over labels that are not -100, for the logits hidden_BSD weight_VD^T: the loss, then logged sums."""
    flat = {name: column.flatten(0, 1) for name, column in (columns or {}).items()}
    return _LinearLoss.apply(
        hidden_BSD.flatten(0, 1), weight_VD, labels_BS.flatten(), chunk_loss, flat, torch.is_grad_enabled()
    )


def softmax(logits: Tensor, labels: Tensor, with_mean: bool = False) -> Probabilities:
    """The Softmax of one device."""
    probabilities = logits.softmax(dim=1, dtype=torch.float32)
    # The largest probability is at least 1 / V, so its logarithm is finite.
    log_total = logits.amax(dim=1, keepdim=True) - probabilities.amax(dim=1, keepdim=True).log()
    column = labels[:, None].clamp(min=0)
    here = torch.ones_like(column, dtype=torch.bool)
    mean = logits.mean(dim=1, keepdim=True, dtype=torch.float32) if with_mean else None
    return Probabilities(probabilities, log_total, logits.gather(1, column), column, here, mean, logits.shape[1])


def chunk_loss(
    logits: Tensor,
    labels: Tensor,
    softmax: Softmax,
    terms: Callable[..., Terms],
    with_mean: bool = False,
    divergence: Callable[..., tuple[Tensor, Tensor]] | None = None,
    teacher_ids: Tensor | None = None,
    teacher_log_probabilities: Tensor | None = None,
    **columns: Tensor,
) -> tuple[list[Tensor], Tensor]:
    """A ChunkLoss, given how the softmax is computed and the terms of an objective, which may ask for mean_logit.

    divergence: that of models/divergence.py, for an objective that asks for it.
    """
    valid, found = (labels != -100)[:, None], softmax(logits, labels, with_mean)
    given = {name: column[:, None] for name, column in columns.items()}
    if found.mean_logit is not None:
        given["mean_logit"] = found.mean_logit
    if divergence is not None:
        taught = teacher_ids, teacher_log_probabilities
        given["divergence"], by_logits = divergence(logits, found, lambda each: softmax(each, labels, False), *taught)
    found_terms = terms(found.log_total, found.label_logit, **given)
    sums = [(found_terms.loss * valid).sum(), *((each * valid).sum(0) for each in found_terms.logged)]
    gradient = found.values.mul_(found_terms.by_log_total * valid)
    if found.mean_logit is not None:
        gradient += found_terms.by_mean_logit / found.vocabulary * valid
    if divergence is not None:
        gradient += by_logits.mul_(found_terms.by_divergence * valid)
    return sums, gradient.scatter_add_(1, found.column, found_terms.by_label_logit * (valid & found.is_here).float())


@torch.no_grad()
def linear_scores(
    hidden_BSD: Tensor,
    weight_VD: Tensor,
    labels_BS: Tensor,
    softmax: Softmax,
    likeliest: Likeliest,
    count: int = 0,
    known: int = 0,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probabilities (B, S, 1 + 2 count), float64: of the label, of the likeliest tokens; then these tokens' ids.

    The first is 0 where the label is -100. The likeliest are of the first `known` tokens of the vocabulary. Logits are
    divided by the temperature.
    """
    hidden, labels, parts = hidden_BSD.flatten(0, 1), labels_BS.flatten(), []
    chunk = chunk_tokens(hidden.device.type, len(weight_VD))
    for start in range(0, max(1, len(hidden)), chunk):
        rows = slice(start, start + chunk)
        logits = (hidden[rows] @ weight_VD.T).float() / temperature
        found = softmax(logits, labels[rows], False)
        label = (found.label_logit - found.log_total) * (labels[rows] != -100)[:, None]
        scores = [label.double()]
        if count:
            values, ids = likeliest(logits, count, known)
            scores += [(values - found.log_total).double(), ids.double()]
        parts.append(torch.cat(scores, dim=1))
    return torch.cat(parts).unflatten(0, labels_BS.shape)


def likeliest(logits: Tensor, count: int, known: int) -> tuple[Tensor, Tensor]:
    """The Likeliest of one device."""
    values, ids = logits[:, :known].topk(count, dim=1)
    return values, ids


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk_loss: ChunkLoss,
        columns: dict[str, Tensor],
        with_gradient: bool,
    ) -> tuple[Tensor, ...]:
        totals: list[Tensor] = []
        wanted = [with_gradient and needed for needed in ctx.needs_input_grad[:2]]
        grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if wanted[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None  # summed over chunks
        chunk = chunk_tokens(hidden.device.type, len(weight))
        for start in range(0, max(1, len(hidden)), chunk):
            rows = slice(start, start + chunk)
            parts = {name: column[rows] for name, column in columns.items()}
            sums, gradient = chunk_loss(hidden[rows] @ weight.T, labels[rows], **parts)
            totals = [total + part for total, part in zip(totals, sums)] if totals else sums
            if not any(wanted):
                continue
            gradient = gradient.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[rows])
            if grad_weight is None:
                continue
            if weight.dtype == torch.float32:
                grad_weight.addmm_(gradient.T, hidden[rows])
            elif weight.is_cuda:  # one kernel multiplies and adds, and does not round the product
                torch.addmm(grad_weight, gradient.T, hidden[rows], out_dtype=torch.float32, out=grad_weight)
            else:
                grad_weight += gradient.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(*totals[1:])
        return tuple(totals)

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *grad_logged: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # The scale is float32 and has no dimensions. Products therefore keep the dtype of the gradients, and the scale
        # is not rounded.
        return (
            None if grad_hidden is None else grad_hidden * scale,
            None if grad_weight is None else (grad_weight * scale).to(ctx.weight_dtype),
            *(None, None, None, None),
        )
