"""The table of layouts that are refused, each with its reason and what would work. Checked before launch."""

import math
import os
from collections.abc import Callable

from components.config import ConfigError, JobConfig, Rule, check_rules, mistake
from parallelize.mesh import Degrees, global_batch_size, resolve_degrees
from parallelize.rules import compile, expert, model, pipeline, tensor
from parallelize.rules.chosen import check_sizes, resolved
from parallelize.rules.device import DEVICE_RULES, Device, unproven
from parallelize.rules.names import NAMES
from parallelize.rules.sizes import near_multiples, sizes_of
from parallelize.rules.torch_names import PROVEN, check_torch, untried

Misfit = Callable[[JobConfig, Degrees], str]
"""Why a layout is refused and what would work, in a sentence; empty for a layout that is accepted."""


def _ulysses_misfit(config: JobConfig, degrees: Degrees) -> str:
    heads, kv_heads = sizes_of(config).n_heads // degrees.tp, max(1, sizes_of(config).n_kv_heads // degrees.tp)

    def shares(cp: int) -> bool:
        return heads % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0)

    if degrees.cp == 1 or config.parallelism.context_parallel_method != "ulysses" or shares(degrees.cp):
        return ""
    return (
        f"a rank has {heads} heads and {kv_heads} key/value heads, which {degrees.cp} ranks cannot exchange evenly; "
        f"use context_parallel_degree = {' or '.join(str(cp) for cp in range(1, degrees.cp) if shares(cp))}, "
        'or context_parallel_method = "allgather_kv" or "ring"'
    )


def _global_batch_misfit(config: JobConfig, degrees: Degrees) -> str:
    size, local, ranks = global_batch_size(config, degrees), config.training.local_batch_size, degrees.batch_ranks
    if size % (local * ranks) == 0:
        return ""
    smaller = "" if size % ranks else f"; or use training.local_batch_size = {math.gcd(local, size // ranks)}"
    multiples = near_multiples(size, local * ranks)
    return f"not a multiple of training.local_batch_size = {local} x {ranks} batch ranks; {multiples} would be{smaller}"


def _sums_misfit(config: JobConfig, degrees: Degrees) -> str:
    once = global_batch_size(config, degrees) == config.training.local_batch_size * degrees.batch_ranks
    if once or config.training.dtype == "float32" or config.parallelism.fsdp_reduce_gradients == "last":
        return ""
    return 'each reduction would round the gradients of weights in bfloat16; "last" adds them up in float32'


def _pipeline(key: str, misfit: Misfit, why: str) -> Rule:
    """misfit is called only if there is a pipeline."""
    in_pipelines: Misfit = lambda config, degrees: misfit(config, degrees) if degrees.pp > 1 else ""  # noqa: E731
    return Rule(f"parallelism.{key}", in_pipelines, why)


