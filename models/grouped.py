"""Products of rows with the matrices of their experts, and the way from tokens to rows and back.

Shapes are named as in models/moe.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def grouped_swiglu(rows_RD: Tensor, counts_E: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor) -> Tensor:
    """The first counts_E[0] rows by the first expert, and so on."""
    ends = counts_E.cumsum(0).to(torch.int32)
    hidden = F.silu(_GroupedProduct.apply(rows_RD, w1_EFD, ends)) * _GroupedProduct.apply(rows_RD, w3_EFD, ends)
    return _GroupedProduct.apply(hidden, w2_EDF, ends)


@torch.library.custom_op("meshwright::grouped_product", mutates_args=())
def grouped_product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """F.grouped_mm, which refuses float32 tensors without memory: (R, K) x (E, K, N) or (M, R) x (R, N)."""
    return F.grouped_mm(left, right, offs=ends)


@grouped_product.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    shape = (left.shape[0], right.shape[-1])
    return left.new_empty(shape if right.ndim == 3 else (len(ends), *shape))


class _GroupedProduct(torch.autograd.Function):
    """rows (R, K) times the transposed matrix (N, K) of each expert."""

    @staticmethod
    def forward(context: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        context.save_for_backward(rows, weights, ends)
        return grouped_product(rows, weights.transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        rows, weights, ends = context.saved_tensors
        gradient = gradient.contiguous()
        of_rows = grouped_product(gradient, weights, ends) if context.needs_input_grad[0] else None
        of_weights = grouped_product(gradient.T, rows, ends) if context.needs_input_grad[1] else None
        return of_rows, of_weights, None


class ToRows(torch.autograd.Function):
    """Tokens (T, D) -> rows (R, D). Backward gathers a token's rows and adds them up in a fixed order."""

    @staticmethod
    def forward(context: Any, x_TD: Tensor, tokens_R: Tensor, rows_TC: Tensor) -> Tensor:
        context.save_for_backward(rows_TC)
        return x_TD[tokens_R]

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        (rows_TC,) = context.saved_tensors
        return gradient[rows_TC].sum(1), None, None


class FromRows(torch.autograd.Function):
    """Rows (R, D) -> the rows of each token (T, C, D)."""

    @staticmethod
    def forward(context: Any, rows_RD: Tensor, order_R: Tensor, rows_TC: Tensor) -> Tensor:
        context.save_for_backward(order_R)
        return rows_RD[rows_TC]

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        (order_R,) = context.saved_tensors
        return gradient.flatten(0, 1)[order_R], None, None
