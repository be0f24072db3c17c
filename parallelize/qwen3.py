"""How Qwen3 is laid out over ranks: Llama's plan with the norms of queries and keys."""

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel

from components.config import JobConfig, Parallelism
from parallelize.llama import llama_tp_plan
from parallelize.mesh import Mesh
from parallelize.order import parallelize


def parallelize_qwen3(model: nn.Module, mesh: Mesh, config: JobConfig) -> list[nn.Module]:
    """The stages of the model that this rank holds, laid out and still on the meta device."""
    return parallelize(model, mesh, config, qwen3_tp_plan(config.parallelism))


def qwen3_tp_plan(parallelism: Parallelism) -> dict[str, ParallelStyle]:
    """Module names -> style. Queries and keys (B, S, H, K) are split by heads, which share a norm's weight (K,)."""
    per_head = SequenceParallel(sequence_dim=2, use_local_output=True)
    return llama_tp_plan(parallelism) | {"layers.*.attention.[qk]_norm": per_head}
