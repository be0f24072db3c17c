"""Precision of products, and mixed precision on one rank, where there is nothing to gather and to reduce."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from components.config import JobConfig
from components.config.environment import set_default
from models.moe import Router
from models.nf4 import is_packed


def set_numerics(config: JobConfig, device: torch.device) -> None:
    """Set the precision of products and, if the job asks for it, let torch use only deterministic kernels."""
    set_product_precision(config.training.float32_matmul_precision, device)
    if config.debug.deterministic:
        set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=config.debug.deterministic_warn_only)


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
