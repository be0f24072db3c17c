"""How Llama is laid out over ranks: its tensor parallel plan."""

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
from parallelize.mesh import Mesh
from parallelize.order import parallelize
from parallelize.tensor import KeyValueHeads, Replicated, VocabularyParallelEmbedding, VocabularyParallelHead


def parallelize_llama(model: nn.Module, mesh: Mesh, config: JobConfig) -> list[nn.Module]:
    """The stages of the model that this rank holds, laid out and still on the meta device."""
    return parallelize(model, mesh, config, llama_tp_plan(config.parallelism))


def llama_tp_plan(parallelism: Parallelism) -> dict[str, ParallelStyle]:
    """Module names -> style. Between matrices the hidden state (B, S, D) is split along S, or replicated."""
    hidden = Shard(1) if parallelism.sequence_parallel else Replicate()
    norm = SequenceParallel() if parallelism.sequence_parallel else Replicated()
    return {
        "tok_embeddings": VocabularyParallelEmbedding(hidden),
        "layers.*.attention_norm": norm,
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(hidden, None, None, None), desired_input_layouts=(Replicate(), None, None, None)
        ),
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.w[kv]": KeyValueHeads(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=hidden),
        "layers.*.ffn_norm": norm,
        "layers.*.feed_forward": PrepareModuleInput(input_layouts=(hidden,), desired_input_layouts=(Replicate(),)),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=hidden),
        "norm": norm,
        "output": VocabularyParallelHead(hidden, parallelism.loss_parallel),
    }


def post_norms(parallelism: Parallelism) -> dict[str, ParallelStyle]:
    """Module names -> style of norms after attention and feed-forward: local tensors, for the residual sum."""
    after = SequenceParallel(use_local_output=True) if parallelism.sequence_parallel else Replicated()
    return dict.fromkeys(("layers.*.attention_post_norm", "layers.*.ffn_post_norm"), after)
