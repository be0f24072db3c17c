"""How Qwen3 with experts is laid out over ranks: Qwen3's plan, with experts in place of the feed-forward."""

from torch import nn

from components.config import JobConfig
from models.moe import MixtureConfig
from parallelize.expert import with_experts
from parallelize.mesh import Mesh
from parallelize.order import parallelize
from parallelize.qwen3 import qwen3_tp_plan


def parallelize_qwen3_moe(model: nn.Module, mesh: Mesh, config: JobConfig) -> list[nn.Module]:
    """The stages of the model that this rank holds, laid out and still on the meta device."""
    sizes = model.config
    assert isinstance(sizes, MixtureConfig)
    plan = with_experts(qwen3_tp_plan(config.parallelism), config.parallelism, shared=sizes.shared_dim > 0)
    return parallelize(model, mesh, config, plan)
