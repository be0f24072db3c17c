"""How DeepSeek-V3 is laid out over ranks: Llama's plan with latent attention, and experts beside the feed-forward.

Latents are narrow, and every head is computed from a whole latent. Each rank therefore computes whole latents, and from
them its own heads.
"""

from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from components.config import JobConfig, Parallelism
from parallelize.expert import with_experts
from parallelize.llama import llama_tp_plan
from parallelize.mesh import Mesh
from parallelize.order import parallelize
from parallelize.tensor import ForOwnHeads, RowsOfOwnHeads


def parallelize_deepseek_v3(model: nn.Module, mesh: Mesh, config: JobConfig) -> list[nn.Module]:
    """The stages of the model that this rank holds, laid out and still on the meta device."""
    return parallelize(model, mesh, config, deepseek_v3_tp_plan(config.parallelism, model.config))


def deepseek_v3_tp_plan(parallelism: Parallelism, sizes: Any) -> dict[str, ParallelStyle]:
    """Module names -> style; sizes: a DeepseekV3Config, whose queries may have a latent too."""
    plan = llama_tp_plan(parallelism)
    del plan["layers.*.attention.w[kv]"]
    if sizes.q_lora_rank is not None:
        del plan["layers.*.attention.wq"]
    return with_experts(plan, parallelism) | {
        "layers.*.attention.w*_a": ForOwnHeads(),
        "layers.*.attention.*_norm": ForOwnHeads(),
        "layers.*.attention.w*_b": RowsOfOwnHeads(),
    }
