"""How OLMo 3 is laid out over ranks: by OLMo 2's plan."""

from torch import nn

from components.config import JobConfig
from parallelize.mesh import Mesh
from parallelize.olmo2 import olmo2_tp_plan
from parallelize.order import parallelize


def parallelize_olmo3(model: nn.Module, mesh: Mesh, config: JobConfig) -> list[nn.Module]:
    """The stages of the model that this rank holds, laid out and still on the meta device."""
    return parallelize(model, mesh, config, olmo2_tp_plan(config.parallelism))
