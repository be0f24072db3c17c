"""Private names of torch that this repository uses: torch 2.13 has them, another version may lack some."""

from functools import cache
from importlib import import_module
from operator import attrgetter

from components.config import ConfigError, JobConfig
from parallelize.mesh import Degrees
from parallelize.rules.sizes import sizes_of

PROVEN = "2.13"
PRIVATE: dict[str, dict[str, str]] = {
    "every run": {
        "torch": "_foreach_mul_ _foreach_norm _softmax_backward_data",
        "torch._C._distributed_c10d": "_dump_fr_trace_json",
        "torch._dynamo.config": "recompile_limit",
        "torch.distributed": "ProcessGroup._get_backend ProcessGroupGloo._Options ProcessGroupGloo._Options._devices "
        "ProcessGroupGloo._Options._threads ProcessGroupGloo._Options._timeout",
        "torch.distributed.device_mesh": "DeviceMesh._unflatten",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        "torch.distributed.distributed_c10d": "_get_default_store _set_pg_timeout",
        "torch.ops": "mkldnn._is_mkldnn_bf16_supported",
        "torch.distributed.tensor._utils": "compute_local_shape_and_global_offset",
    },
    "dry run": {
        "torch": "UntypedStorage._cdata ops.aten._local_scalar_dense.default ops.aten.mm.default._schema",
        "torch._subclasses.fake_tensor": "FakeTensorMode",
        "torch.distributed.pipelining._backward": "stage_backward_input stage_backward_weight",
        "torch.distributed.tensor": "DTensor._local_tensor",
        "torch.distributed.tensor._sharding_prop": "ShardingPropagator._fake_mode_lock",
        "torch.testing._internal.distributed.fake_pg": "FakeStore",
        "torch.utils._python_dispatch": "TorchDispatchMode",
        "torch.utils._pytree": "tree_leaves",
    },
    "Muon": {"torch.distributed.tensor._utils": "_compute_local_shape_and_global_offset"},
    "training dynamics": {"torch": "_foreach_sub_"},
    "memory snapshots": {"torch.cuda.memory": "_dump_snapshot _record_memory_history"},
    "tensor parallel": {
        "torch.distributed.tensor._utils": "_compute_local_shape_and_global_offset",
        "torch.distributed.tensor.parallel": "ParallelStyle._apply",
        "torch.distributed.tensor.placement_types": "_StridedShard",
    },
    "ring": {
        "torch.distributed._functional_collectives": "AsyncCollectiveTensor.wait all_gather_single "
        "permute_tensor reduce_scatter_single",
    },
    "ulysses": {"torch.distributed._functional_collectives": "all_to_all_single_autograd"},
    "experts": {
        "torch.distributed.fsdp._fully_shard._fsdp_common": "FSDPMeshInfo HSDPMeshInfo ShardPlacementResult",
    },
    "expert parallel": {
        "torch.distributed._functional_collectives": "AsyncCollectiveTensor.wait all_to_all_single_autograd",
    },
    "attention in steps": {
        "torch.ops": "aten._scaled_dot_product_flash_attention aten._scaled_dot_product_flash_attention_backward "
        "aten._scaled_dot_product_flash_attention_for_cpu aten._scaled_dot_product_flash_attention_for_cpu_backward",
    },
    "pipeline": {
        "torch.distributed.fsdp._fully_shard._fsdp_state": "FSDPState._fsdp_param_groups FSDPState._state_ctx",
        "torch.distributed.pipelining": "PipelineStage._create_grad_recv_info PipelineStage._retrieve_recv_activations "
        "PipelineStage._retrieve_recv_grads PipelineStage._setup_forward_recv_info",
    },
    "tables of actions": {
        "torch.distributed.pipelining.schedules": "_Action.from_str "
        "_PipelineScheduleRuntime._prepare_schedule_with_comms"
    },
    "checkpointing per operation": {
        "torch.ops": "_c10d_functional.all_reduce _c10d_functional.all_to_all_single "
        "_c10d_functional.reduce_scatter_tensor aten._scaled_mm aten._scaled_dot_product_cudnn_attention "
        "aten._scaled_dot_product_efficient_attention aten._scaled_dot_product_flash_attention "
        "aten._scaled_dot_product_flash_attention_for_cpu"
    },
    "proof": {"torch._C": "_current_graph_task_id"},
    "compile": {"torch._functorch.config": "donated_buffer"},
    "memory budget": {"torch._functorch.config": "activation_memory_budget unsafe_treat_script_objects_as_zero_size"},
    "async tensor parallel": {
        "torch._inductor.config": "_micro_pipeline_tp",
        "torch.distributed._symmetric_memory": "enable_symm_mem_for_group",
    },
}
"""Part of a layout -> module of torch -> names in it."""


def _used(config: JobConfig, degrees: Degrees) -> dict[str, bool]:
    """Whether a layout uses each part of PRIVATE."""
    wrapped = degrees.world_size > 1 or config.training.enable_cpu_offload or config.training.dtype != "float32"
    checkpointing, splits = config.activation_checkpoint, config.parallelism.pipeline_parallel_sequence_splits > 1
    return dict.fromkeys(PRIVATE, False) | {
        "every run": True,
        "dry run": config.comm.mode == "fake_backend",
        "Muon": config.optimizer.name == "Muon",
        "training dynamics": config.metrics.dynamics_freq > 0,
        "memory snapshots": config.profiling.enable_memory_snapshot,
        "tensor parallel": degrees.tp > 1,
        config.parallelism.context_parallel_method: degrees.cp > 1,
        "experts": hasattr(sizes_of(config), "n_experts") and wrapped,
        "expert parallel": degrees.ep > 1,
        "attention in steps": splits or (degrees.cp > 1 and config.parallelism.context_parallel_method == "ring"),
        "pipeline": degrees.pp > 1,
        "tables of actions": splits or bool(config.parallelism.pipeline_parallel_schedule_csv),
        "checkpointing per operation": (checkpointing.mode, checkpointing.selective_ac_option) == ("selective", "op"),
        "compile": config.compile.enable,
        "memory budget": checkpointing.mode == "memory_budget",
        "async tensor parallel": config.parallelism.enable_async_tensor_parallel,
    }


@cache
def torch_version() -> str:
    from importlib.metadata import version  # 25 ms; imported here, so that mistakes in a job file come first

    return version("torch")


def untried() -> str:
    """The version of torch if it is another than PROVEN; else empty."""
    return "" if torch_version().startswith(f"{PROVEN}.") else torch_version()


def lacking(part: str) -> list[str]:
    """The names of a part of PRIVATE that this torch lacks."""
    names = ((module, name) for module, names in PRIVATE[part].items() for name in names.split())
    return [f"{module}.{name}" for module, name in names if not _is_there(module, name)]


def _is_there(module: str, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    try:
        found = attrgetter(owner)(import_module(module)) if owner else import_module(module)
        return hasattr(found, last) or last in vars(found)["__init__"].__code__.co_names  # set by __init__
    except KeyError:
        return False
    except (ImportError, AttributeError):
        return False


def check_torch(config: JobConfig, degrees: Degrees) -> None:
    """Raises ConfigError where a torch that was not tried lacks a private name that the layout uses."""
    used = [part for part, used in _used(config, degrees).items() if used and part in PRIVATE] if untried() else ()
    if missing := [f"{name} ({part})" for part in used for name in lacking(part)]:
        raise ConfigError(f"torch {untried()} lacks {', '.join(missing)}, which this layout uses; {PROVEN} has them")
