"""Rules on what the job file says of the model: each function gives the reason for a refusal, or an empty string."""

from dataclasses import fields, replace

from components.config import JobConfig, Lora, RopeScaling
from parallelize.mesh import Degrees
from parallelize.rules.sizes import sizes_of

_OF_TYPE = {
    "linear": {"factor"},
    "llama3": {"factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"},
}
"""The keys of model.rope_scaling that a rope_type takes."""


def kernel_misfit(config: JobConfig, degrees: Degrees) -> str:
    if config.model.attention_kernel == "auto":
        return ""
    if sizes_of(config).sinks:
        return f'attention with the sinks of {config.model.name} has kernels of its own; use "auto"'
    if config.parallelism.pipeline_parallel_sequence_splits > 1:
        return "parts of sequences have kernels of their own; use pipeline_parallel_sequence_splits = 1"
    if degrees.cp == 1 or config.parallelism.context_parallel_method != "ring":
        return ""
    return 'the ring has kernels of its own; use context_parallel_method = "allgather_kv" or "ulysses"'


def lora_misfit(config: JobConfig, degrees: Degrees) -> str:
    if not config.model.lora.rank:
        return ""
    from models import meta_model

    try:
        meta_model(config.model)
    except ValueError as error:
        return str(error)
    return ""


def mup_misfit(config: JobConfig, degrees: Degrees) -> str:
    if not config.optimizer.mup_base:
        return ""
    from models import meta_model

    try:
        model = meta_model(config.model, mup_base=config.optimizer.mup_base)
    except ValueError as error:
        return str(error)
    names = (name for name, _ in model.named_parameters()) if config.optimizer.norm.weight_decay else ()
    for name in names:
        if model.kind(name).role == "norm" and model.kind(name).zero and model.scale(name).start != 1:
            return f"{name} multiplies by 1 + weight: optimizer.norm.weight_decay would undo its factor; use 0"
    return ""


def packing_misfit(config: JobConfig, degrees: Degrees) -> str:
    if config.model.lora.base != "nf4":
        return ""
    from models import meta_model
    from models.nf4 import BLOCK

    model = meta_model(replace(config.model, lora=Lora()))
    for name, parameter in model.named_parameters():
        kind, columns = model.kind(name), parameter.shape[-1]
        split = kind.into_residual and kind.role == "matrix"  # an expert is whole on a rank
        ranks = degrees.tp if split or name.endswith("mtp.eh_proj.weight") else 1
        if kind.role in ("matrix", "expert") and columns % (BLOCK * ranks):
            shared = f", which {ranks} tensor parallel ranks share," if ranks > 1 else ""
            return f'the {columns} columns of {name}{shared} are no whole blocks of {BLOCK}; use "bfloat16"'
    return ""


def export_misfit(config: JobConfig, degrees: Degrees) -> str:
    """RoPE scaling of the job file that config.json of the family cannot have."""
    asked = config.model.rope_scaling.rope_type
    if not (config.checkpoint.last_save_in_hf and asked) or config.model.lora.rank:
        return ""
    from models import meta_model

    model = meta_model(config.model)
    try:
        lost = [f"{name} would be {there}" for name, (there, _) in model.hf_lost().items()] if model.hf_type else []
    except ValueError as error:
        lost = [str(error)]
    if not lost:
        return ""
    return (
        f'Hugging Face\'s files of {config.model.name} have no place for model.rope_scaling.rope_type = "{asked}" '
        f"({lost[0]}); use another rope_type, or train without an export"
    )


def rope_misfit(config: JobConfig, degrees: Degrees) -> str:
    from models import sizes

    asked, default = config.model.rope_scaling, RopeScaling()
    taken = _OF_TYPE.get(asked.rope_type, set())
    given = {each.name for each in fields(asked) if getattr(asked, each.name) != getattr(default, each.name)}
    if idle := sorted(given - taken - {"rope_type"}):
        can = [name for name, keys in _OF_TYPE.items() if keys.issuperset(idle)]
        return f"it does not take {', '.join(idle)}; {' or '.join(can)} would"
    if asked.rope_type == "yarn" and asked.beta_fast <= asked.beta_slow:
        return f"beta_fast = {asked.beta_fast:g} is not above beta_slow = {asked.beta_slow:g}; 32 and 1 are usual"
    own = sizes(replace(config.model, rope_scaling=default)).rope_scaling
    if len(taken) > 1 and own and own.rope_type == "linear" and not asked.original_max_position_embeddings:
        return "the flavor does not say of which length it was before: set original_max_position_embeddings"
    return "it stretches nothing with factor = 1; 2.0 doubles the length" if taken and asked.factor == 1 else ""
