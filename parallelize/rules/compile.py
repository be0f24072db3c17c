"""Rules on the compiler: each function gives the reason for a refusal, or an empty string."""

from components.config import JobConfig
from parallelize.mesh import Degrees
from parallelize.rules.sizes import not_among
from parallelize.schedules import splits_backward


def compiles_layers(config: JobConfig) -> bool:
    return config.compile.enable and "model" in config.compile.components


def per_op_misfit(config: JobConfig, degrees: Degrees) -> str:
    checkpointing = config.activation_checkpoint
    if checkpointing.mode != "selective" or checkpointing.selective_ac_option != "op":
        return ""
    if compiles_layers(config):
        return (
            "inside a compiled layer results lie in buffers that are used again, and gradients would be wrong without "
            'an error; use mode = "memory_budget", or a number of layers, as "2"'
        )
    return ""


def debug_misfit(config: JobConfig, degrees: Degrees) -> str:
    """torch's log of operations is a context that can be entered only once, and cannot be compiled."""
    checkpointing = config.activation_checkpoint
    if not checkpointing.debug or checkpointing.mode not in ("full", "selective"):
        return ""
    if checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op":
        return 'torch logs whole layers alone; use selective_ac_option = "1"'
    if compiles_layers(config):
        return 'a compiled layer calls no operation that could be logged; use compile.components = ["loss"]'
    if splits_backward(config.parallelism):
        return "the schedule computes each layer twice again, and torch logs it once; use another schedule"
    return ""


def async_misfit(config: JobConfig, degrees: Degrees) -> str:
    if not config.parallelism.enable_async_tensor_parallel:
        return ""
    needed = {
        "parallelism.tensor_parallel_degree of 2 or more": degrees.tp > 1,
        "parallelism.sequence_parallel = true": config.parallelism.sequence_parallel,
        'compile.enable = true and "model" in compile.components': compiles_layers(config),
    }
    missing = [name for name, there in needed.items() if not there]
    return f"it is a pass of the compiler; it needs {', '.join(missing)}" if missing else ""


def backend_misfit(config: JobConfig, degrees: Degrees) -> str:
    if not config.compile.enable or config.compile.backend == "inductor":
        return ""
    import torch

    known = torch.compiler.list_backends(exclude_tags=())
    return "" if config.compile.backend in known else not_among(config.compile.backend, known)


def budget_misfit(config: JobConfig, degrees: Degrees) -> str:
    partitioned = config.compile.backend in ("inductor", "aot_eager", "aot_eager_decomp_partition")
    if config.activation_checkpoint.mode != "memory_budget" or (compiles_layers(config) and partitioned):
        return ""
    return (
        'the compiler keeps to the budget: it needs compile.enable = true, "model" among compile.components, and '
        'the backend "inductor"; mode = "selective" needs no compiler'
    )
