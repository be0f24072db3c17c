"""Grouped matrix products of experts, and the gather of tokens into rows and back.

Shapes are named as in models/moe.py.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.nf4 import is_packed, unpack


def grouped_feed_forward(
    rows_RD: Tensor, counts_E: Tensor, parameters: Mapping[str, Tensor], activation: str, scale: float = 1.0
) -> Tensor:
    """The experts' feed-forward: the first counts_E[0] rows go through the first expert, and so on.

    parameters:

    - w1 and w3 (E, F, D), and w2 (E, D, F)
    - optional biases: b1 and b3 (E, F), and b2 (E, D)
    - optional adapters of any of the matrices, for example w1_lora_A (E, r, D) and w1_lora_B (E, F, r)

    scale: factor of the adapters' products.
    """
    ends = counts_E.cumsum(0).to(torch.int32)
    expert_R = None
    if "b1" in parameters:
        rows = torch.arange(len(rows_RD), dtype=torch.int32, device=rows_RD.device)
        expert_R = torch.searchsorted(ends, rows, right=True)

    def product(rows: Tensor, number: int) -> Tensor:
        out = _GroupedProduct.apply(rows, parameters[f"w{number}"], ends)
        if f"w{number}_lora_A" in parameters:
            lora_A, lora_B = (parameters[f"w{number}_lora_{matrix}"] for matrix in "AB")
            out = out + grouped_low_rank(rows, lora_A, lora_B, ends, scale)
        return out if expert_R is None else out + _OfRows.apply(parameters[f"b{number}"], expert_R, ends)

    return product(_ACTIVATIONS[activation](product(rows_RD, 1), product(rows_RD, 3)), 2)


def grouped_low_rank(rows: Tensor, lora_A: Tensor, lora_B: Tensor, ends: Tensor, scale: float) -> Tensor:
    """scale B A x for each row x (R, in), with A (E, r, in) and B (E, out, r) of the row's expert."""
    if padding := -lora_A.shape[1] % (16 // rows.itemsize):  # grouped_mm needs strides of whole 16 bytes
        lora_A, lora_B = F.pad(lora_A, (0, 0, 0, padding)), F.pad(lora_B, (0, padding))
    return _GroupedProduct.apply(_GroupedProduct.apply(rows, lora_A, ends) * scale, lora_B, ends)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU (arXiv:2002.05202)."""
    return F.silu(gate) * up


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The SwiGLU of gpt-oss, with clamped inputs (arXiv:2508.10925)."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * (1.702 * gate).sigmoid() * (up + 1)


_ACTIVATIONS = {"swiglu": swiglu, "clamped_swiglu": clamped_swiglu}


@torch.library.custom_op("meshwright::grouped_product", mutates_args=())
def grouped_product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """(R, K) x (E, K, N) -> (R, N), or (M, R) x (R, N) -> (E, M, N), where expert e has the rows up to ends[e].

    A custom operation, because F.grouped_mm rejects float32 tensors on the meta device.
    """
    return _product_by_windows(left, right, ends.tolist()) if left.is_cpu else F.grouped_mm(left, right, offs=ends)


def _product_by_windows(left: Tensor, right: Tensor, ends: list[int]) -> Tensor:
    """grouped_product on a CPU, in multiples of 16 rows, because oneDNN builds a kernel for each number of rows."""
    if right.ndim == 3:
        out = left.new_empty(len(left), right.shape[-1])
        for expert, (first, last, window) in enumerate(_windows(ends, len(left))):
            if window.start == first:
                torch.mm(left[window], right[expert], out=out[window])  # the next experts overwrite their rows
            else:
                out[first:last] = torch.mm(left[window], right[expert])[first - window.start : last - window.start]
        return out
    out, buffer = left.new_empty(len(ends), len(left), right.shape[-1]), torch.empty_like(left.T)
    for expert, (first, last, window) in enumerate(_windows(ends, len(right))):
        padded = buffer[: window.stop - window.start].zero_()
        padded[first - window.start : last - window.start] = left.T[first:last]
        torch.mm(padded.T, right[window], out=out[expert])
    return out


def _windows(ends: list[int], rows: int) -> Iterator[tuple[int, int, slice]]:
    """Yields (first, end, window) per expert; the window is widened to a multiple of 16 rows, or to all rows."""
    for first, last in itertools.pairwise([0, *ends]):
        count = min(-(-(last - first) // 16) * 16, rows)
        start = min(first, rows - count)
        yield first, last, slice(start, start + count)


@grouped_product.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    shape = (left.shape[0], right.shape[-1])
    return left.new_empty(shape if right.ndim == 3 else (len(ends), *shape))


class _GroupedProduct(torch.autograd.Function):
    """Rows (R, K) times the transposed matrix (N, K) of their expert. Matrices may be packed (models/nf4.py).

    Backward saves rows only if matrices need a gradient. Packed matrices are saved packed.
    """

    @staticmethod
    def forward(context: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        context.save_for_backward(rows if context.needs_input_grad[1] else None, weights, ends)
        return grouped_product(rows, _wide(weights, rows).transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        rows, weights, ends = context.saved_tensors
        gradient = gradient.contiguous()
        grad_rows = grouped_product(gradient, _wide(weights, gradient), ends) if context.needs_input_grad[0] else None
        grad_weights = grouped_product(gradient.T, rows, ends) if context.needs_input_grad[1] else None
        return grad_rows, grad_weights, None


def _wide(weights: Tensor, rows: Tensor) -> Tensor:
    return unpack(weights, rows.dtype) if is_packed(weights) else weights


class _OfRows(torch.autograd.Function):
    """Bias (E, F) of the experts -> bias (R, F) of each row. Backward sums in a fixed order."""

    @staticmethod
    def forward(context: Any, bias_EF: Tensor, expert_R: Tensor, ends: Tensor) -> Tensor:
        context.save_for_backward(ends)
        return bias_EF[expert_R]

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        (ends,) = context.saved_tensors
        ones = gradient.new_ones((len(gradient), 16 // gradient.itemsize))  # grouped_mm needs strides of whole 16 bytes
        # The fused optimizer assumes contiguous gradients, and a split backward stores gradients as they are.
        return grouped_product(ones.T, gradient.contiguous(), ends)[:, 0].contiguous(), None, None


class ToRows(torch.autograd.Function):
    """Tokens (T, D) -> rows (R, D). Backward sums the rows of each token in a fixed order."""

    @staticmethod
    def forward(context: Any, x_TD: Tensor, tokens_R: Tensor, rows_TC: Tensor) -> Tensor:
        context.save_for_backward(rows_TC)
        return x_TD[tokens_R]

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        (rows_TC,) = context.saved_tensors
        return F.embedding_bag(rows_TC, gradient, mode="sum"), None, None


class FromRows(torch.autograd.Function):
    """Rows (R, D) and weights (T, C) -> weighted sum of each token's rows (T, D), in a fixed order."""

    @staticmethod
    def forward(context: Any, rows_RD: Tensor, weights_TC: Tensor, order_R: Tensor, rows_TC: Tensor) -> Tensor:
        context.save_for_backward(rows_RD, weights_TC, order_R, rows_TC)
        return F.embedding_bag(rows_TC, rows_RD, mode="sum", per_sample_weights=weights_TC)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        rows_RD, weights_TC, order_R, rows_TC = context.saved_tensors
        grad_rows = gradient[order_R // rows_TC.shape[1]]
        grad_weights = torch.linalg.vecdot(grad_rows, rows_RD)[rows_TC]
        return grad_rows.mul_(weights_TC.flatten()[order_R, None]), grad_weights, None, None
