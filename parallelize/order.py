"""The fixed order in which every family's layout is applied to a model on the meta device.

- stages: cut first, so that no device makes parameters that it will not keep
- float8: swaps linear modules, which tensor parallel then splits
- tensor parallel: replaces parameters, so it comes before whatever wraps them
- expert parallel: shares out the experts, which tensor parallel leaves whole
- context parallel: changes only the attention cores and the visibility
- sequence splits: changes the same modules, for pipelines that pass on parts of sequences
- compile: compiles a layer's `forward`, after the last replacement inside the layer
- checkpointing: goes around the compiled layer, because torch 2.13 fails the other way round with tensor parallel
- data parallel: outermost, because `fully_shard` shards the parameters as all other axes leave them

Adapters (models/lora.py) are in the model from the start. The model gets memory and weights after all axes, and its
tied weights are shared again. The schedule of a pipeline is built after that.
"""

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from components.config import JobConfig
from models.objective import objective_of, with_objective
from parallelize.activation import apply_activation_checkpoint
from parallelize.compile import apply_compile
from parallelize.context import apply_context_parallel
from parallelize.data import apply_data_parallel
from parallelize.expert import apply_expert_parallel, expert_shards, has_experts
from parallelize.float8 import apply_float8
from parallelize.mesh import Mesh, global_batch_size
from parallelize.mtp import with_mtp
from parallelize.parts import apply_sequence_splits
from parallelize.pipeline import split_stages
from parallelize.schedules import splits_backward
from parallelize.tensor import apply_tensor_parallel
from parallelize.wrapping import wrapping_of


def parallelize(
    model: nn.Module, mesh: Mesh, config: JobConfig, tp_plan: Mapping[str, ParallelStyle]
) -> list[nn.Module]:
    """The stages of the model that this rank holds, laid out and still on the meta device."""
    # The mesh dimension that shards every parameter; the replicas' dimension comes before it.
    shards = mesh["dp_replicate", "fsdp"] if mesh["dp_replicate"].size() > 1 else mesh["fsdp"]
    experts = has_experts(model)
    of_experts = expert_shards(mesh, shards) if experts else None
    sequences, wrapping = global_batch_size(config, mesh.degrees), wrapping_of(config, mesh.degrees, experts)
    objective = objective_of(*config.objective_and_terms)
    stages = split_stages(with_objective(model, objective), mesh, config.parallelism)
    for stage in stages:
        trained = _trained(stage)
        stage.seq_len = config.training.seq_len  # type: ignore[assignment]
        stage.visibility.padded_rows = config.training.has_chats  # type: ignore[union-attr]
        apply_float8(stage, config.model, config.quantize.linear.float8)
        apply_tensor_parallel(stage, mesh, with_mtp(tp_plan, stage, config.parallelism))
        apply_expert_parallel(stage, mesh, config.experts, sequences, config.training.seq_len)
        apply_context_parallel(stage, mesh, config.parallelism, config.training.seq_len)
        apply_sequence_splits(stage, config.parallelism.pipeline_parallel_sequence_splits)
        apply_compile(stage, mesh, config.compile, config.parallelism)
        apply_activation_checkpoint(stage, config.activation_checkpoint, splits_backward(config.parallelism))
        keeps_blocks = config.optimizer.state_dtype == "int8"
        apply_data_parallel(stage, shards, of_experts, wrapping, config.training, config.parallelism, keeps_blocks)
        assert _trained(stage) == trained, "a layout has changed a parameter's name, or whether it is trained"
    return stages


def _trained(stage: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in stage.named_parameters()}
