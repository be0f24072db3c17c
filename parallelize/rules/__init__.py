"""The table of layouts that are refused, each with its reason and what would work. Checked before launch."""

import difflib
import importlib.util
from collections.abc import Callable, Iterable, Iterator

from components.config import ConfigError, JobConfig, mistake
from parallelize.mesh import Degrees
from parallelize.rules import pipeline
from parallelize.rules.sizes import global_batch_size, near_multiples, sizes_of
from parallelize.rules.torch_names import PROVEN, check_torch, untried
from parallelize.schedules import SCHEDULES, schedule_of

Misfit = Callable[[JobConfig, Degrees], str]
"""Why a layout is refused and what would work, in a sentence; empty for a layout that is accepted."""


def _splits(what: str, attribute: str) -> Misfit:
    """tp has to divide one of the model's sizes."""

    def misfit(config: JobConfig, degrees: Degrees) -> str:
        size, model = getattr(sizes_of(config), attribute), config.model
        divisors = ", ".join(str(degree) for degree in range(1, min(size, 64) + 1) if size % degree == 0)
        reason = f"which {degrees.tp} ranks cannot share evenly; degrees that can: {divisors}"
        return f"{model.name} {model.flavor} has {size} {what}, {reason}" if size % degrees.tp else ""

    return misfit


def _pipeline(key: str, misfit: Misfit) -> tuple[str, Misfit]:
    """misfit is called only if there is a pipeline."""
    return f"parallelism.{key}", lambda config, degrees: misfit(config, degrees) if degrees.pp > 1 else ""


def _ulysses_misfit(config: JobConfig, degrees: Degrees) -> str:
    heads, kv_heads = sizes_of(config).n_heads // degrees.tp, max(1, sizes_of(config).n_kv_heads // degrees.tp)

    def shares(cp: int) -> bool:
        return heads % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0)

    if degrees.cp == 1 or config.parallelism.context_parallel_method != "ulysses" or shares(degrees.cp):
        return ""
    return (
        f"a rank has {heads} heads and {kv_heads} key/value heads, which {degrees.cp} ranks cannot exchange evenly; "
        f"context_parallel_degree = {' or '.join(str(cp) for cp in range(1, degrees.cp) if shares(cp))} would do, "
        'or context_parallel_method = "allgather_kv" or "ring"'
    )


def _global_batch_misfit(config: JobConfig, degrees: Degrees) -> str:
    size, local = global_batch_size(config, degrees), config.training.local_batch_size
    multiples = near_multiples(size, local * degrees.batch_ranks)
    reason = f"training.local_batch_size = {local} x {degrees.batch_ranks} batch ranks; {multiples} would be"
    return f"not a multiple of {reason}" if size % (local * degrees.batch_ranks) else ""


def _compiles_layers(config: JobConfig) -> bool:
    return config.compile.enable and "model" in config.compile.components


def _per_op_misfit(config: JobConfig, degrees: Degrees) -> str:
    checkpointing, parallelism = config.activation_checkpoint, config.parallelism
    if checkpointing.mode != "selective" or checkpointing.selective_ac_option != "op":
        return ""
    if _compiles_layers(config):
        return (
            "inside a compiled layer results lie in buffers that are used again, and gradients would be wrong without "
            'an error; mode = "memory_budget", or a number of layers, as "2", would do'
        )
    if degrees.pp > 1 and schedule_of(parallelism).splits_backward:
        return (
            f"{parallelism.pipeline_parallel_schedule} goes backward twice, for inputs and for weights, and what "
            'was kept is there for one; a number of layers, as "2", or mode = "full" would do'
        )
    return ""


def _async_misfit(config: JobConfig, degrees: Degrees) -> str:
    if not config.parallelism.enable_async_tensor_parallel:
        return ""
    needed = {
        "parallelism.tensor_parallel_degree of 2 or more": degrees.tp > 1,
        "parallelism.sequence_parallel = true": config.parallelism.sequence_parallel,
        'compile.enable = true and "model" in compile.components': _compiles_layers(config),
    }
    missing = [name for name, there in needed.items() if not there]
    return f"it is a pass of the compiler; it needs {', '.join(missing)}" if missing else ""


def _kernel_misfit(config: JobConfig, degrees: Degrees) -> str:
    from models.attention import KERNELS

    kernel = config.model.attention_kernel
    if kernel not in KERNELS:
        return _not_among(kernel, KERNELS)
    if kernel == "auto" or degrees.cp == 1 or config.parallelism.context_parallel_method != "ring":
        return ""
    return 'the ring has kernels of its own; context_parallel_method = "allgather_kv" or "ulysses" would do'


