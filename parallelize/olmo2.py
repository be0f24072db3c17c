"""How OLMo 2 is laid out over ranks: Llama's plan with norms after each sublayer, and norms over all heads."""

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from components.config import JobConfig, Parallelism
from parallelize.llama import llama_tp_plan, post_norms
from parallelize.mesh import Mesh
from parallelize.order import parallelize
from parallelize.tensor import NormOverHeads


def parallelize_olmo2(model: nn.Module, mesh: Mesh, config: JobConfig) -> list[nn.Module]:
    """The stages of the model that this rank holds, laid out and still on the meta device."""
    return parallelize(model, mesh, config, olmo2_tp_plan(config.parallelism))


def olmo2_tp_plan(parallelism: Parallelism) -> dict[str, ParallelStyle]:
    """Module names -> style."""
    plan = llama_tp_plan(parallelism) | post_norms(parallelism) | {"layers.*.attention.[qk]_norm": NormOverHeads()}
    del plan["layers.*.attention_norm"], plan["layers.*.ffn_norm"]
    return plan
