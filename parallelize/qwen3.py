"""How Qwen3 is laid out over ranks: Llama's plan with the norms of queries and keys, and the fixed order."""

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel

from components.config import JobConfig, Parallelism
from parallelize.activation import apply_activation_checkpoint
from parallelize.compile import apply_compile
from parallelize.context import apply_context_parallel
from parallelize.data import apply_data_parallel
from parallelize.float8 import apply_float8
from parallelize.llama import llama_tp_plan
from parallelize.mesh import Mesh
from parallelize.pipeline import split_stages
from parallelize.tensor import apply_tensor_parallel


def parallelize_qwen3(model: nn.Module, mesh: Mesh, config: JobConfig) -> list[nn.Module]:
    """The stages of the model that this rank holds, still on the meta device. The order is that of __init__.py."""
    stages = split_stages(model, mesh, config.parallelism)
    for stage in stages:
        apply_float8(stage, config.model, config.quantize.linear.float8)
        apply_tensor_parallel(stage, mesh, qwen3_tp_plan(config.parallelism))
        apply_context_parallel(stage, mesh, config.parallelism)
        apply_compile(stage, mesh, config.compile, config.parallelism)
        apply_activation_checkpoint(stage, config.activation_checkpoint)
        apply_data_parallel(stage, mesh, config.training, config.parallelism)
    return stages


def qwen3_tp_plan(parallelism: Parallelism) -> dict[str, ParallelStyle]:
    """Module names -> style. Queries and keys (B, S, H, K) are split by heads, and a norm's weight sees all of them."""
    per_head = SequenceParallel(sequence_dim=2, use_local_output=True)
    return llama_tp_plan(parallelism) | {"layers.*.attention.[qk]_norm": per_head}
