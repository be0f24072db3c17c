"""The operations that no eager step does without, one after another: its matrix products, attention, the loss, the
update, and between ranks the fewest collectives.

Norms, rotary positions, SwiGLU, sums of the residual stream, gradient clipping, and all that autograd and
`fully_shard` do are left out, so a step takes longer. See clock.py.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from components.launch.memory import keep_freed_memory
from models.attention import AttentionCore, Visibility
from models.llama import Llama
from models.loss import cross_entropy, linear_cross_entropy
from parallelize.groups import init_distributed
from parallelize.precision import set_product_precision
from tests.benchmarks.peers.clock import Clock, Job, job
from tests.benchmarks.peers.ours import sizes
from tests.benchmarks.peers.products import multiply, operands


def exchange(layout: dict[str, int], gradient: Tensor, weights: Tensor) -> None:
    """Gradients are added up in float32; of shards, each rank gets its own, and the weights are gathered once."""
    if layout.get("ddp", 1) > 1:
        dist.all_reduce(gradient)
    if layout.get("fsdp", 1) > 1:
        ranks = layout["fsdp"]
        dist.all_gather_into_tensor(weights, weights[: len(weights) // ranks].clone())
        dist.reduce_scatter_tensor(gradient[: len(gradient) // ranks].clone(), gradient)


def attention(given: Job, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values of a layer; and the gradient of its attention."""
    size = given["dim"] // given["heads"]
    of_out, *inputs = (
        torch.randn(given["batch"], heads, given["seq"], size, dtype=dtype)
        for heads in (given["heads"], given["heads"], given["kv_heads"], given["kv_heads"])
    )
    return [tensor.requires_grad_() for tensor in inputs], of_out


def main() -> None:
    keep_freed_memory()
    given = job()
    layout: dict[str, int] = given["layout"]
    dtype, tokens = getattr(torch, given["dtype"]), given["batch"] * given["seq"]
    device = init_distributed(60)
    set_product_precision("highest", device)
    clock, config = Clock(given), sizes(given)
    kept = Llama(config)
    shards = layout.get("fsdp", 1)
    owned = [torch.randn(parameter.numel() // shards, requires_grad=True) for parameter in kept.parameters()]
    for parameter in owned:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(owned, lr=1e-4, fused=True)
    model = kept.to(dtype)
    layers = operands(list(model.layers.modules()), tokens, dtype)
    inputs, of_out = attention(given, dtype)
    core, visible = AttentionCore(), Visibility()(torch.arange(given["seq"]).expand(given["batch"], -1), None)
    hidden = torch.randn(given["batch"], given["seq"], given["dim"], dtype=dtype, requires_grad=True)
    labels = torch.randint(given["vocab"], (given["batch"], given["seq"]))
    assert model.output is not None
    head = model.output.weight
    count = sum(parameter.numel() for parameter in model.parameters())
    gradient, weights = torch.zeros(count), torch.zeros(count, dtype=dtype)
    while True:
        clock.tick()
        multiply(layers)
        for _ in range(config.n_layers):
            torch.autograd.grad(core(*inputs, visible), inputs, of_out)
        torch.autograd.grad(linear_cross_entropy(hidden, head, labels, cross_entropy), (hidden, head))
        exchange(layout, gradient, weights)
        optimizer.step()


if __name__ == "__main__":
    main()
