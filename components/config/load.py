"""Turns a TOML file and `--table.key value` overrides into a checked JobConfig or a ConfigError with all mistakes."""

import dataclasses
import difflib
import functools
import os
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic

from components.config import names
from components.config.bounds import INSIDE, LARGEST, PATH, PathError, local_path
from components.config.keys import FIELDS, NAMES, TABLES, ConfigError, describe_type, show, show_key
from components.config.optimizer import OPTIMIZER_KEYS, LRScheduler
from components.config.read import Given, read_file, read_overrides
from components.config.tables import JobConfig, Training

ROOT = Path(__file__).resolve().parents[2]
"""The repository's root, to which paths of bundled assets are relative."""


def python_path() -> str:
    """PYTHONPATH for subprocesses that run a module of this repository: ROOT, then the user's PYTHONPATH.

    Raises ConfigError if ROOT has a colon. run_train.sh says the same sentence.
    """
    if os.pathsep in str(ROOT):
        reason = "Python cannot import from a path with a colon; move the repository to another folder"
        raise ConfigError(f"{ROOT}: {reason}")
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def load_config(argv: list[str]) -> JobConfig:
    """Reads `--job.config_file FILE` and the overrides in argv. The last setting of a key wins.

    Raises ConfigError with every mistake in the file and on the command line, and the place of each mistake.
    """
    overrides = list(read_overrides(argv))
    files = [given for given in overrides if given.key == "job.config_file"]
    given = [*(read_file(Path(_checked(files[-1].key, files[-1].value, files[-1]))) if files else ()), *overrides]
    asked = {setting.key: setting.value for setting in given}
    mistakes: list[str] = []
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in given:
        try:
            key, value = _known(setting, asked)
            if key is not None:
                values[key], origins[key] = _checked(key, value, setting), setting.origin
        except ConfigError as error:
            mistakes += error.messages
        if len(mistakes) >= _MOST_MISTAKES:  # an unknown key is slow to report: it is compared with every known name
            raise ConfigError([*mistakes, "and perhaps more"])
    model = values.get("model.name"), values.get("model.flavor")
    if model in names.RENAMED_MODELS:
        values["model.name"], values["model.flavor"] = names.RENAMED_MODELS[model]
    total = values.get("lr_scheduler.total_steps") or values.get("training.steps", Training.steps)
    values.setdefault("lr_scheduler.warmup_steps", min(LRScheduler.warmup_steps, total))
    config = _build(JobConfig, values, origins=origins)
    # Contradictions are checked only if every value is valid, because defaults have replaced invalid values.
    if mistakes := mistakes or [mistake(config, key, reason) for key, reason in _contradictions(config)]:
        raise ConfigError(mistakes)
    return config


