"""How GLM-4.5 is laid out over ranks: by Llama's or Qwen3's plan, with experts beside the feed-forward."""

from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from components.config import JobConfig, Parallelism
from parallelize.expert import with_experts
from parallelize.llama import llama_tp_plan
from parallelize.mesh import Mesh
from parallelize.order import parallelize
from parallelize.qwen3 import qwen3_tp_plan


def parallelize_glm4_moe(model: nn.Module, mesh: Mesh, config: JobConfig) -> list[nn.Module]:
    """The stages of the model that this rank holds, laid out and still on the meta device."""
    return parallelize(model, mesh, config, glm4_moe_tp_plan(config.parallelism, model.config))


def glm4_moe_tp_plan(parallelism: Parallelism, sizes: Any) -> dict[str, ParallelStyle]:
    """Module names -> style; sizes: a Glm4MoeConfig, which may have norms of queries and keys."""
    plan = qwen3_tp_plan if sizes.qk_norm else llama_tp_plan
    return with_experts(plan(parallelism), parallelism)
