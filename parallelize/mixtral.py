"""How Mixtral is laid out over ranks: by Llama's plan, with experts in place of the feed-forward."""

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from components.config import JobConfig, Parallelism
from parallelize.expert import with_experts
from parallelize.llama import llama_tp_plan
from parallelize.mesh import Mesh
from parallelize.order import parallelize


def parallelize_mixtral(model: nn.Module, mesh: Mesh, config: JobConfig) -> list[nn.Module]:
    """The stages of the model that this rank holds, laid out and still on the meta device."""
    return parallelize(model, mesh, config, mixtral_tp_plan(config.parallelism))


def mixtral_tp_plan(parallelism: Parallelism) -> dict[str, ParallelStyle]:
    """Module names -> style."""
    return with_experts(llama_tp_plan(parallelism), parallelism)
