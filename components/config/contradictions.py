"""The table of settings that are valid alone but contradict another setting."""

import json
import os
import re
from dataclasses import fields
from functools import partial
from pathlib import Path

from components.config.bounds import LARGEST, PathError, integer_weights, local_path
from components.config.optimizer import OPTIMIZER_KEYS, Role
from components.config.rule import Rule, value_of
from components.config.tables import Chat, Evaluation, JobConfig, Preference, Samples, Source, Validation

EXPORTS = "hugging_face"
"""Folder inside job.dump_folder to which checkpoint.last_save_in_hf writes."""
_OR_FOLDER = ", or model.flavor = a folder"
_FLOAT8 = "quantize.linear.float8"
_NOT_LOADED = "needs checkpoint.enable = true: without, no checkpoint of the run is loaded"
_TEXTLESS = {
    "preference": "records are pairs of chats; chat.messages_field names the field of prompts",
    "chat": "records are chats; chat.messages_field names the field of messages",
    "tokens": "token files have no texts: leave it out",
}
_NO_FLOAT8 = f'needs model.converters = ["{_FLOAT8}"]'


def _optimizer_misfit(job: JobConfig, key: str) -> str | bool:
    name = job.optimizer.name
    given = f"optimizer.{key}" in job.origins and key not in OPTIMIZER_KEYS[name]
    return given and f'optimizer.name = "{name}" has no such setting'


def _mup_misfit(job: JobConfig) -> str | bool:
    table = job.optimizer
    roles = [value for each in fields(table) if isinstance(value := getattr(table, each.name), Role)]
    decays = [table.weight_decay if role.weight_decay is None else role.weight_decay for role in roles]
    through_gradients = bool(table.mup_base) and table.name == "Adam" and any(decays)
    remedy = 'use optimizer.name = "AdamW", or optimizer.weight_decay = 0'
    return through_gradients and f"Adam decays through the gradient, whose size depends on the width: {remedy}"


def _dtype_misfit(job: JobConfig) -> str | bool:
    name = job.optimizer.name
    rounds = job.training.dtype == "float32" or "state_dtype" in OPTIMIZER_KEYS[name]
    return not rounds and f'optimizer.name = "{name}" cannot round updates of bfloat16 weights; use "float32"'


def _implementation_misfit(job: JobConfig) -> str | bool:
    rounded = {job.optimizer.state_dtype, job.training.dtype} != {"float32"}
    one = "there is one for weights and moments that are rounded: leave it out"
    return rounded and job.optimizer.implementation != "fused" and one


def _batch_misfit(job: JobConfig) -> str | bool:
    size, local = job.training.global_batch_size, job.training.local_batch_size
    free = job.parallelism.auto and "training.local_batch_size" not in job.origins
    return size != -1 and size % local != 0 and not free and f"not a multiple of training.local_batch_size = {local}"


def _auto_misfit(job: JobConfig) -> str | bool:
    if job.parallelism.auto and job.training.global_batch_size == -1:
        return "training.global_batch_size is unset, so that each layout would be another run; set it"
    return job.parallelism.auto and job.comm.share_gpus and "plans have a GPU for each rank: leave comm.share_gpus out"


def _tokens_misfit(job: JobConfig, key: str) -> str | bool:
    table = value_of(job, key)
    size, seq_len = table.local_batch_size or job.training.local_batch_size, table.seq_len or job.training.seq_len
    used = key == "training" or job.validation.enable
    too_many = f"with {key}.local_batch_size = {size}: more than {LARGEST:,} tokens at once"
    return used and size * seq_len > LARGEST and too_many


def _offload_misfit(job: JobConfig) -> str | bool:
    checkpointing = job.activation_checkpoint
    per_op = checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op"
    whole_layers = checkpointing.mode in ("full", "selective") and not per_op
    needs = 'it moves the inputs of checkpointed layers: needs mode = "full", or "selective" and a number'
    return checkpointing.offload and not whole_layers and needs


