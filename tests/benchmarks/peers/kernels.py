"""The operations that no eager step does without, one after another: its matrix products, attention, norms, rotary
positions, SwiGLU, sums of the residual stream, embedding, loss, conversions to its precision and back, gradient norm,
update, and between ranks the fewest collectives.

What autograd does between operations, all that `fully_shard` and pipeline stages do, and the loop are left out, so a
step takes longer. A compiled step fuses what there is between products: there norms, rotary positions, SwiGLU and sums
count nothing. See clock.py.
"""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from components.launch.memory import keep_freed_memory
from models.attention import AttentionCore, Visibility
from models.llama import Llama
from models.rotary import apply_rotary, rotary_cos_sin, rotary_frequencies
from parallelize.groups import init_distributed
from parallelize.precision import set_product_precision
from tests.benchmarks.loss import chunked
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


Operation = tuple[Callable[..., Tensor], list[Tensor], Tensor]
"""A function, its inputs, and the gradient of its result."""


def between_products(given: Job, dtype: torch.dtype) -> list[Operation]:
    """The operations of a layer that are neither products nor attention; sums of the residual stream are in main."""
    rows = given["batch"], given["seq"]
    dim, size = given["dim"], given["dim"] // given["heads"]
    positions = torch.arange(given["seq"]).expand(rows)
    cos, sin = rotary_cos_sin(positions, rotary_frequencies(size, 500000.0, None, positions.device))

    def operation(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Operation:
        inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        return function, inputs, torch.randn_like(function(*inputs))

    norm = operation(lambda x, weight: F.rms_norm(x, (dim,), weight, 1e-5), (*rows, dim), (dim,))
    rotary = [
        operation(lambda x: apply_rotary(x, cos, sin), (*rows, heads, size))
        for heads in (given["heads"], given["kv_heads"])
    ]
    return [norm, norm, *rotary, operation(lambda gate, up: F.silu(gate) * up, *2 * [(*rows, given["ffn"])])]


def main() -> None:
    keep_freed_memory()
    given = job()
    layout: dict[str, int] = given["layout"]
    stages, micro_batches = layout.get("pp", 1), 1
    rank = int(os.environ["RANK"])
    first, last = stages == 1 or rank == 0, stages == 1 or rank == stages - 1
    if stages > 1:  # a sequence is a micro-batch
        given, micro_batches = given | {"layers": given["layers"] // stages, "batch": 1}, given["batch"]
    dtype, tokens = getattr(torch, given["dtype"]), given["batch"] * given["seq"]
    device = init_distributed(60)
    set_product_precision("highest", device)
    clock, config = Clock(given), sizes(given)
    kept = Llama(config)
    for end, here in (("tok_embeddings", first), ("norm", last), ("output", last)):
        if not here:
            setattr(kept, end, None)
    shards = layout.get("fsdp", 1)
    owned = [torch.randn(parameter.numel() // shards, requires_grad=True) for parameter in kept.parameters()]
    for parameter in owned:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(owned, lr=1e-4, fused=True)
    model = kept.to(dtype)
    layers = operands(list(model.layers.modules()), tokens, dtype)
    inputs, of_out = attention(given, dtype)
    core, visible = AttentionCore(), Visibility()(torch.arange(given["seq"]).expand(given["batch"], -1), None)
    small = between_products(given, dtype)
    norm, of_norm, of_normed = small[0]
    hidden = torch.randn(given["batch"], given["seq"], given["dim"], dtype=dtype, requires_grad=True)
    stream = hidden.detach()
    labels = torch.randint(given["vocab"], (given["batch"], given["seq"]))
    count = sum(parameter.numel() for parameter in model.parameters())
    gradient, weights = torch.zeros(count), torch.zeros(count, dtype=dtype)

    def micro_batch() -> None:
        if model.tok_embeddings is not None:
            table = model.tok_embeddings.weight
            torch.autograd.grad(F.embedding(labels, table), table, stream)
        multiply(layers)
        for _ in range(config.n_layers):
            torch.autograd.grad(core(*inputs, visible), inputs, of_out)
            for function, of_layer, of_result in () if given["compile"] else small:
                torch.autograd.grad(function(*of_layer), of_layer, of_result)
            for _ in range(0 if given["compile"] else 4):  # two sums of the residual stream, and two of its gradients
                stream + stream
        if stages > 1:
            for to in (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send):
                to(stream, 1 - rank)
        if model.output is not None:
            head = model.output.weight
            torch.autograd.grad(norm(*of_norm), of_norm, of_normed)
            torch.autograd.grad(chunked(hidden, head, labels), (hidden, head))

    while True:
        clock.tick()
        if dtype != torch.float32:
            [parameter.to(dtype) for parameter in owned]
        for _ in range(micro_batches):
            micro_batch()
        if dtype != torch.float32:
            weights.float()  # gradients
        exchange(layout, gradient, weights)
        torch.nn.utils.get_total_norm([parameter.grad for parameter in owned if parameter.grad is not None])
        optimizer.step()


if __name__ == "__main__":
    main()