def mistake(config: JobConfig, key: str, reason: str) -> str:
    """One line of a ConfigError for checks outside of this package: where the key was set, its value, the reason."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return f"{config.origins.get(key, 'default')}: {key} = {show(value)}: {reason}"


def to_dict(config: JobConfig) -> dict[str, Any]:
    """The tables as nested dicts, without origins."""
    tables = dataclasses.asdict(config)
    del tables["origins"]
    return tables


def absolute_tables(config: JobConfig) -> dict[str, Any]:
    """The tables of to_dict with absolute paths, which mean the same from any folder; paths inside dump_folder stay."""
    tables = to_dict(config)
    for key, annotation in FIELDS.items():
        *names, last = key.split(".")
        table = functools.reduce(dict.__getitem__, names, tables)
        if _is_path(annotation) and table[last]:
            table[last] = str(_absolute(key, table[last]))
    return tables


def _absolute(key: str, path: str) -> Path:
    if key == "training.dataset_cache":
        return ROOT / path
    return (here_or_in_repository(path) if key == "model.hf_assets_path" else Path(path)).absolute()


def here_or_in_repository(path: str) -> Path:
    """A relative path starts at the current folder or, if nothing is there, at the repository."""
    given = Path(os.path.expanduser(path))  # ~ is in run.json of older runs
    return given if given.exists() else ROOT / given


def _is_path(annotation: Any) -> bool:
    """Whether a key has a path that does not lie in the dump folder."""
    metadata = getattr(annotation, "__metadata__", ())
    if INSIDE in metadata:
        return False
    return PATH in metadata or any(_is_path(member) for member in typing.get_args(annotation))


def _known(setting: Given, asked: Mapping[str, Any]) -> tuple[str | None, Any]:
    """(key, value) in this repository's names; key is None if the setting has no effect here.

    Raises ConfigError if the key is unknown, or if its value is not available.
    """
    key, value = setting.key, setting.value
    if key in names.RENAMED:
        key, change = names.RENAMED[key]
        if change == "negate":
            if not isinstance(value, bool):
                raise ConfigError(setting.mistake("expected true or false"))
            value = not value
    if isinstance(value, str):
        if (key, value) in names.UNAVAILABLE_VALUES:
            raise ConfigError(setting.mistake(names.UNAVAILABLE_VALUES[key, value]))
        value = names.RENAMED_VALUES.get((key, value), value)
    if key in names.UNAVAILABLE:
        accepted, reason, only_with = names.UNAVAILABLE[key]
        is_on = all(asked.get(other) for other in only_with)
        if is_on and (value != accepted or type(value) is not type(accepted)):
            raise ConfigError(setting.mistake(reason))
        return None, None
    if key in FIELDS:
        return key, value
    raise ConfigError(setting.mistake(_unknown(key, value)))


def _unknown(key: str, value: Any) -> str:
    table, _, last = key.rpartition(".")
    if key in TABLES:
        return f"[{key}] is a table, not a key"
    if last in names.FOREIGN:
        hint = f"unknown key; here it is {names.FOREIGN[last]}"
        equivalent = names.FOREIGN_VALUES.get(value) if isinstance(value, str) else None
        return f"{hint}; {value} is {equivalent}" if equivalent else hint
    # Suggestions, best first: the same last name in the nearest table; the nearest full name; the nearest last name.
    same = [name for name in NAMES if name.rpartition(".")[2] == last]
    near = difflib.get_close_matches(key, same or NAMES, 1, 0.0 if same else 0.75)
    if not near and not table:
        return "unknown key, and in no table"
    if not near and table not in TABLES:
        near_table = difflib.get_close_matches(table, TABLES, 1, 0.6)
        return f"unknown table [{show_key(table)}]" + (f"; did you mean [{near_table[0]}]?" if near_table else "")
    if not near:
        by_last = {name.rpartition(".")[2]: name for name in NAMES}
        near = [by_last[match] for match in difflib.get_close_matches(last, by_last, 1, 0.7)]
    if near:
        return f"unknown key; did you mean {near[0]}?"
    return f"unknown key; [{table}] has " + ", ".join(
        name.rpartition(".")[2] for name in FIELDS if name.rpartition(".")[0] in (table, f"model.{table}")
    )


@functools.cache
def _adapter(key: str) -> pydantic.TypeAdapter:
    """A validator for a key. Cached, because making a validator takes longer than checking a value."""
    return pydantic.TypeAdapter(FIELDS[key], config=pydantic.ConfigDict(strict=True, allow_inf_nan=False))


def _checked(key: str, value: Any, setting: Given) -> Any:
    """Returns the value. Raises ConfigError if it does not have the key's type or is out of bounds."""
    try:
        return _adapter(key).validate_python(value)
    except pydantic.ValidationError as error:
        reasons = (str(found["ctx"]["error"]) for found in error.errors() if found["type"] == "value_error")
        raise ConfigError(setting.mistake(next(reasons, f"expected {describe_type(FIELDS[key])}"))) from None


_MOST_MISTAKES = 100
_type_hints = functools.cache(typing.get_type_hints)


def _build(table: Any, values: dict[str, Any], prefix: str = "", **more: Any) -> Any:
    """Builds a table and its subtables from checked values; missing keys keep their defaults."""
    hints = _type_hints(table)
    for field in dataclasses.fields(table):
        key = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hints[field.name]):
            more[field.name] = _build(hints[field.name], values, f"{key}.")
        elif key in values:
            more[field.name] = values[key]
    return table(**more)