def _stages_misfit(job: JobConfig, key: str) -> str | bool:
    given = f"parallelism.{key}" in job.origins and bool(job.parallelism.module_fqns_per_model_part)
    return given and "module_fqns_per_model_part lists the stages: leave it out"


def _kwargs_misfit(job: JobConfig) -> str | bool:
    try:
        given = json.loads(job.chat.template_kwargs)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    return not isinstance(given, dict) and "expected a JSON object, as '{\"enable_thinking\": false}'"


def _folder_misfit(job: JobConfig, key: str) -> str | bool:
    """Refuses an output folder outside the dump folder, or inside the folder that an export replaces."""
    dump, name = Path(job.job.dump_folder), value_of(job, key)
    folder, whole = (Path(os.path.realpath(path)) for path in (dump / name, dump))
    if folder == whole or not folder.is_relative_to(whole):
        return f"must be a folder inside job.dump_folder = {dump}"
    if job.checkpoint.last_save_in_hf and folder.is_relative_to(whole / EXPORTS):
        return f"checkpoint.last_save_in_hf replaces {dump / EXPORTS} with what it writes"
    try:
        local_path(str((dump / name).absolute()))
    except PathError as error:
        return f"{dump / name}: {error}"
    return False


def _remote_misfit(job: JobConfig) -> str | bool:
    """Refuses a store inside the dump folder, whose checkpoints would be its copies."""
    url = job.checkpoint.remote
    copies, own = (Path(os.path.realpath(path)) for path in (url.removeprefix("file://"), job.job.dump_folder))
    inside = url.startswith("file://") and copies.is_relative_to(own)
    return inside and f"use a folder outside of job.dump_folder = {own}"


def _mixture_misfit(job: JobConfig) -> str | bool:
    """Refuses a mixture beside another dataset, wrong sources, and a mixture without any weight."""
    names = [source.name for source in job.training.mixture]
    if not names:
        return False
    if job.training.dataset_path:
        return "the sources have paths of their own: leave training.dataset_path out"
    if _formats(job) & {"preference"}:
        return "rows of pairs are no source: leave the mixture out, and set training.dataset_path"
    if job.training.dataset_streaming:
        return "shares need the size of each source, and a stream has none: leave training.dataset_streaming out"
    for source in job.training.mixture:
        if reason := _source_misfit(source, job.training.dataset_format):
            return f'source "{source.name}": {reason}'
    if twice := sorted({name for name in names if names.count(name) > 1}):
        return f'two sources have the name "{twice[0]}"'
    if not any(source.weight for source in job.training.mixture):
        return "no source has a weight above 0"
    return _digits_misfit([source.weight for source in job.training.mixture])


def _formats(job: JobConfig) -> set[str]:
    """The formats of the data."""
    training = job.training
    sources = [source.dataset_format or training.dataset_format for source in training.mixture]
    return {*sources} or {training.dataset_format}


def _source_misfit(source: Source, default_format: str) -> str:
    if bool(source.dataset) == bool(source.dataset_path):
        return "set either dataset_path, or dataset to a dataset of the hub"
    if source.dataset and "/" not in source.dataset:
        return f'dataset = "{source.dataset}": expected "org/name" of the hub; other data have a dataset_path'
    kind = source.dataset_format or default_format
    if source.dataset and kind == "tokens":
        return "token files are local: use dataset_path"
    if source.dataset_format == "chat" != default_format:
        return 'chats need training.dataset_format = "chat", and sources of text dataset_format = "text"'
    if source.dataset_text_field and kind == "chat":
        return "its records are chats, so leave dataset_text_field out; chat.messages_field names the field of messages"
    if source.dataset_text_field and kind == "tokens":
        return "token files have no texts: leave dataset_text_field out"
    return ""


def _temperature_misfit(job: JobConfig) -> str | bool:
    """Refuses a temperature without a mixture, or beside weights."""
    training = job.training
    if training.mixture_temperature is None:
        return False
    if not training.mixture:
        return "needs [[training.mixture]]"
    for number, source in enumerate(training.mixture, 1):
        if source.weight and (key := f"training.mixture[{number}].weight") in job.origins:
            return f"the weights follow from the sizes of the sources: leave {key} out, or use 0 until a phase sets it"
    return False


