"""Rules on what tensor parallel ranks share: each function gives the reason for a refusal, or an empty string."""

from dataclasses import replace

from components.config import JobConfig, Lora
from parallelize.mesh import Degrees
from parallelize.padding import padded_length
from parallelize.rules.sizes import not_among, sizes_of, uneven


def heads_misfit(config: JobConfig, degrees: Degrees) -> str:
    return _uneven(sizes_of(config).n_heads, "attention heads", config, degrees)


def columns_misfit(config: JobConfig, degrees: Degrees) -> str:
    for name, size in sizes_of(config).tp_columns.items():
        what = "columns of mtp.eh_proj" if name == "2 x dim" else "feed-forward columns"
        if found := _uneven(size, what, config, degrees):
            return found
    return ""


def _uneven(size: int, what: str, config: JobConfig, degrees: Degrees) -> str:
    found = uneven(size, what, degrees.tp)
    return f"{config.model.name} {config.model.flavor} has {found}" if found else ""


def float8_misfit(config: JobConfig, degrees: Degrees) -> str:
    if not config.model.converters or config.quantize.linear.float8.emulate:
        return ""
    sizes = sizes_of(config)
    split = {"n_heads x head_dim": sizes.n_heads, "n_kv_heads x head_dim": sizes.n_kv_heads}
    widths = {name: heads * sizes.head_dim // degrees.tp for name, heads in split.items()}
    widths |= sizes.whole_widths | {name: columns // degrees.tp for name, columns in sizes.tp_columns.items()}
    recipe, training, parallelism = config.quantize.linear.float8.recipe_name, config.training, config.parallelism
    if recipe != "rowwise_with_gw_hp":  # gradients of weights are float8 products too, over the tokens of a pass
        parts = degrees.cp * parallelism.pipeline_parallel_sequence_splits
        sequences = parallelism.pipeline_parallel_microbatch_size if degrees.pp > 1 else training.local_batch_size
        tokens = sequences * padded_length(training.seq_len, degrees, parallelism) // parts
        widths[f"tokens of a pass (recipe {recipe})"] = tokens
    odd = [f"{name} {width}" for name, width in widths.items() if width % 16]
    return f"float8 products need multiples of 16 on each rank; not so: {', '.join(odd)}" if odd else ""


def filters_misfit(config: JobConfig, degrees: Degrees) -> str:
    filters = config.quantize.linear.float8.filter_fqns
    if not config.model.converters or not filters:
        return ""
    from torch import nn

    from models import meta_model

    model = meta_model(replace(config.model, lora=Lora()))
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for part in filters:
        if not any(part in name for name in names):
            words = {word for name in names for word in name.split(".") if not word.isdigit()}
            return f"{part}: {not_among(part, sorted(words))}"
    layers = [name for name in names if name.startswith("layers.")]
    return "" if any(not any(part in name for part in filters) for name in layers) else "no matrix would be left"


def key_heads_misfit(config: JobConfig, degrees: Degrees) -> str:
    heads, model = sizes_of(config).n_kv_heads, config.model
    if heads % degrees.tp and degrees.tp % heads:
        can = [str(degree) for degree in range(1, 65) if heads % degree == 0 or degree % heads == 0]
        reason = f"which {degrees.tp} ranks cannot share evenly; degrees that can: {', '.join(can)}"
        return f"{model.name} {model.flavor} has {heads} key/value heads, {reason}"
    if degrees.tp > heads and model.converters:
        return (
            f"{degrees.tp} ranks would each use a part of the matrices of {heads} key/value heads, which float8 cannot"
        )
    return ""


def latents_misfit(config: JobConfig, degrees: Degrees) -> str:
    """A model has latents if `whole_widths` holds more widths than dim."""
    if degrees.tp == 1 or not config.model.converters or len(sizes_of(config).whole_widths) == 1:
        return ""
    return f"{degrees.tp} ranks would each multiply latents with whole matrices, which float8 cannot; use 1"


def vocabulary_misfit(config: JobConfig, degrees: Degrees) -> str:
    rows, shards = sizes_of(config).vocab_size, degrees.dp_shard * degrees.cp
    if rows % degrees.tp == 0 or shards == 1:
        return ""
    from parallelize.sharding import knows_slices

    if knows_slices(rows, degrees.tp, shards):
        return ""
    can = ", ".join(str(count) for count in (1, 2, 4, 8, 16, 32, 64) if knows_slices(rows, degrees.tp, count))
    return (
        f"{degrees.tp} ranks share {rows} rows of the vocabulary unevenly, and torch would not know which of them each "
        f"of {shards} FSDP ranks (data_parallel_shard_degree x context_parallel_degree) has; use {can} FSDP ranks"
    )


def blocks_misfit(config: JobConfig, degrees: Degrees) -> str:
    if degrees.tp == 1 or config.optimizer.state_dtype != "int8":
        return ""
    from parallelize.sharding import block_of

    sizes = sizes_of(config)
    split = {"n_heads x head_dim": sizes.n_heads * sizes.value_dim} | sizes.tp_columns
    cut = [f"{name} {width}" for name, width in split.items() if width // degrees.tp % block_of(width)]
    blocks = "blocks of numbers with one scale, which are for up to 16 tensor parallel ranks"
    return f'{degrees.tp} ranks would cut {blocks}: {", ".join(cut)}; use "bfloat16"' if cut else ""