RULES = [
    Rule(
        "activation_checkpoint.mode",
        compile.budget_misfit,
        "The compiler's partitioner keeps to the budget when it divides a compiled layer. "
        "Otherwise nothing is divided.",
    ),
    Rule(
        "activation_checkpoint.selective_ac_option",
        compile.per_op_misfit,
        "torch keeps results of single operations where Python calls these operations, which it does not inside a "
        "compiled layer; a memory budget is the compiler's own way.",
    ),
    Rule(
        "activation_checkpoint.debug",
        compile.debug_misfit,
        "torch writes down what a layer calls in one context, which is entered once, in Python.",
    ),
    Rule(
        "parallelism.enable_async_tensor_parallel",
        compile.async_misfit,
        "inductor cuts the messages of sequence parallel into pieces: it has to "
        "compile them, and they have to be there.",
    ),
    Rule(
        "model.converters",
        tensor.float8_misfit,
        "The GPU's scaled products take multiples of 16. It would take padding of each rank's part of a matrix.",
    ),
    Rule(
        "quantize.linear.float8.filter_fqns",
        tensor.filters_misfit,
        "What no name has in it would filter nothing, which nobody sees.",
    ),
    Rule(
        "model.attention_kernel",
        model.kernel_misfit,
        "The ring, parts of sequences and sinks compute attention in steps, which also need the log-sum-exp of their "
        "logits: only their own kernels give it.",
    ),
    Rule(
        "model.rope_scaling.rope_type",
        model.rope_misfit,
        "Each kind of stretching has its own settings; one that nobody reads would be a mistake that nobody sees.",
    ),
    Rule(
        "model.lora.target_modules",
        model.lora_misfit,
        "A name that no matrix has would be a matrix without an adapter, which nobody sees.",
    ),
    Rule(
        "optimizer.mup_base",
        model.mup_misfit,
        "Factors are ratios of a matrix's width to that of the base: without its like in the base there is no ratio.",
    ),
    Rule(
        "model.lora.base",
        model.packing_misfit,
        "A block of 64 numbers has one scale: a rank with half a block would have another scale than one process. It "
        "would take shorter blocks.",
    ),
    Rule("compile.backend", compile.backend_misfit, "torch has no such backend."),
    _pipeline(
        "pipeline_parallel_schedule",
        pipeline.stages_misfit,
        "The order of a schedule is defined for these numbers of stages a rank.",
    ),
    _pipeline(
        "pipeline_parallel_degree", pipeline.layers_misfit, "A stage without a layer would only pass a message on."
    ),
    _pipeline(
        "module_fqns_per_model_part",
        pipeline.modules_misfit,
        "A module in two stages would be two modules, and one in no stage would be missing.",
    ),
    _pipeline(
        "pipeline_parallel_microbatch_size",
        pipeline.micro_batches_misfit,
        "Micro-batches have one size, and the order of a schedule is defined for these numbers of micro-batches: with "
        "another one a rank would wait for a message that nobody sends.",
    ),
    Rule(
        "parallelism.pipeline_parallel_sequence_splits",
        pipeline.splits_misfit,
        "Parts pass from stage to stage, in an order of their own, made after 1F1B. It would take orders after other "
        "schedules, and parts that context parallel ranks share.",
    ),
    _pipeline(
        "fsdp_reshard_after_forward",
        pipeline.reshard_misfit,
        "torch gathers weights before a whole backward, and frees them after it. It would take gathering weights once "
        "more, for the second of two backwards.",
    ),
    _pipeline(
        "pipeline_parallel_schedule",
        pipeline.ahead_misfit,
        "torch walks from each use of a weight to the weight. A later use leads through an earlier one, whose graph is "
        "freed.",
    ),
    _pipeline(
        "fsdp_reduce_gradients",
        pipeline.reduce_misfit,
        "It would take a reduction between any two messages of the schedule, in an order that is the same on "
        "all ranks.",
    ),
    Rule(
        "parallelism.fsdp_reduce_gradients",
        _sums_misfit,
        "A reduction ends in the precision of the weights. Sums of rounded sums depend on how many there are, and that "
        "on the layout.",
    ),
    Rule(
        "training.local_batch_size",
        pipeline.turns_misfit,
        "As above: each turn of a pipeline ends in gradients of the precision of the weights. It would take sums in "
        "float32 beside the gradients, from turn to turn.",
    ),
    Rule(
        "optimizer.state_dtype",
        tensor.blocks_misfit,
        "The numbers of a block have one scale. On two ranks they would have two, and codes would depend on the "
        "layout. It would take smaller blocks, with more bytes for scales.",
    ),
    Rule(
        "parallelism.tensor_parallel_degree",
        tensor.heads_misfit,
        "A logit is a sum over the whole width of a head: half a head on each rank would need a message for each pair "
        "of tokens. It would take ranks with different numbers of heads.",
    ),
    Rule(
        "parallelism.tensor_parallel_degree",
        tensor.key_heads_misfit,
        "Query heads have to be on the ranks of their key head. It would take ranks with different numbers of heads; "
        "and for float8, scales of parts of a matrix that no rank holds.",
    ),
    Rule(
        "parallelism.tensor_parallel_degree",
        tensor.columns_misfit,
        "It would take ranks with different numbers of columns, as they have different numbers of rows of a "
        "vocabulary.",
    ),
    Rule(
        "parallelism.tensor_parallel_degree",
        tensor.latents_misfit,
        "Gradients of these matrices are partial sums of products that each rank computes for its own heads. It would "
        "take such products in float8.",
    ),
    Rule(
        "parallelism.tensor_parallel_degree",
        tensor.vocabulary_misfit,
        "FSDP cuts what tensor parallel has cut, and torch 2.13 computes wrong places for parts of different sizes. It "
        "would take places of our own in checkpoints.",
    ),
    Rule(
        "parallelism.expert_parallel_degree",
        expert.ranks_misfit,
        "Experts are whole on a rank, and each rank has as many as every other.",
    ),
    *(
        Rule(f"experts.{key}", expert.balance_misfit(key), "A model without experts has no load to balance.")
        for key in ("bias_update_speed", "sequence_loss_factor", "z_loss_factor")
    ),
    Rule(
        "experts.bias_update_speed",
        expert.frozen_misfit,
        "Neither a checkpoint of adapters nor a folder of PEFT's has biases of routers: they are the base's.",
    ),
    Rule(
        "checkpoint.last_save_in_hf",
        expert.export_misfit,
        "Their models would choose experts without the biases: other experts than those that were trained.",
    ),
    Rule(
        "checkpoint.last_save_in_hf",
        model.export_misfit,
        "Their models would rotate by other angles than those that were trained.",
    ),
    Rule(
        "experts.sequence_loss_factor",
        expert.parts_misfit,
        "The loss of a part of a sequence depends on the experts of all its tokens, also of those of later parts.",
    ),
    Rule(
        "parallelism.context_parallel_method",
        _ulysses_misfit,
        "A rank computes whole heads of the whole sequence. The other two methods have no limit on heads.",
    ),
    Rule(
        "training.global_batch_size",
        _global_batch_misfit,
        "Every rank has as many sequences as every other. It would take ranks that compute nothing in a part "
        "of a step.",
    ),
]