def _digits_misfit(weights: list[float]) -> str | bool:
    try:
        integer_weights(weights)
    except ValueError as error:
        return str(error)
    return False


def _phases_misfit(job: JobConfig) -> str | bool:
    """Refuses phases without a mixture, out of order, of unknown sources, or without any weight."""
    phases, names = job.training.mixture_phase, [source.name for source in job.training.mixture]
    if phases and not names:
        return "needs [[training.mixture]]"
    starts = [phase.from_sequence for phase in phases]
    if starts != sorted(set(starts)):
        return f"from_sequence must grow from phase to phase; it is {', '.join(map(str, starts))}"
    for phase in phases:
        if unknown := sorted(phase.weights.keys() - {*names}):
            return f'no source has the name "{unknown[0]}"; there are {", ".join(names)}'
        if not any(phase.weights.values()):
            return f"from_sequence = {phase.from_sequence}: no source has a weight above 0"
        if reason := _digits_misfit([*phase.weights.values()]):
            return f"from_sequence = {phase.from_sequence}: {reason}"
    return False


def _streams(job: JobConfig) -> bool:
    """Whether the training data are a stream."""
    training = job.training
    local = training.dataset_path or training.mixture or training.dataset == "kjv"
    return training.dataset_streaming or not (local or training.dataset_format == "chat")


