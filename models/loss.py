"""Cross-entropy of the head's logits, by chunks of tokens, so that logits are never held whole.

Logits are the largest activation of a model with a large vocabulary. Here forward makes one chunk of logits at a time,
computes the chunk's loss and the gradients of hidden states and weights, and frees the chunk. Backward only scales the
gradients (arXiv:2410.10989, section 3.2).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CrossEntropy = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits (T, V), labels (T,), -100 for none) -> the sum of losses, and its gradient (T, V), both float32."""

CHUNK = {"cpu": (256, 2**23), "cuda": (2048, 2**29)}
"""By device: the least tokens of a chunk, and the bytes of its logits in float32 where the vocabulary is small. About a
cache of a CPU (tests/benchmarks/loss.py); enough to keep a GPU busy, since each chunk adds to the weight's gradient."""


def chunk_tokens(device_type: str, vocabulary: int) -> int:
    """Tokens of a chunk, for this rank's part of the vocabulary."""
    least, size = CHUNK[device_type]
    return max(least, size // (4 * vocabulary))


def linear_cross_entropy(hidden_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor, loss: CrossEntropy) -> Tensor:
    """The float32 sum of losses of hidden states times weights, over labels that are not -100."""
    return _LinearCrossEntropy.apply(
        hidden_BSD.flatten(0, 1), weight_VD, labels_BS.flatten(), loss, torch.is_grad_enabled()
    )


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """A CrossEntropy on one device."""
    valid, index = (labels != -100)[:, None], labels[:, None].clamp(min=0)
    probabilities = logits.softmax(dim=1, dtype=torch.float32)
    # The largest probability is never too small for its logarithm.
    log_total = logits.amax(dim=1, keepdim=True) - probabilities.amax(dim=1, keepdim=True).log()
    loss = ((log_total - logits.gather(1, index)) * valid).sum()
    return loss, probabilities.mul_(valid).scatter_add_(1, index, -valid.float())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, loss: CrossEntropy, with_gradient: bool
    ) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        # Sums over chunks are kept in float32.
        wanted = [with_gradient and needed for needed in ctx.needs_input_grad[:2]]
        of_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if wanted[0] else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        chunk = chunk_tokens(hidden.device.type, len(weight))
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            loss_of_chunk, gradient = loss(hidden[rows] @ weight.T, labels[rows])
            total += loss_of_chunk
            if not any(wanted):
                continue
            gradient = gradient.to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(gradient, weight, out=of_hidden[rows])
            if of_weight is None:
                continue
            if weight.dtype == torch.float32:
                of_weight.addmm_(gradient.T, hidden[rows])
            elif weight.is_cuda:  # the product is never rounded, and no other kernel adds it
                torch.addmm(of_weight, gradient.T, hidden[rows], out_dtype=torch.float32, out=of_weight)
            else:
                of_weight += gradient.T @ hidden[rows]
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        of_hidden, of_weight = ctx.saved_tensors
        # The scale is float32 and has no dimensions: it is not rounded, and the product keeps its type.
        return (
            None if of_hidden is None else of_hidden * scale,
            None if of_weight is None else (of_weight * scale).to(ctx.weight_dtype),
            *(None, None, None),
        )
