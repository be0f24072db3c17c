"""Cross-entropy of the head's logits, in chunks of tokens, so that memory never holds all logits.

Logits are the largest activation of a model with a large vocabulary. Forward makes one chunk of logits at a time,
computes the chunk's loss and the gradients of hidden states and weights, and frees the chunk. Backward only scales the
gradients (arXiv:2410.10989, section 3.2).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CrossEntropy = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits (T, V), labels (T,), -100 for no label) -> sum of losses, and its gradient (T, V), both float32."""

CHUNK = {"cpu": (256, 2**23), "cuda": (2048, 2**29)}
"""Device type -> (least tokens of a chunk, bytes of its float32 logits if these are more tokens).

On a CPU the bytes are about one cache (tests/benchmarks/loss.py). On a GPU they suffice to keep it busy, because each
chunk adds to the weight's gradient.
"""


def chunk_tokens(device_type: str, vocabulary: int) -> int:
    """Tokens of a chunk, for the vocabulary size of this rank's shard."""
    least, size = CHUNK[device_type]
    return max(least, size // (4 * vocabulary))


def linear_cross_entropy(hidden_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor, loss: CrossEntropy) -> Tensor:
    """The float32 sum of losses over labels that are not -100, for the logits hidden_BSD weight_VD^T."""
    return _LinearCrossEntropy.apply(
        hidden_BSD.flatten(0, 1), weight_VD, labels_BS.flatten(), loss, torch.is_grad_enabled()
    )


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The CrossEntropy of one device."""
    valid, index = (labels != -100)[:, None], labels[:, None].clamp(min=0)
    probabilities = logits.softmax(dim=1, dtype=torch.float32)
    # The largest probability is at least 1 / V, so its logarithm is finite.
    log_total = logits.amax(dim=1, keepdim=True) - probabilities.amax(dim=1, keepdim=True).log()
    loss = ((log_total - logits.gather(1, index)) * valid).sum()
    return loss, probabilities.mul_(valid).scatter_add_(1, index, -valid.float())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, loss: CrossEntropy, with_gradient: bool
    ) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        wanted = [with_gradient and needed for needed in ctx.needs_input_grad[:2]]
        grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if wanted[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None  # summed over chunks
        chunk = chunk_tokens(hidden.device.type, len(weight))
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            chunk_loss, gradient = loss(hidden[rows] @ weight.T, labels[rows])
            total += chunk_loss
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
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # The scale is a float32 tensor without dimensions: it is not rounded, and products keep the gradients' dtype.
        return (
            None if grad_hidden is None else grad_hidden * scale,
            None if grad_weight is None else (grad_weight * scale).to(ctx.weight_dtype),
            *(None, None, None),
        )
