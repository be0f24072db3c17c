"""How Llama is laid out over ranks: the tensor parallel plan, and the fixed order."""

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from components.config import JobConfig, Parallelism
from parallelize.activation import apply_activation_checkpoint
from parallelize.compile import apply_compile
from parallelize.context import apply_context_parallel
from parallelize.data import apply_data_parallel
from parallelize.float8 import apply_float8
from parallelize.mesh import Mesh
from parallelize.pipeline import split_stages
from parallelize.tensor import (
    Replicated,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    apply_tensor_parallel,
)


def parallelize_llama(model: nn.Module, mesh: Mesh, config: JobConfig) -> list[nn.Module]:
    """The stages of the model that this rank holds, still on the meta device. The order is that of __init__.py."""
    stages = split_stages(model, mesh, config.parallelism)
    for stage in stages:
        apply_float8(stage, config.model, config.quantize.linear.float8)
        apply_tensor_parallel(stage, mesh, llama_tp_plan(config.parallelism))
        apply_context_parallel(stage, mesh, config.parallelism)
        apply_compile(stage, mesh, config.compile, config.parallelism)
        apply_activation_checkpoint(stage, config.activation_checkpoint)
        apply_data_parallel(stage, mesh, config.training, config.parallelism)
    return stages


def llama_tp_plan(parallelism: Parallelism) -> dict[str, ParallelStyle]:
    """Module names -> style. Between matrices the hidden state (B, S, D) is split along S, or whole on every rank."""
    hidden = Shard(1) if parallelism.sequence_parallel else Replicate()
    norm = SequenceParallel() if parallelism.sequence_parallel else Replicated()
    return {
        "tok_embeddings": VocabularyParallelEmbedding(hidden),
        "layers.*.attention_norm": norm,
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(hidden, None, None, None), desired_input_layouts=(Replicate(), None, None, None)
        ),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=hidden),
        "layers.*.ffn_norm": norm,
        "layers.*.feed_forward": PrepareModuleInput(input_layouts=(hidden,), desired_input_layouts=(Replicate(),)),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=hidden),
        "norm": norm,
        "output": VocabularyParallelHead(hidden, parallelism.loss_parallel),
    }