def _backend_misfit(config: JobConfig, degrees: Degrees) -> str:
    if not config.compile.enable or config.compile.backend == "inductor":
        return ""
    import torch

    known = torch.compiler.list_backends(exclude_tags=())
    return "" if config.compile.backend in known else _not_among(config.compile.backend, known)


def _float8_misfit(config: JobConfig, degrees: Degrees) -> str:
    if not config.model.converters or config.quantize.linear.float8.emulate:
        return ""
    sizes = sizes_of(config)
    split = {"n_heads x head_dim": sizes.n_heads, "n_kv_heads x head_dim": sizes.n_kv_heads}
    widths = {name: heads * sizes.head_dim // degrees.tp for name, heads in split.items()}
    widths |= {"dim": sizes.dim, "ffn_dim": sizes.ffn_dim // degrees.tp}
    odd = [f"{name} {width}" for name, width in widths.items() if width % 16]
    return f"float8 products need multiples of 16 on each rank; not so: {', '.join(odd)}" if odd else ""


def _budget_misfit(config: JobConfig, degrees: Degrees) -> str:
    partitioned = config.compile.backend in ("inductor", "aot_eager", "aot_eager_decomp_partition")
    if config.activation_checkpoint.mode != "memory_budget" or (_compiles_layers(config) and partitioned):
        return ""
    return (
        'the compiler keeps to the budget: it needs compile.enable = true, "model" among compile.components, and '
        'the backend "inductor"; mode = "selective" needs no compiler'
    )


def _key_heads_misfit(config: JobConfig, degrees: Degrees) -> str:
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


def _vocabulary_misfit(config: JobConfig, degrees: Degrees) -> str:
    rows, shards = sizes_of(config).vocab_size, degrees.dp_shard * degrees.cp
    if rows % degrees.tp == 0 or shards == 1:
        return ""
    from parallelize.sharding import knows_slices

    if knows_slices(rows, degrees.tp, shards):
        return ""
    can = ", ".join(str(count) for count in (1, 2, 4, 8, 16, 32, 64) if knows_slices(rows, degrees.tp, count))
    return (
        f"{degrees.tp} ranks share {rows} rows of the vocabulary unevenly, and torch would not know which of them each "
        f"of {shards} FSDP ranks (data_parallel_shard_degree x context_parallel_degree) has; {can} FSDP ranks would do"
    )


def _blocks_misfit(config: JobConfig, degrees: Degrees) -> str:
    if degrees.tp == 1 or config.optimizer.state_dtype != "int8":
        return ""
    from parallelize.sharding import block_of

    sizes = sizes_of(config)
    split = {"n_heads x head_dim": sizes.n_heads * sizes.head_dim, "ffn_dim": sizes.ffn_dim}
    cut = [f"{name} {width}" for name, width in split.items() if width // degrees.tp % block_of(width)]
    blocks = "blocks of numbers with one scale, which are for up to 16 tensor parallel ranks"
    return f'{degrees.tp} ranks would cut {blocks}: {", ".join(cut)}; "bfloat16" would do' if cut else ""


def _sums_misfit(config: JobConfig, degrees: Degrees) -> str:
    once = global_batch_size(config, degrees) == config.training.local_batch_size * degrees.batch_ranks
    if once or config.training.dtype == "float32" or config.parallelism.fsdp_reduce_gradients == "last":
        return ""
    return 'each reduction would round the gradients of weights in bfloat16; "last" adds them up in float32'


RULES: list[tuple[str, Misfit]] = [
    ("activation_checkpoint.mode", _budget_misfit),
    ("activation_checkpoint.selective_ac_option", _per_op_misfit),
    ("parallelism.enable_async_tensor_parallel", _async_misfit),
    ("model.converters", _float8_misfit),
    ("model.attention_kernel", _kernel_misfit),
    ("compile.backend", _backend_misfit),
    _pipeline("pipeline_parallel_schedule", pipeline.stages_misfit),
    _pipeline("pipeline_parallel_degree", pipeline.layers_misfit),
    _pipeline("module_fqns_per_model_part", pipeline.modules_misfit),
    _pipeline("pipeline_parallel_microbatch_size", pipeline.micro_batches_misfit),
    _pipeline("fsdp_reshard_after_forward", pipeline.reshard_misfit),
    _pipeline("fsdp_reduce_gradients", pipeline.reduce_misfit),
    ("parallelism.fsdp_reduce_gradients", _sums_misfit),
    ("training.local_batch_size", pipeline.turns_misfit),
    ("optimizer.state_dtype", _blocks_misfit),
    ("parallelism.tensor_parallel_degree", _splits("attention heads", "n_heads")),
    ("parallelism.tensor_parallel_degree", _key_heads_misfit),
    ("parallelism.tensor_parallel_degree", _splits("feed-forward columns", "ffn_dim")),
    ("parallelism.tensor_parallel_degree", _vocabulary_misfit),
    ("parallelism.context_parallel_method", _ulysses_misfit),
    ("training.global_batch_size", _global_batch_misfit),
]
"""The key that a mistake names, and the function that finds the mistake."""


def broken_rules(config: JobConfig, degrees: Degrees) -> Iterator[str]:
    """A line for each rule that this layout breaks."""
    for key, misfit in RULES:
        if reason := misfit(config, degrees):
            yield mistake(config, key, reason)


def check_device(config: JobConfig, cuda: tuple[int, int] | None) -> None:
    """Raises ConfigError for settings that the device cannot honour; cuda: compute capability, None on the CPU."""
    float8 = bool(config.model.converters) and not config.quantize.linear.float8.emulate
    spec = importlib.util.find_spec("torch")
    torch_path = str(spec.origin if spec else "")
    inductor = config.compile.enable and config.compile.backend == "inductor"
    wrong = {
        "comm.mode": config.comm.mode == "fake_backend",
        "compile.backend": inductor and cuda is None and " " in torch_path,
        "profiling.enable_memory_snapshot": config.profiling.enable_memory_snapshot and cuda is None,
        "parallelism.enable_async_tensor_parallel": config.parallelism.enable_async_tensor_parallel and cuda is None,
        "model.attention_kernel": config.model.attention_kernel == "flex" and cuda is None,
        "model.converters": float8 and (cuda is None or cuda < (8, 9)),
    }
    reasons = {
        "comm.mode": "train.py trains; a dry run is started by ./run_train.sh",
        "compile.backend": f"on the CPU it cannot link with a torch whose path has a space: {torch_path}",
        "profiling.enable_memory_snapshot": "memory snapshots are CUDA's",
        "parallelism.enable_async_tensor_parallel": "it needs CUDA",
        "model.attention_kernel": "FlexAttention has no backward on a CPU",
        "model.converters": "float8 needs CUDA with compute capability 8.9, or quantize.linear.float8.emulate = true",
    }
    if found := [mistake(config, key, reasons[key]) for key in wrong if wrong[key]]:
        raise ConfigError(found)


def check_model(config: JobConfig) -> None:
    """Raises ConfigError for an unknown model.name or model.flavor, with the nearest known name."""
    from models import MODELS

    name, flavor = config.model.name, config.model.flavor
    if name not in MODELS:
        raise ConfigError(mistake(config, "model.name", _not_among(name, MODELS)))
    flavors = MODELS[name][1]
    if flavor not in flavors:
        raise ConfigError(mistake(config, "model.flavor", _not_among(flavor, flavors)))
    for key in ("initial_load_in_hf", "last_save_in_hf"):
        if getattr(config.checkpoint, key) and not MODELS[name][0].hf_type:
            raise ConfigError(mistake(config, f"checkpoint.{key}", f"Hugging Face has no {name} (its hf_type)"))


def _not_among(given: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(given, known, 1, 0.5)
    return f"not one of {', '.join(known)}" + (f"; did you mean {near[0]}?" if near else "")


def check_layout(config: JobConfig, degrees: Degrees) -> None:
    """Raises ConfigError for a torch without the names that are used, an unknown model or schedule, or broken rules."""
    check_torch(config, degrees)
    check_model(config)
    if (schedule := config.parallelism.pipeline_parallel_schedule) not in SCHEDULES:
        raise ConfigError(mistake(config, "parallelism.pipeline_parallel_schedule", _not_among(schedule, SCHEDULES)))
    if broken := list(broken_rules(config, degrees)):
        raise ConfigError(broken)


def warnings(config: JobConfig, degrees: Degrees, ranks_per_node: int) -> list[str]:
    """Accepted layouts that are slow or less exact, each with what would be better."""
    found = [f"torch {untried()} has not been tried; {PROVEN} has"] if untried() else []
    if ranks_per_node % degrees.tp:
        found.append(
            f"parallelism.tensor_parallel_degree = {degrees.tp}: a group of {degrees.tp} ranks spans nodes of "
            f"{ranks_per_node}, and tensor parallel waits for every layer's messages; keep it inside a node"
        )
    recipe = config.quantize.linear.float8.recipe_name
    if config.model.converters and recipe != "rowwise_with_gw_hp":
        found.append(
            f'quantize.linear.float8.recipe_name = "{recipe}": scales are shared by tokens or rows that lie on one '
            "rank, so that numbers depend on the layout; rowwise_with_gw_hp does not"
        )
    micro_batches = config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
    if micro_batches < degrees.pp:
        found.append(
            f"training.local_batch_size = {config.training.local_batch_size}: {micro_batches} micro-batches leave "
            f"{degrees.pp} pipeline ranks idle for most of the time; several times as many keep them busy"
        )
    return found
