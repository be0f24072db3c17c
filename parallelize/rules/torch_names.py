"""Private names of torch that are used here, by what uses them: torch 2.13 has them, another version may not."""

from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from operator import attrgetter

from components.config import ConfigError, JobConfig
from parallelize.mesh import Degrees

PROVEN = "2.13"
_RING = "torch.distributed.tensor.experimental._context_parallel._attention"
PRIVATE: tuple[tuple[Callable[[JobConfig, Degrees], bool], tuple[str, ...]], ...] = (
    (
        lambda config, degrees: True,
        (
            "torch:_foreach_mul_",
            "torch:_foreach_norm",
            "torch.distributed.device_mesh:DeviceMesh._unflatten",
            "torch.distributed.distributed_c10d:_set_pg_timeout",
            "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
        ),
    ),
    (
        lambda config, degrees: config.comm.mode == "fake_backend",
        (
            "torch:UntypedStorage._cdata",
            "torch:ops.aten.mm.default._schema",
            "torch._subclasses.fake_tensor:FakeTensorMode",
            "torch.distributed.tensor:DTensor._local_tensor",
            "torch.testing._internal.distributed.fake_pg:FakeStore",
            "torch.utils._python_dispatch:TorchDispatchMode",
            "torch.utils._pytree:tree_leaves",
        ),
    ),
    (lambda config, degrees: config.metrics.dynamics_freq > 0, ("torch:_foreach_sub_",)),
    (
        lambda config, degrees: config.profiling.enable_memory_snapshot,
        ("torch.cuda.memory:_dump_snapshot", "torch.cuda.memory:_record_memory_history"),
    ),
    (lambda config, degrees: degrees.tp > 1, ("torch.distributed.tensor.parallel:ParallelStyle._apply",)),
    (
        lambda config, degrees: degrees.cp > 1 and config.parallelism.context_parallel_method == "ring",
        (
            "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
            "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
            f"{_RING}:_ContextParallel.AttentionType",
            f"{_RING}:_DispatchMode.MODULE_WRAPPER",
            f"{_RING}:_cp_options.enable_load_balance",
            f"{_RING}:_dispatch_mode",
            f"{_RING}:_enable_cp_dtensor_dispatcher",
            f"{_RING}:_templated_ring_attention",
            f"{_RING}:_templated_ring_attention_backward",
            f"{_RING}:custom_ops",
            f"{_RING}:set_rotate_method",
        ),
    ),
    (
        lambda config, degrees: degrees.cp > 1 and config.parallelism.context_parallel_method == "ulysses",
        ("torch.distributed._functional_collectives:all_to_all_single_autograd",),
    ),
    (
        lambda config, degrees: config.activation_checkpoint.mode == "selective",
        (
            "torch:ops._c10d_functional.all_gather_into_tensor",
            "torch:ops._c10d_functional.all_reduce",
            "torch:ops._c10d_functional.all_to_all_single",
            "torch:ops._c10d_functional.reduce_scatter_tensor",
            "torch:ops.aten._scaled_dot_product_cudnn_attention",
            "torch:ops.aten._scaled_dot_product_efficient_attention",
            "torch:ops.aten._scaled_dot_product_flash_attention",
            "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
        ),
    ),
    (lambda config, degrees: config.compile.enable, ("torch._functorch.config:donated_buffer",)),
    (
        lambda config, degrees: config.parallelism.enable_async_tensor_parallel,
        (
            "torch._inductor.config:_micro_pipeline_tp",
            "torch.distributed._symmetric_memory:enable_symm_mem_for_group",
        ),
    ),
)
"""Whether a layout uses names, and the names: module:attributes."""


@cache
def torch_version() -> str:
    return metadata.version("torch")


def untried() -> str:
    """The version of torch if it is not the one that everything was proven on, else nothing."""
    return "" if torch_version().startswith(f"{PROVEN}.") else torch_version()


def check_torch(config: JobConfig, degrees: Degrees) -> None:
    """Raises ConfigError where a torch that was not tried lacks a private name that the layout uses."""
    used = (name for uses, names in PRIVATE if uses(config, degrees) for name in names)
    if untried() and (missing := [name.replace(":", ".") for name in used if not is_there(name)]):
        raise ConfigError(f"torch {untried()} lacks {', '.join(missing)}, which this layout uses; {PROVEN} has them")


def is_there(name: str) -> bool:
    """Whether this torch has module:attributes."""
    module, _, attributes = name.partition(":")
    try:
        attrgetter(attributes)(import_module(module))
    except (ImportError, AttributeError):
        return False
    return True
