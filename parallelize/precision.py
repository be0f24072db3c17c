"""Precision of products, and mixed precision on one rank, where there is nothing to gather and to reduce."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from models.moe import Router
from models.nf4 import is_packed


def set_product_precision(precision: str, device: torch.device) -> None:
    """Calls torch.set_float32_matmul_precision; on a CPU, this also chooses the library for float32 products.

    With "medium" torch calls oneDNN, else MKL. oneDNN computes in float32 if the CPU has no units for products in lower
    precision (only AMX has them so far). On AMD processors oneDNN then takes less than half of MKL's time.
    """
    torch.set_float32_matmul_precision("medium" if device.type == "cpu" else precision)
    if device.type == "cpu" and not _products_are_exact():
        torch.set_float32_matmul_precision(precision)


@functools.cache
def _products_are_exact() -> bool:
    """Whether float32 products with an identity matrix are exact. Two sizes are tried, because one may hide errors."""
    numbers = torch.full((2, 256, 256), 1 + 2**-23)
    return all(
        torch.equal(part @ torch.eye(size), part)
        for size in (32, 256)
        for part in (numbers[0, :, :size], numbers[:, :, :size], numbers[0, :size].T)
    )


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let every module compute with copies of its parameters in dtype, as FSDP's mixed precision does.

    Parameters, their names and their gradients stay as they are, because autograd converts a gradient back to the
    parameter's type before accumulating it.
    """
    for module in model.modules():
        if isinstance(module, Router):
            continue  # close scores would be equal in bfloat16
        parameters = module.named_parameters(recurse=False)
        if names := tuple(name for name, each in parameters if not is_packed(each)):
            module.__class__ = _class_computing_in(type(module), names, dtype)  # type: ignore[arg-type]


@functools.cache
def _class_computing_in(module_class: Any, names: tuple[str, ...], dtype: torch.dtype) -> Any:
    """A subclass whose attributes of these names are copies in dtype."""

    def copy_of(name: str) -> property:
        def converted(module: Any) -> Tensor:
            parameter: Any = nn.Module.__getattr__(module, name)
            return parameter.to(dtype)

        return property(converted)

    return type(module_class.__name__, (module_class,), {name: copy_of(name) for name in names})