def _contradictions(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Yields (key, reason) for each key whose value is valid alone but contradicts another key."""
    training, validation, loader = config.training, config.validation, config.training.dataloader
    optimizer = config.optimizer.name
    for key in sorted({key for keys in OPTIMIZER_KEYS.values() for key in keys} - {*OPTIMIZER_KEYS[optimizer]}):
        if f"optimizer.{key}" in config.origins:
            yield f"optimizer.{key}", f'optimizer.name = "{optimizer}" has no such setting'
    if training.dtype != "float32" and "state_dtype" not in OPTIMIZER_KEYS[optimizer]:
        yield (
            "training.dtype",
            f'optimizer.name = "{optimizer}" cannot round updates of bfloat16 weights; use "float32"',
        )
    rounded = {config.optimizer.state_dtype, training.dtype} != {"float32"}
    if rounded and config.optimizer.implementation != "fused":
        yield "optimizer.implementation", "there is one for weights and moments that are rounded: leave it out"
    if config.optimizer.state_offload and training.enable_cpu_offload:
        yield "optimizer.state_offload", "training.enable_cpu_offload = true keeps all of it on the host: leave one out"
    total = config.lr_scheduler.total_steps
    if total is not None and total < training.steps:
        yield "lr_scheduler.total_steps", f"training.steps = {training.steps} is more"
    for key in ("persistent_workers", "prefetch_factor"):
        if loader.num_workers == 0 and getattr(loader, key):
            yield f"training.dataloader.{key}", "needs num_workers of 1 or more"
    if training.global_batch_size != -1 and training.global_batch_size % training.local_batch_size:
        yield "training.global_batch_size", f"not a multiple of training.local_batch_size = {training.local_batch_size}"
    if "training.skip_spikes_window" in config.origins and not training.skip_spikes_sigma:
        yield "training.skip_spikes_window", "needs training.skip_spikes_sigma; 6 is usual"
    for key, table in (("training", training), ("validation", validation)):
        size, seq_len = table.local_batch_size or training.local_batch_size, table.seq_len or training.seq_len
        if size * seq_len > LARGEST and (key == "training" or validation.enable):
            yield f"{key}.seq_len", f"with {key}.local_batch_size = {size}: more than {LARGEST:,} tokens at once"
    if config.parallelism.data_parallel_replicate_degree == config.parallelism.data_parallel_shard_degree == -1:
        reason = "only one of the two data parallel degrees can take what is left; data_parallel_shard_degree is -1 too"
        yield "parallelism.data_parallel_replicate_degree", reason
    method = config.parallelism.context_parallel_method
    if method != "ring" and "parallelism.context_parallel_rotate_method" in config.origins:
        reason = f'belongs to the ring; context_parallel_method is "{method}"'
        yield "parallelism.context_parallel_rotate_method", reason
    if not re.fullmatch(r"op|[1-9]\d*", config.activation_checkpoint.selective_ac_option):
        yield "activation_checkpoint.selective_ac_option", 'expected a number of layers, as "2", or "op"'
    checkpointing = config.activation_checkpoint
    per_op = checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op"
    if checkpointing.offload and (checkpointing.mode not in ("full", "selective") or per_op):
        reason = 'it moves the inputs of checkpointed layers: needs mode = "full", or "selective" and a number'
        yield "activation_checkpoint.offload", reason
    if checkpointing.debug and checkpointing.mode not in ("full", "selective"):
        yield "activation_checkpoint.debug", 'no layer is computed again: needs mode = "full" or "selective"'
    if config.compile.enable and not config.compile.components:
        yield "compile.components", 'nothing would be compiled; ["model", "loss"] is usual'
    for key in ("layers_per_stage", "first_stage_less_layers", "last_stage_less_layers"):
        given = f"parallelism.pipeline_parallel_{key}" in config.origins
        if given and config.parallelism.module_fqns_per_model_part:
            yield f"parallelism.pipeline_parallel_{key}", "module_fqns_per_model_part lists the stages: leave it out"
    checkpoint, float8 = config.checkpoint, "quantize.linear.float8"
    if float8 not in config.model.converters:
        reason = f'needs model.converters = ["{float8}"]'
        if f"{float8}.recipe_name" in config.origins:  # filter_fqns without float8 is allowed, for later use
            yield f"{float8}.recipe_name", reason
        if config.quantize.linear.float8.emulate:
            yield f"{float8}.emulate", reason
    for key in ("alpha", "target_modules", "use_rslora", "dropout", "base", "initial_load_path"):
        if f"model.lora.{key}" in config.origins and "model.lora.rank" not in config.origins:
            yield f"model.lora.{key}", "needs lora.rank of 1 or more; 0 says that there are no adapters"
    if config.model.lora.rank and config.model.converters:
        yield "model.lora.rank", f"float8 would train matrices, which are frozen beside adapters: leave {float8} out"
    if config.model.lora.rank and not checkpoint.initial_load_model_only:
        yield "checkpoint.initial_load_model_only", "it is the base of adapters, which is weights alone; use true"
    if validation.dataset_path and "validation.held_out_fraction" in config.origins:
        yield "validation.held_out_fraction", "validation.dataset_path is set: nothing is held out"
    for key, asked in {"load_step": checkpoint.load_step != -1, "load_only": checkpoint.load_only}.items():
        if asked and not checkpoint.enable:
            yield f"checkpoint.{key}", "needs checkpoint.enable = true: without, no checkpoint of the run is loaded"
    start = {"in_hf": checkpoint.initial_load_in_hf, "model_only": not checkpoint.initial_load_model_only}
    for key, asked in start.items():
        if asked and not checkpoint.initial_load_path:
            yield f"checkpoint.initial_load_{key}", "needs checkpoint.initial_load_path"
    if checkpoint.initial_load_in_hf_quantized and not checkpoint.initial_load_in_hf:
        yield "checkpoint.initial_load_in_hf_quantized", "needs checkpoint.initial_load_in_hf = true"
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        reason = "there are only weights in a folder of Hugging Face's (initial_load_in_hf)"
        yield "checkpoint.initial_load_model_only", reason
    if checkpoint.last_save_in_hf and (not checkpoint.enable or checkpoint.load_only):
        reason = "it is made from the last checkpoint: needs checkpoint.enable = true, and not load_only"
        yield "checkpoint.last_save_in_hf", reason
    if checkpoint.enable and checkpoint.export_dtype != "float32" and not checkpoint.last_save_in_hf:
        reason = "checkpoints keep training.dtype; it is the precision of checkpoint.last_save_in_hf"
        yield "checkpoint.export_dtype", reason
    if config.debug.deterministic_warn_only and not config.debug.deterministic:
        yield "debug.deterministic_warn_only", "needs debug.deterministic = true"
    profiling = config.profiling
    if profiling.profile_freq < profiling.profiler_active + profiling.profiler_warmup:
        yield "profiling.profile_freq", "less than profiler_warmup + profiler_active"
    dump = Path(config.job.dump_folder)
    inside = {"checkpoint.folder": checkpoint.folder, "metrics.save_tb_folder": config.metrics.save_tb_folder}
    inside |= {f"profiling.{name}": getattr(profiling, name) for name in _PROFILES}
    for key, name in inside.items():
        folder, whole = (Path(os.path.realpath(path)) for path in (dump / name, dump))
        if folder == whole or not folder.is_relative_to(whole):
            yield key, f"must be a folder inside job.dump_folder = {dump}"
        if checkpoint.last_save_in_hf and folder.is_relative_to(whole / EXPORTS):
            yield key, f"checkpoint.last_save_in_hf replaces {dump / EXPORTS} with what it writes"
        try:
            local_path(str((dump / name).absolute()))
        except PathError as error:
            yield key, f"{dump / name}: {error}"


EXPORTS = "hugging_face"
"""Folder inside job.dump_folder to which checkpoint.last_save_in_hf writes."""
_PROFILES = ("save_traces_folder", "save_memory_snapshot_folder")
