"""Layers of multi-token prediction (models/mtp.py) over ranks.

- pipeline parallel: the last stage has them beside the head, with a copy of the embedding table (pipeline.py)
- tensor parallel: the matrix that joins hidden states and embeddings is split by columns, because its input is split
  along the sequence or whole
"""

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, SequenceParallel

from components.config import Parallelism
from models.config import TransformerConfig
from parallelize.tensor import NormAtEnd, Replicated


def mtp_modules(sizes: TransformerConfig) -> list[str]:
    """Names of the layers of multi-token prediction."""
    return [f"layers.{sizes.n_layers + layer}" for layer in range(sizes.mtp_layers)]


def with_mtp(plan: Mapping[str, ParallelStyle], stage: nn.Module, parallelism: Parallelism) -> dict[str, ParallelStyle]:
    """A tensor parallel plan with the styles of the stage's layers of multi-token prediction, if it has any.

    The last norm then gives a local tensor, because the first of these layers takes its output too.
    """
    parts = [f"layers.{number}.mtp" for number, layer in stage.get_submodule("layers").named_children() if layer.mtp]
    if not parts:
        return dict(plan)
    hidden = Shard(1) if parallelism.sequence_parallel else Replicate()
    norm = SequenceParallel(use_local_output=True) if parallelism.sequence_parallel else Replicated()
    joins = RowwiseParallel(input_layouts=hidden, output_layouts=hidden)
    styles = {"enorm": norm, "hnorm": norm, "eh_proj": joins, "norm": NormAtEnd(norm)}
    own = {f"{part}.{name}": style for part in parts for name, style in styles.items()}
    return {**plan, "norm": norm, **own}