CONTRADICTIONS = [
    *(
        Rule(
            f"distill.{key}",
            lambda job, key=key: (
                f"distill.{key}" in job.origins
                and "distill.alpha" not in job.origins
                and "needs distill.alpha; 0 says that there is no teacher"
            ),
        )
        for key in ("temperature", "top", "teacher_path")
    ),
    Rule(
        "distill.alpha",
        lambda job: (
            job.distill.alpha > 0
            and _streams(job)
            and "a teacher's rows belong to numbered sequences, and a stream has none: use training.dataset_path, and "
            "leave training.dataset_streaming out"
        ),
    ),
    Rule(
        "training.label_smoothing",
        lambda job: (
            job.distill.alpha > 0
            and job.training.label_smoothing > 0
            and "the teacher's probabilities take the place of smoothed labels: use 0, or distill.alpha = 0"
        ),
    ),
    Rule(
        "distill.alpha",
        lambda job: (
            job.distill.alpha > 0
            and job.mtp_layers > 0
            and "a teacher's rows are of the next token alone: use model.sizes.mtp_layers = 0"
        ),
    ),
    *(
        Rule(
            key,
            lambda job, asked=asked: (
                asked(job)
                and job.training.dataset_format == "preference"
                and "preference.loss is what pairs minimise: use 0"
            ),
        )
        for key, asked in (
            ("distill.alpha", lambda job: job.distill.alpha > 0),
            ("model.sizes", lambda job: job.mtp_layers > 0),
        )
    ),
    Rule("training.mixture", _mixture_misfit),
    Rule("training.mixture_temperature", _temperature_misfit),
    Rule("training.mixture_phase", _phases_misfit),
    *(
        Rule(f"optimizer.{key}", partial(_optimizer_misfit, key=key))
        for key in sorted({key for keys in OPTIMIZER_KEYS.values() for key in keys})
    ),
    Rule("training.dtype", _dtype_misfit),
    Rule("optimizer.implementation", _implementation_misfit),
    Rule("optimizer.mup_base", _mup_misfit),
    Rule(
        "optimizer.mup_base",
        lambda job: (
            bool(job.optimizer.mup_base)
            and job.model.lora.rank > 0
            and "adapters have the width of lora.rank, and the matrices beside them are frozen: leave it out"
        ),
    ),
    Rule(
        "optimizer.state_offload",
        lambda job: (
            job.optimizer.state_offload
            and job.training.enable_cpu_offload
            and "training.enable_cpu_offload = true keeps all of it on the host: leave one out"
        ),
    ),
    Rule(
        "lr_scheduler.total_steps",
        lambda job: (
            job.lr_scheduler.total_steps is not None
            and job.lr_scheduler.total_steps < job.training.steps
            and f"training.steps = {job.training.steps} is more"
        ),
    ),
    *(
        Rule(
            f"training.dataloader.{key}",
            lambda job, key=key: (
                job.training.dataloader.num_workers == 0
                and bool(value_of(job, f"training.dataloader.{key}"))
                and "needs num_workers of 1 or more"
            ),
        )
        for key in ("persistent_workers", "prefetch_factor")
    ),
    Rule("training.global_batch_size", _batch_misfit),
    Rule(
        "training.skip_spikes_window",
        lambda job: (
            "training.skip_spikes_window" in job.origins
            and not job.training.skip_spikes_sigma
            and "needs training.skip_spikes_sigma; 6 is usual"
        ),
    ),
    *(Rule(f"{key}.seq_len", partial(_tokens_misfit, key=key)) for key in ("training", "validation")),
    Rule("parallelism.auto", _auto_misfit),
    Rule(
        "parallelism.auto_device",
        lambda job: bool(job.parallelism.auto_device) and not job.parallelism.auto and "needs parallelism.auto = true",
    ),
    Rule(
        "parallelism.data_parallel_replicate_degree",
        lambda job: (
            job.parallelism.data_parallel_replicate_degree == job.parallelism.data_parallel_shard_degree == -1
            and "only one of the two data parallel degrees can take what is left; data_parallel_shard_degree is -1 too"
        ),
    ),
    Rule(
        "parallelism.context_parallel_rotate_method",
        lambda job: (
            job.parallelism.context_parallel_method != "ring"
            and "parallelism.context_parallel_rotate_method" in job.origins
            and f'belongs to the ring; context_parallel_method is "{job.parallelism.context_parallel_method}"'
        ),
    ),
    Rule(
        "activation_checkpoint.selective_ac_option",
        lambda job: (
            not re.fullmatch(r"op|[1-9]\d*", job.activation_checkpoint.selective_ac_option)
            and 'expected a number of layers, as "2", or "op"'
        ),
    ),
    Rule("activation_checkpoint.offload", _offload_misfit),
    Rule(
        "activation_checkpoint.debug",
        lambda job: (
            job.activation_checkpoint.debug
            and job.activation_checkpoint.mode not in ("full", "selective")
            and 'no layer is computed again: needs mode = "full" or "selective"'
        ),
    ),
    Rule(
        "compile.components",
        lambda job: (
            job.compile.enable
            and not job.compile.components
            and 'nothing would be compiled; ["model", "loss"] is usual'
        ),
    ),
    *(
        Rule(f"parallelism.{key}", partial(_stages_misfit, key=key))
        for key in (
            "pipeline_parallel_layers_per_stage",
            "pipeline_parallel_first_stage_less_layers",
            "pipeline_parallel_last_stage_less_layers",
        )
    ),
    # filter_fqns without float8 is allowed, for later use.
    Rule(
        f"{_FLOAT8}.recipe_name",
        lambda job: f"{_FLOAT8}.recipe_name" in job.origins and _FLOAT8 not in job.model.converters and _NO_FLOAT8,
    ),
    Rule(
        f"{_FLOAT8}.emulate",
        lambda job: job.quantize.linear.float8.emulate and _FLOAT8 not in job.model.converters and _NO_FLOAT8,
    ),
    *(
        Rule(
            f"model.lora.{key}",
            lambda job, key=key: (
                f"model.lora.{key}" in job.origins
                and "model.lora.rank" not in job.origins
                and "needs lora.rank of 1 or more; 0 says that there are no adapters"
            ),
        )
        for key in ("alpha", "target_modules", "use_rslora", "dropout", "base", "initial_load_path")
    ),
    *(
        Rule(
            f"optimizer.adapter.{each.name}",
            lambda job, key=f"optimizer.adapter.{each.name}": (
                key in job.origins
                and "model.lora.rank" not in job.origins
                and "needs lora.rank of 1 or more; 0 says that there are no adapters"
            ),
        )
        for each in fields(Role)
    ),
    Rule(
        "model.sizes.frozen",
        lambda job: (
            job.model.lora.rank > 0
            and bool(job.model.sizes.get("frozen"))
            and "adapters alone are trained: leave it out; lora.target_modules chooses their matrices"
        ),
    ),
    Rule(
        "model.lora.rank",
        lambda job: (
            job.model.lora.rank > 0
            and bool(job.model.converters)
            and f"float8 would train matrices, which are frozen beside adapters: leave {_FLOAT8} out"
        ),
    ),
    Rule(
        "checkpoint.initial_load_model_only",
        lambda job: (
            job.model.lora.rank > 0
            and not job.checkpoint.initial_load_model_only
            and "it is the base of adapters, which is weights alone; use true"
        ),
    ),
    Rule(
        "validation.held_out_fraction",
        lambda job: (
            bool(job.validation.dataset_path)
            and "validation.held_out_fraction" in job.origins
            and "validation.dataset_path is set: nothing is held out"
        ),
    ),
    *(
        Rule(
            f"{table}.{each.name}",
            lambda job, key=f"{table}.{each.name}", needed=needed: (
                key in job.origins and not value_of(job, needed) and f"needs {needed}"
            ),
        )
        for table, needed, keys in (
            ("samples", "samples.prompts", Samples),
            ("evaluation", "evaluation.tasks", Evaluation),
        )
        for each in fields(keys)
        if f"{table}.{each.name}" != needed
    ),
    *(
        Rule(
            f"validation.{each.name}",
            lambda job, key=f"validation.{each.name}": (
                key in job.origins
                and not job.validation.enable
                and "validation.enable" not in job.origins
                and "needs validation.enable = true; false says that it is off on purpose"
            ),
        )
        for each in fields(Validation)
        if each.name != "enable"
    ),
    Rule(
        "samples.top_k",
        lambda job: (
            "samples.top_k" in job.origins
            and bool(job.samples.prompts)
            and not job.samples.temperature
            and "the likeliest token is always taken: needs samples.temperature above 0"
        ),
    ),
    *(
        Rule(
            f"checkpoint.{key}",
            lambda job, key=key, default=default, needed=needed, reason=reason: (
                value_of(job, f"checkpoint.{key}") != default and not value_of(job, f"checkpoint.{needed}") and reason
            ),
        )
        for key, default, needed, reason in (
            ("load_step", -1, "enable", _NOT_LOADED),
            ("load_only", False, "enable", _NOT_LOADED),
            ("remote", "", "enable", "needs checkpoint.enable = true: without, there are no checkpoints"),
            ("remote_timeout_seconds", 120, "remote", "needs checkpoint.remote"),
            ("hf_repo", "", "last_save_in_hf", "it is what is uploaded: needs checkpoint.last_save_in_hf = true"),
            ("hf_repo_private", True, "hf_repo", "needs checkpoint.hf_repo"),
            ("initial_load_in_hf", False, "initial_load_path", f"needs checkpoint.initial_load_path{_OR_FOLDER}"),
            ("initial_load_model_only", True, "initial_load_path", "needs checkpoint.initial_load_path"),
        )
    ),
    Rule("checkpoint.remote", _remote_misfit),
    Rule(
        "checkpoint.exclude_from_loading",
        lambda job: (
            bool(job.checkpoint.exclude_from_loading)
            and not job.checkpoint.enable
            and (not job.checkpoint.initial_load_path or job.checkpoint.initial_load_model_only)
            and f"{_NOT_LOADED}, and initial_load_model_only = true loads weights alone"
        ),
    ),
    Rule(
        "checkpoint.initial_load_in_hf_quantized",
        lambda job: (
            job.checkpoint.initial_load_in_hf_quantized
            and not job.checkpoint.initial_load_in_hf
            and "needs checkpoint.initial_load_in_hf = true"
        ),
    ),
    Rule(
        "checkpoint.initial_load_model_only",
        lambda job: (
            job.checkpoint.initial_load_in_hf
            and not job.checkpoint.initial_load_model_only
            and "there are only weights in a folder of Hugging Face's (initial_load_in_hf)"
        ),
    ),
    Rule(
        "checkpoint.last_save_in_hf",
        lambda job: (
            job.checkpoint.last_save_in_hf
            and (not job.checkpoint.enable or job.checkpoint.load_only)
            and "it is made from the last checkpoint: needs checkpoint.enable = true, and not load_only"
        ),
    ),
    Rule(
        "averages.export",
        lambda job: (
            job.averages.export
            and not (job.averages.ema_decay and job.checkpoint.last_save_in_hf)
            and "needs checkpoint.last_save_in_hf = true, which writes the average, and averages.ema_decay above 0"
        ),
    ),
    Rule(
        "averages.ema_decay",
        lambda job: (
            job.averages.ema_decay > 0
            and not (job.validation.enable or job.checkpoint.saves)
            and "nothing would use the average: needs validation.enable = true or checkpoint.enable = true"
        ),
    ),
    Rule(
        "checkpoint.export_dtype",
        lambda job: (
            job.checkpoint.enable
            and job.checkpoint.export_dtype != "float32"
            and not job.checkpoint.last_save_in_hf
            and "checkpoints keep training.dtype; it is the precision of checkpoint.last_save_in_hf"
        ),
    ),
    Rule(
        "debug.deterministic_warn_only",
        lambda job: (
            job.debug.deterministic_warn_only and not job.debug.deterministic and "needs debug.deterministic = true"
        ),
    ),
    Rule(
        "profiling.profile_freq",
        lambda job: (
            job.profiling.profile_freq < job.profiling.profiler_active + job.profiling.profiler_warmup
            and "less than profiler_warmup + profiler_active"
        ),
    ),
    *(
        Rule(
            f"chat.{each.name}",
            lambda job, key=f"chat.{each.name}": (
                key in job.origins
                and not job.training.has_chats
                and 'needs training.dataset_format = "chat" or "preference"'
            ),
        )
        for each in fields(Chat)
    ),
    *(
        Rule(
            f"chat.{key}",
            lambda job, key=key: (
                f"chat.{key}" in job.origins
                and job.training.dataset_format == "preference"
                and "of a pair, the assistant's turns after the prompt are trained: leave it out"
            ),
        )
        for key in ("roles_to_train", "message_field_training", "history")
    ),
    *(
        Rule(
            f"preference.{each.name}",
            lambda job, key=f"preference.{each.name}": (
                key in job.origins
                and job.training.dataset_format != "preference"
                and 'needs training.dataset_format = "preference"'
            ),
        )
        for each in fields(Preference)
    ),
    Rule(
        "preference.label_smoothing",
        lambda job: (
            job.preference.label_smoothing > 0
            and job.preference.loss not in ("dpo", "simpo")
            and f'preference.loss = "{job.preference.loss}" has no such term; use 0, or "dpo" or "simpo"'
        ),
    ),
    Rule(
        "preference.gamma",
        lambda job: (
            "preference.gamma" in job.origins
            and job.training.dataset_format == "preference"
            and job.preference.loss != "simpo"
            and f'preference.loss = "{job.preference.loss}" has no margin: leave it out, or use "simpo"'
        ),
    ),
    *(
        Rule(
            f"training.{key}",
            lambda job, key=key, default=default: (
                job.training.dataset_format == "preference"
                and value_of(job, f"training.{key}") != default
                and f"preference.loss is what pairs minimise: leave training.{key} out"
            ),
        )
        for key, default in (("objective", "next_token"), ("z_loss_factor", 0.0), ("label_smoothing", 0.0))
    ),
    Rule("chat.template_kwargs", _kwargs_misfit),
    Rule(
        "training.mtp_loss_factor",
        lambda job: (
            "training.mtp_loss_factor" in job.origins
            and not job.mtp_layers
            and "needs model.sizes.mtp_layers of 1 or more: no layer predicts further tokens"
        ),
    ),
    Rule(
        "model.sizes",
        lambda job: (
            job.mtp_layers >= job.training.seq_len
            and f"mtp_layers = {job.mtp_layers}: no token of training.seq_len = {job.training.seq_len} has a label so "
            f"far ahead; use at most {job.training.seq_len - 1}"
        ),
    ),
    Rule(
        "training.dataset_format",
        lambda job: (
            job.training.has_chats
            and job.training.dataset_path is None
            and not job.training.mixture
            and "/" not in job.training.dataset
            and 'chats are read from files: set training.dataset_path, or training.dataset = "org/name" of the hub'
        ),
    ),
    Rule(
        "training.dataset_streaming",
        lambda job: (
            job.training.dataset_streaming
            and job.training.has_chats
            and "rows are packed from all chats, so all are tokenized before the run: use false"
        ),
    ),
    Rule(
        "training.dataset_format",
        lambda job: (
            job.training.dataset_format == "tokens"
            and job.training.dataset_path is None
            and not job.training.mixture
            and "token files are local: set training.dataset_path"
        ),
    ),
    Rule(
        "training.dataset_streaming",
        lambda job: (
            job.training.dataset_streaming
            and job.training.dataset_format == "tokens"
            and "token files are trained on in place, and nothing is tokenized: use false"
        ),
    ),
    Rule(
        "training.dataset_shuffle_window",
        lambda job: (
            job.training.dataset_shuffle_window
            and not job.training.dataset_streaming
            and (job.training.dataset_path or job.training.mixture or job.training.dataset == "kjv")
            and "only a stream is permuted by windows; other data are permuted as a whole: leave it out"
        ),
    ),
    Rule(
        "training.dataset_errors",
        lambda job: (
            "training.dataset_errors" in job.origins
            and _formats(job) == {"tokens"}
            and "token files have no records that could be skipped: leave it out"
        ),
    ),
    Rule(
        "training.token_dtype",
        lambda job: (
            job.training.token_dtype is not None
            and "tokens" not in _formats(job)
            and 'needs training.dataset_format = "tokens"'
        ),
    ),
    Rule(
        "training.dataset_text_field",
        lambda job: (
            "training.dataset_text_field" in job.origins
            and "text" not in _formats(job)
            and next(reason for kind, reason in _TEXTLESS.items() if kind in _formats(job))
        ),
    ),
    Rule(
        "training.dataset_separator",
        lambda job: (
            "training.dataset_separator" in job.origins
            and _formats(job) in ({"chat"}, {"preference"})
            and "the template of a chat has the tokens around it: leave it out"
        ),
    ),
    Rule(
        "training.document_mask",
        lambda job: (
            "training.document_mask" in job.origins
            and not job.training.document_mask
            and job.training.has_chats
            and "a chat never sees the other chats of its row: leave it out"
        ),
    ),
    Rule(
        "model.vocab_multiple",
        lambda job: (
            "model.vocab_multiple" in job.origins
            and job.model.sizes.get("vocab_size") != "tokenizer"
            and 'needs model.sizes.vocab_size = "tokenizer"; other numbers of rows are taken as they are'
        ),
    ),
    Rule(
        "checkpoint.initial_load_new_rows",
        lambda job: (
            "checkpoint.initial_load_new_rows" in job.origins
            and not (job.checkpoint.initial_load_in_hf and "vocab_size" in job.model.sizes)
            and "needs checkpoint.initial_load_in_hf = true, and more rows in model.sizes.vocab_size"
        ),
    ),
    *(
        Rule(key, partial(_folder_misfit, key=key))
        for key in (
            "checkpoint.folder",
            "metrics.save_tb_folder",
            "profiling.save_traces_folder",
            "profiling.save_memory_snapshot_folder",
        )
    ),
]
