"""The matrix products of a step's linear layers and head alone: no step can be quicker. See clock.py."""

import torch
from torch import Tensor, nn

from models.llama import Llama
from parallelize.precision import set_product_precision
from tests.benchmarks.peers.clock import Clock, job
from tests.benchmarks.peers.ours import sizes


def main() -> None:
    given = job()
    dtype = getattr(torch, given["dtype"])
    set_product_precision("highest", torch.device("cpu"))
    clock, model = Clock(given), Llama(sizes(given)).to(dtype)
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    tokens = given["batch"] * given["seq"]
    with torch.no_grad():
        operands: list[tuple[Tensor, Tensor, Tensor]] = [
            (
                weight,
                torch.randn(tokens, weight.shape[1], dtype=dtype),
                torch.randn(tokens, weight.shape[0], dtype=dtype),
            )
            for weight in weights
        ]
        while True:
            clock.tick()
            for weight, inputs, gradient in operands:
                inputs @ weight.T
                gradient @ weight
                gradient.T @ inputs


if __name__ == "__main__":
    main()
