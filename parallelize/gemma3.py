"""How Gemma 3 is laid out over ranks: Qwen3's plan with the norms after attention and feed-forward."""

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from components.config import JobConfig, Parallelism
from parallelize.llama import post_norms
from parallelize.mesh import Mesh
from parallelize.order import parallelize
from parallelize.qwen3 import qwen3_tp_plan


def parallelize_gemma3(model: nn.Module, mesh: Mesh, config: JobConfig) -> list[nn.Module]:
    """The stages of the model that this rank holds, laid out and still on the meta device."""
    return parallelize(model, mesh, config, gemma3_tp_plan(config.parallelism))


def gemma3_tp_plan(parallelism: Parallelism) -> dict[str, ParallelStyle]:
    """Module names -> style."""
    return qwen3_tp_plan(parallelism) | post_norms(parallelism)