FIRST = [
    Rule("parallelism.pipeline_parallel_schedule", pipeline.schedule_misfit),
    Rule("parallelism.pipeline_parallel_schedule_csv", pipeline.table_misfit),
]
"""Rules that are checked first, in this order, because later rules assume that the earlier ones hold."""


def check_device(config: JobConfig, cuda: tuple[int, int] | None) -> None:
    """Raises ConfigError for settings that the device or an environment variable would not honour.

    cuda: compute capability, None on the CPU.
    """
    check_rules(DEVICE_RULES, config, Device(cuda))


def check_model(config: JobConfig) -> None:
    """Raises ConfigError for an unknown name of NAMES, with the nearest known name, and for wrong model.sizes."""
    for rule in NAMES:
        check_rules([rule], config)
    check_sizes(config)


def check_layout(config: JobConfig, degrees: Degrees) -> None:
    """Raises ConfigError for a torch without the names that are used, an unknown model or schedule, or broken rules."""
    check_torch(config, degrees)
    check_model(config)
    for rule in FIRST:
        check_rules([rule], config, degrees)
    check_rules(RULES, config, degrees)


def checked(config: JobConfig) -> JobConfig:
    """The resolved job of a process, one of WORLD_SIZE, that ./run_train.sh did not start. Raises ConfigError."""
    if config.parallelism.auto:
        reason = "only ./run_train.sh fills in a layout: start with it, or set the keys of the layout"
        raise ConfigError(mistake(config, "parallelism.auto", reason))
    config = resolved(config)
    check_layout(config, resolve_degrees(config, int(os.environ.get("WORLD_SIZE", "1"))))
    return config


def warnings(config: JobConfig, degrees: Degrees, ranks_per_node: int, on_cpu: bool) -> list[str]:
    """Accepted layouts that are slow or less exact, each with what would be better."""
    found = [f"torch {untried()} has not been tried; {PROVEN} has"] if untried() else []
    found += [] if config.comm.mode == "fake_backend" else unproven()
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
    computes_on_cpu = on_cpu and config.comm.mode != "fake_backend"
    if computes_on_cpu and config.training.mixed_precision_param == "bfloat16" and not _multiplies_bfloat16():
        found.append(
            'training.mixed_precision_param = "bfloat16": this CPU has no instructions for it, and a step may take ten '
            'times as long as in "float32" or more'
        )
    micro_batches = config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
    if micro_batches * config.parallelism.pipeline_parallel_sequence_splits < degrees.pp:
        found.append(
            f"training.local_batch_size = {config.training.local_batch_size}: {micro_batches} micro-batches leave "
            f"{degrees.pp} pipeline ranks idle for most of the time; several times as many keep them busy"
        )
    return found


def _multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU. Without oneDNN, torch multiplies bfloat16 in scalar loops."""
    import torch

    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
