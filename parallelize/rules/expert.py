"""Rules on mixtures of experts: each function gives the reason for a refusal, or an empty string."""

from collections.abc import Callable

from components.config import JobConfig
from parallelize.mesh import Degrees
from parallelize.rules.sizes import sizes_of


def ranks_misfit(config: JobConfig, degrees: Degrees) -> str:
    if degrees.ep == 1:
        return ""
    sizes, model = sizes_of(config), f"{config.model.name} {config.model.flavor}"
    experts = getattr(sizes, "n_experts", 0)
    if not experts:
        return f"{model} has no experts; use 1"
    ranks = degrees.dp_shard * degrees.cp * degrees.tp
    can = [ep for ep in range(1, ranks + 1) if ranks % ep == 0 and experts % ep == 0]
    if degrees.ep not in can:
        return (
            f"{experts} experts on {ranks} ranks (data_parallel_shard_degree x context_parallel_degree x "
            f"tensor_parallel_degree); use {' or '.join(map(str, can))}"
        )
    held, shards = experts // degrees.ep, degrees.efsdp
    uneven = [size for size in (sizes.expert_dim, sizes.dim) if size % shards]
    # A matrix is cut by its rows or by its columns. A bias has one size, and blocks of columns are not cut.
    either = not (sizes.expert_bias or config.model.lora.rank or config.optimizer.state_dtype == "int8")
    if held % shards and len(uneven) > either:
        return (
            f"{shards} ranks (efsdp) share the weights of {held} experts, which they cannot share evenly: neither "
            f"{held} nor the size {uneven[0]} of their matrices is a multiple; a larger degree may do"
        )
    return ""


def balance_misfit(key: str) -> Callable[[JobConfig, Degrees], str]:
    """A key of [experts] needs experts."""

    def misfit(config: JobConfig, degrees: Degrees) -> str:
        if not getattr(config.experts, key) or hasattr(sizes_of(config), "n_experts"):
            return ""
        return f"{config.model.name} {config.model.flavor} has no experts; use 0"

    return misfit


def frozen_misfit(config: JobConfig, degrees: Degrees) -> str:
    if not (config.model.lora.rank and config.experts.bias_update_speed):
        return ""
    return "it would move biases of routers, which are frozen beside adapters (lora.rank); use 0"


def parts_misfit(config: JobConfig, degrees: Degrees) -> str:
    if not config.experts.sequence_loss_factor or config.parallelism.pipeline_parallel_sequence_splits == 1:
        return ""
    return "with pipeline_parallel_sequence_splits a part does not know the experts of later parts; use 1"


def export_misfit(config: JobConfig, degrees: Degrees) -> str:
    from models import meta_model

    if not (config.checkpoint.last_save_in_hf and config.experts.bias_update_speed):
        return ""
    model = meta_model(config.model)
    if all(model.hf_name(name) for name, _ in model.named_parameters()):
        return ""
    return (
        f"Hugging Face's files of {config.model.name} have no place for the biases that experts.bias_update_speed "
        "moves; experts.sequence_loss_factor balances without them"
    )
