"""How Gemma 3 is laid out over ranks: Qwen3's plan with the norms after attention and feed-forward."""

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel

from components.config import JobConfig, Parallelism
from parallelize.mesh import Mesh
from parallelize.order import parallelize
from parallelize.qwen3 import qwen3_tp_plan
from parallelize.tensor import Replicated


def parallelize_gemma3(model: nn.Module, mesh: Mesh, config: JobConfig) -> list[nn.Module]:
    """The stages of the model that this rank holds, laid out and still on the meta device."""
    return parallelize(model, mesh, config, gemma3_tp_plan(config.parallelism))


def gemma3_tp_plan(parallelism: Parallelism) -> dict[str, ParallelStyle]:
    """Pattern of module names -> style. Norms after a module give local tensors, for the residual sum."""
    after = SequenceParallel(use_local_output=True) if parallelism.sequence_parallel else Replicated()
    return qwen3_tp_plan(parallelism) | dict.fromkeys(("layers.*.attention_post_norm", "layers.*.ffn_post_norm"), after)
