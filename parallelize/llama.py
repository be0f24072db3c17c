"""How Llama is laid out over ranks."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from components.config import JobConfig
from parallelize.data import apply_data_parallel


def parallelize_llama(model: nn.Module, mesh: DeviceMesh, config: JobConfig) -> list[nn.Module]:
    """The stages of the model that this rank holds, still on the meta device. The order is that of __init__.py."""
    stages = [model]
    for stage in stages:
        apply_data_parallel(stage, mesh, config.training, config.parallelism)
    return stages
