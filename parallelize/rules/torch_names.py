"""Private names of torch that are used here, by what uses them: torch 2.13 has them, another version may not."""

from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from operator import attrgetter

from components.config import ConfigError, JobConfig
from parallelize.mesh import Degrees

PROVEN = "2.13"
Uses = Callable[[JobConfig, Degrees], bool]
PRIVATE: tuple[tuple[Uses, dict[str, str]], ...] = (
    (
        lambda config, degrees: True,
        {
            "torch": "_foreach_mul_ _foreach_norm",
            "torch.distributed.device_mesh": "DeviceMesh._unflatten",
            "torch.distributed.distributed_c10d": "_set_pg_timeout",
            "torch.distributed.tensor._utils": "compute_local_shape_and_global_offset",
        },
    ),
    (
        lambda config, degrees: config.comm.mode == "fake_backend",
        {
            "torch": "UntypedStorage._cdata ops.aten.mm.default._schema",
            "torch._subclasses.fake_tensor": "FakeTensorMode",
            "torch.distributed.tensor": "DTensor._local_tensor",
            "torch.testing._internal.distributed.fake_pg": "FakeStore",
            "torch.utils._python_dispatch": "TorchDispatchMode",
            "torch.utils._pytree": "tree_leaves",
        },
    ),
    (lambda config, degrees: config.metrics.dynamics_freq > 0, {"torch": "_foreach_sub_"}),
    (
        lambda config, degrees: config.profiling.enable_memory_snapshot,
        {"torch.cuda.memory": "_dump_snapshot _record_memory_history"},
    ),
    (lambda config, degrees: degrees.tp > 1, {"torch.distributed.tensor.parallel": "ParallelStyle._apply"}),
    (
        lambda config, degrees: degrees.cp > 1 and config.parallelism.context_parallel_method == "ring",
        {
            "torch.ops": "aten._scaled_dot_product_flash_attention_for_cpu "
            "aten._scaled_dot_product_flash_attention_for_cpu_backward",
            "torch.distributed.tensor.experimental._context_parallel._attention": "_ContextParallel.AttentionType "
            "_DispatchMode.MODULE_WRAPPER _cp_options.enable_load_balance _dispatch_mode _enable_cp_dtensor_dispatcher "
            "_templated_ring_attention _templated_ring_attention_backward custom_ops set_rotate_method",
        },
    ),
    (
        lambda config, degrees: degrees.cp > 1 and config.parallelism.context_parallel_method == "ulysses",
        {"torch.distributed._functional_collectives": "all_to_all_single_autograd"},
    ),
    (
        lambda config, degrees: config.activation_checkpoint.mode == "selective",
        {
            "torch.ops": "_c10d_functional.all_gather_into_tensor _c10d_functional.all_reduce "
            "_c10d_functional.all_to_all_single _c10d_functional.reduce_scatter_tensor "
            "aten._scaled_dot_product_cudnn_attention aten._scaled_dot_product_efficient_attention "
            "aten._scaled_dot_product_flash_attention aten._scaled_dot_product_flash_attention_for_cpu"
        },
    ),
    (lambda config, degrees: config.compile.enable, {"torch._functorch.config": "donated_buffer"}),
    (
        lambda config, degrees: config.parallelism.enable_async_tensor_parallel,
        {
            "torch._inductor.config": "_micro_pipeline_tp",
            "torch.distributed._symmetric_memory": "enable_symm_mem_for_group",
        },
    ),
)
"""Whether a layout uses names, and the names by the module that has them."""


@cache
def torch_version() -> str:
    return metadata.version("torch")


def untried() -> str:
    """The version of torch if it is not the one that everything was proven on, else nothing."""
    return "" if torch_version().startswith(f"{PROVEN}.") else torch_version()


def check_torch(config: JobConfig, degrees: Degrees) -> None:
    """Raises ConfigError where a torch that was not tried lacks a private name that the layout uses."""
    if not untried():
        return
    used = [parts for uses, table in PRIVATE if uses(config, degrees) for parts in names_of(table)]
    if missing := [f"{module}.{name}" for module, name in used if not is_there(module, name)]:
        raise ConfigError(f"torch {untried()} lacks {', '.join(missing)}, which this layout uses; {PROVEN} has them")


def names_of(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(module, name) for module, names in table.items() for name in names.split()]


def is_there(module: str, name: str) -> bool:
    """Whether this torch has it; the name may be one of a class in the module."""
    try:
        attrgetter(name)(import_module(module))
    except (ImportError, AttributeError):
        return False
    return True
