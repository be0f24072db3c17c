"""How Qwen3 with experts is laid out over ranks: Qwen3's plan, with experts in place of the feed-forward."""

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from components.config import JobConfig, Parallelism
from parallelize.expert import with_experts
from parallelize.mesh import Mesh
from parallelize.order import parallelize
from parallelize.qwen3 import qwen3_tp_plan


def parallelize_qwen3_moe(model: nn.Module, mesh: Mesh, config: JobConfig) -> list[nn.Module]:
    """The stages of the model that this rank holds, laid out and still on the meta device."""
    return parallelize(model, mesh, config, qwen3_moe_tp_plan(config.parallelism))


def qwen3_moe_tp_plan(parallelism: Parallelism) -> dict[str, ParallelStyle]:
    """Module names -> style."""
    return with_experts(qwen3_tp_plan(parallelism), parallelism)
