"""How Phi-3 is laid out over ranks: by Llama's plan."""

from torch import nn

from components.config import JobConfig
from parallelize.llama import llama_tp_plan
from parallelize.mesh import Mesh
from parallelize.order import parallelize


def parallelize_phi3(model: nn.Module, mesh: Mesh, config: JobConfig) -> list[nn.Module]:
    """The stages of the model that this rank holds, laid out and still on the meta device."""
    return parallelize(model, mesh, config, llama_tp_plan(config.parallelism))
