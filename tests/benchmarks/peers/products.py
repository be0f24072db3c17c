"""The matrix products of a step's linear layers and head alone: no step can be quicker. See clock.py."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from models.llama import Llama
from parallelize.precision import set_product_precision
from tests.benchmarks.peers.clock import Clock, job
from tests.benchmarks.peers.ours import sizes

Operands = list[tuple[Tensor, Tensor, Tensor]]
"""Of each linear layer: its weight (out, in), inputs (tokens, in), and the gradient of its result (tokens, out)."""


def operands(modules: Iterable[nn.Module], tokens: int, dtype: torch.dtype) -> Operands:
    """Those of the linear layers among the modules, which have this precision."""
    weights = [module.weight.detach() for module in modules if isinstance(module, nn.Linear)]
    rows = [[torch.randn(tokens, size, dtype=dtype) for size in weight.shape] for weight in weights]
    return [(weight, inputs, gradient) for weight, (gradient, inputs) in zip(weights, rows, strict=True)]


def multiply(operands: Operands) -> None:
    """Forward's product, and both of backward's."""
    for weight, inputs, gradient in operands:
        inputs @ weight.T
        gradient @ weight
        gradient.T @ inputs


def main() -> None:
    given = job()
    dtype = getattr(torch, given["dtype"])
    set_product_precision("highest", torch.device("cpu"))
    clock, model = Clock(given), Llama(sizes(given)).to(dtype)
    layers = operands(model.modules(), given["batch"] * given["seq"], dtype)
    while True:
        clock.tick()
        multiply(layers)


if __name__ == "__main__":
    main()
