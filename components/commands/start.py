"""Makes all checks that need no ranks, then starts the ranks through components/launch/ranks.py.

Without GPUs no check before check_layout_and_weights imports torch, so check_job reports mistakes at once.
"""

import contextlib
import dataclasses
import datetime
import functools
import gc
import io
import os
import pkgutil
import re
import signal
import subprocess
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from components.config import (
    EXPORTS,
    ROOT,
    ConfigError,
    JobConfig,
    RopeScaling,
    load_config,
    mistake,
    python_path,
    to_json,
)
from components.config.files import writable
from components.config.tables import Phase, Source, Training
from components.data.tokenizer import try_tokenizer, with_rows
from components.launch.exit_codes import ExitCode
from components.launch.joining import rank_variables, starter, watch_starter
from components.launch.locks import RUN_LOCK, free_lock_of_dead
from components.launch.process import preload, set_variables
from components.launch.settings import Settings, gpus, read_settings, with_variables, wrong
from components.observe.trackers import check_trackers, enabled
from parallelize.mesh import resolve_degrees
from parallelize.plan.auto import filled
from parallelize.rules import check_device, check_layout, warnings
from parallelize.rules.chosen import resolved

DEFAULT_RECIPE = ROOT / "recipes/llama_debug.toml"
RANK = "components.launch.rank:run"
"""The function that each rank runs, as "module:function"."""
GPUS = "MESHWRIGHT_GPUS"
"""Environment variable: how many GPUs this machine has, for a proof, from which they are hidden."""

_HELP = """\
Trains what the TOML job file FILE describes (recipes/llama_debug.toml if none is given). Every key of a job file
can be given on the command line too, and overrides the file: --training.steps 100, --checkpoint.enable.

  --check   starts nothing: lists what can be known before a run, from the configuration to memory and disk, and
            exits with 0 or 2
  --prove   trains nothing: runs a small job of the same layout on this machine's CPU beside one process, and exits
            with 0 for the same run, 1 for another one, which is explained, or 2 (docs/prove.md)

environment variables
  NGPU            ranks on this node; if unset all GPUs, without GPUs what the layout needs, else 2
  NNODES          nodes; start the same command on each (default 1)
  RDZV_ENDPOINT   host:port of one node, the same on each; needed with NNODES
  NODE_RANK       number of this node; if unset, nodes number themselves
  LOG_RANK        ranks shown on the console, as 0,1 or all (default 0); each rank has a log file in any case
  MAX_RESTARTS    how often all ranks of all nodes are started again after one is lost (default 0); they resume from
                  a checkpoint
  SHUTDOWN_TIMEOUT_SECONDS   time for saving after SIGTERM, SIGINT or SIGUSR1 (default 300)
  OMP_NUM_THREADS            threads of a rank; cores / ranks if unset
  PYTHON                     the Python to use; found or made (.venv) if unset
  CONFIG_FILE, COMM_MODE     as --job.config_file and --comm.mode, which win over these

Started by torchrun, accelerate launch or srun as one of several tasks on a node, it becomes a rank of theirs, and
does not read the first six variables (docs/launch_anywhere.md).

exit codes
  0  done
  1  unexpected error, with a traceback
  2  a mistake in the job file, the command line or the data
  3  training.max_nonfinite_steps steps in a row were skipped: loss or gradient not finite, or a spike
  4  out of memory
  5  a rank or its loader worker was killed, or a collective timed out
  6  stopped by a signal before the run was saved: a second signal after 5 seconds, or too little time
  7  ranks that should hold the same bits differ (debug.check_replicas_freq)
  128 + N  stopped by signal N after saving, if checkpoints are enabled: 143 SIGTERM, 130 Ctrl-C, 138 SIGUSR1
"""


def main(argv: list[str]) -> int:
    """Check, prepare the data that ranks share, then run train.py on each rank; returns an ExitCode.

    Does not return in a process that another launcher has started as a rank: the process becomes this rank.
    """
    if {"-h", "--help"} & set(argv):
        print_help()
        return ExitCode.DONE
    if "--check" in argv:
        return run_alone("components.commands.check", [word for word in argv if word != "--check"], {})
    try:
        if "--prove" in argv:
            if rank_variables(os.environ):
                raise ConfigError(f"--prove starts ranks of its own: start it without {starter(os.environ)}")
            variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", GPUS: str(gpus())}
            return run_alone("components.commands.prove", [word for word in argv if word != "--prove"], variables)
        argv = with_recipe(with_variables(argv, os.environ))
        config, settings = check_job(argv, os.environ)
        if settings.joined:
            set_variables(settings.threads)
        elif config.comm.mode != "fake_backend":
            # The fork server imports torch while this process imports it too, for the model's sizes.
            preload([RANK.partition(":")[0]], settings.threads)
        gc.disable()  # imports make a million objects, but no garbage
        config = check_layout_and_weights(config, settings)
        degrees = resolve_degrees(config, settings.world_size)
        on_cpu = config.comm.mode != "fake_backend" and not gpus()
        rank = rank_variables(os.environ)
        quiet = rank.get("RANK", "0") != "0"  # rank 0 prints the same warnings
        for warning in () if quiet else warnings(config, degrees, settings.ranks, on_cpu):
            print(f"warning: {warning}", file=sys.stderr)
        if config.comm.mode == "fake_backend":
            return run_dry(settings, config)
        from components.data.__main__ import prepare_all
        from components.launch.signals import end_at_signals

        end_at_signals("before ranks were started")
        gc.freeze()
        gc.enable()
        with contextlib.redirect_stderr(io.StringIO()) if quiet else contextlib.nullcontext():
            config = prepare_all(config)
        if rank:
            os.environ |= rank | watch_starter(settings.shutdown_seconds)
            pkgutil.resolve_name(RANK)([to_json(config)])
        return start(config, settings, RANK, [to_json(config)])
    except ConfigError as error:
        print(*error.messages, sep="\n", file=sys.stderr)
        return ExitCode.CONFIG
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def with_recipe(argv: list[str]) -> list[str]:
    """argv, with the default recipe if it names none."""
    if any(word.partition("=")[0].replace("-", "_") == "__job.config_file" for word in argv):
        return argv
    return ["--job.config_file", str(DEFAULT_RECIPE), *argv]


def check(argv: list[str], environment: Mapping[str, str]) -> tuple[JobConfig, Settings]:
    """The job, and how ranks are started. Writes nothing. Raises ConfigError."""
    config, settings = check_job(argv, environment)
    return check_layout_and_weights(config, settings), settings


def check_job(argv: list[str], environment: Mapping[str, str]) -> tuple[JobConfig, Settings]:
    """The part of check that needs no model. Without GPUs it does not import torch."""
    config = load_config(argv)
    settings = read_settings(config, environment)
    if settings.joined and config.comm.mode == "fake_backend":
        reason = f"a dry run needs no ranks: start it without {starter(environment)}"
        raise ConfigError(mistake(config, "comm.mode", reason))
    if not config.parallelism.auto:
        resolve_degrees(config, settings.world_size)
    if config.comm.mode != "fake_backend":
        check_devices(config, settings, environment)
        check_folders(config)
        check_trackers(config)
        check_prompts(config)
        check_evaluation(config)
        check_upload(config)
    return config, settings


def check_prompts(config: JobConfig) -> None:
    """Raises ConfigError if a prompt of samples.prompts cannot be used."""
    if not config.samples.prompts:
        return
    try_tokenizer(config.model.hf_assets_path, config.training.dataset_separator)
    from components.observe.samples import read_prompts

    read_prompts(config)


def check_evaluation(config: JobConfig) -> None:
    """Raises ConfigError if a task of evaluation.tasks cannot be used."""
    if config.evaluation.tasks:
        from components.observe import evaluation

        evaluation.check_evaluation(config)


def check_upload(config: JobConfig) -> None:
    """Raises ConfigError if the hub would refuse the upload to checkpoint.hf_repo. A hub that is down is a warning."""
    if not config.checkpoint.hf_repo:
        return
    from components.state.push import check_push

    try:
        check_push(config)
    except OSError as error:
        print(f"warning: {error.strerror or error}; the run starts, and keeps its weights", file=sys.stderr, flush=True)


def check_layout_and_weights(config: JobConfig, settings: Settings) -> JobConfig:
    """The rest of check; returns the job with its model resolved and its layout filled in."""
    on_gpu = config.comm.mode == "fake_backend" or bool(gpus())
    config = filled(resolved(with_rows(config)), settings.world_size, settings.nodes, on_gpu)
    check_layout(config, resolve_degrees(config, settings.world_size))
    if config.comm.mode != "fake_backend":
        check_initial_weights(config)
    return config


def check_devices(config: JobConfig, settings: Settings, environment: Mapping[str, str]) -> None:
    """Raises ConfigError if the node has too few GPUs, or if its kind of device cannot do what the job asks for."""
    hint, visible = "CUDA_VISIBLE_DEVICES= (empty) runs on the CPU", environment.get("CUDA_VISIBLE_DEVICES", "")
    if len(re.findall(r"(?:^|,) *(?:\d|GPU-|MIG-)", visible)) > gpus():
        reason = f"torch can use {gpus()} of these devices; {hint}"
        raise ConfigError(wrong(environment, "CUDA_VISIBLE_DEVICES", reason))
    if config.comm.share_gpus and settings.nodes > 1:
        reason = f"ranks share the GPUs of one node alone, not of NNODES={settings.nodes}; use false"
        raise ConfigError(mistake(config, "comm.share_gpus", reason))
    own_gpu = settings.joined and gpus() == 1  # srun and others may show each rank its own GPU alone
    if 0 < gpus() < settings.ranks and not config.comm.share_gpus and not own_gpu:
        hint += "; --comm.share_gpus lets ranks share them, slowly"
        raise ConfigError(wrong(environment, "NGPU", f"this node has {gpus()} GPUs; {hint}"))
    check_device(config, (9, 0) if gpus() else None)


def _check_initial_checkpoint(config: JobConfig) -> None:
    """Raises ConfigError if a start needs a checkpoint of checkpoint.initial_load_path, and none is there."""
    from components.state.folder import steps_in

    checkpoint = config.checkpoint
    path, own = Path(checkpoint.initial_load_path or ""), Path(config.job.dump_folder) / checkpoint.folder
    if not checkpoint.initial_load_path or (path / ".metadata").is_file() or steps_in(path):
        return
    goes_on = checkpoint.enable and not config.model.lora.rank  # the base of adapters is needed each time
    if goes_on and (checkpoint.remote or steps_in(own)):
        return
    near = f"; did you mean {path / checkpoint.folder}?" if steps_in(path / checkpoint.folder) else ""
    raise ConfigError(mistake(config, "checkpoint.initial_load_path", f"no checkpoint there{near}"))


def check_initial_weights(config: JobConfig) -> None:
    """Raises ConfigError, with every misfit, if initial weights do not fit the model, or are not there.

    A folder is Hugging Face's (checkpoint.initial_load_in_hf) or PEFT's (lora.initial_load_path). The key
    initial_load_in_hf_quantized has to say whether a Hugging Face folder has FP8 or MXFP4 weights.
    """
    if config.model.lora.initial_load_path:
        from components.state.adapters import check_adapters
        from models import meta_model

        check_adapters(meta_model(config.model), config.model.lora, Path(config.model.lora.initial_load_path))
    checkpoint = config.checkpoint
    asked = "model.sizes.vocab_size" in config.origins
    grown = asked and not config.model.lora.rank  # adapters would never train the new rows
    if not (checkpoint.initial_load_in_hf and checkpoint.initial_load_path):
        _check_initial_checkpoint(config)
        return
    from components.state.weights import Folder, check_weights, new_layers, rows_of
    from models import meta_model

    path, wanted = Path(checkpoint.initial_load_path), config.model
    if wanted.rope_scaling.rope_type:  # the weights may have the flavor's own scaling
        with contextlib.suppress(ConfigError):
            published = dataclasses.replace(wanted, rope_scaling=RopeScaling())
            check_weights(meta_model(published), path, grown)
            wanted = published
    try:
        quantized = check_weights(meta_model(wanted), path, grown)
    except ConfigError as error:
        messages = [f"checkpoint.initial_load_path: {message}" for message in error.messages]
        if asked and config.model.lora.rank:
            messages.append(
                mistake(config, "model.sizes.vocab_size", "adapters would never train new rows: leave it out")
            )
        raise ConfigError(messages) from error
    model = meta_model(wanted)
    if "checkpoint.initial_load_new_rows" in config.origins and rows_of(model, path) >= model.config.vocab_size:
        reason = "the folder has all rows of model.sizes.vocab_size: leave it out"
        raise ConfigError(mistake(config, "checkpoint.initial_load_new_rows", reason))
    if config.model.lora.rank and new_layers(model, Folder(path)):
        raise ConfigError(
            mistake(config, "model.sizes.mtp_layers", f"{path} lacks layers: adapters would never train them")
        )
    if quantized != checkpoint.initial_load_in_hf_quantized:
        has = "has FP8 or MXFP4 weights; true widens them" if quantized else "has no FP8 or MXFP4 weights; use false"
        raise ConfigError(mistake(config, "checkpoint.initial_load_in_hf_quantized", f"{path} {has}"))


def run_dry(settings: Settings, config: JobConfig) -> int:
    """A dry run (comm.mode = "fake_backend") of each rank that LOG_RANK names, one after another."""
    for rank in sorted(range(settings.world_size) if settings.shown is None else settings.shown):
        numbers = {"RANK": str(rank), "WORLD_SIZE": str(settings.world_size), "CUDA_VISIBLE_DEVICES": ""}
        if code := run_alone("components.commands.dry_run", [to_json(config)], numbers):
            return code
    return ExitCode.DONE


def run_alone(module: str, argv: list[str], variables: Mapping[str, str], output: IO[str] | None = None) -> int:
    """The exit code of a module's main in a process of its own. output: a file for what it prints."""
    # Not `-m`: processes that spawn starts would import the module too, and torch with it.
    run = f"import sys; from {module} import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-P", "-c", run, *argv]
    environment = {**os.environ, **variables, "PYTHONPATH": python_path()}
    with subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process:
        kept = [
            signal.signal(signal.SIGINT, signal.SIG_IGN),  # Ctrl-C reaches the process too, which ends by it
            signal.signal(signal.SIGTERM, lambda number, frame: process.terminate()),
        ]
        code = process.wait()
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), kept, strict=True):
        signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def start(config: JobConfig, settings: Settings, main: str, argv: list[str]) -> int:
    """Run main ("module:function") of argv on every rank, with logs in the dump folder.

    Raises ConfigError if the folder of logs cannot be made.
    """
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    logs = Path(config.job.dump_folder) / "logs" / now
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(mistake(config, "job.dump_folder", f"cannot make {logs}: {error.strerror}")) from None
    from components.launch.ranks import run_ranks

    code = run_ranks(main, argv, settings, logs)
    free_lock_of_dead(logs.parents[1] / RUN_LOCK)
    return code


def check_folders(config: JobConfig) -> None:
    """Raises ConfigError if a folder of the run's outputs could not be made or written; makes none."""
    for key, folder in output_folders(config).items():
        _check_folder(config, key, folder)


def output_folders(config: JobConfig) -> dict[str, Path]:
    """Key -> folder that a run writes because of it."""
    dump, checkpoint, profiling = Path(config.job.dump_folder), config.checkpoint, config.profiling
    inside = {
        "checkpoint.folder": (checkpoint.enable and not checkpoint.load_only, checkpoint.folder),
        "checkpoint.last_save_in_hf": (checkpoint.enable and checkpoint.last_save_in_hf, EXPORTS),
        "metrics.save_tb_folder": (config.metrics.enable_tensorboard, config.metrics.save_tb_folder),
        **{key: (bool(kind.folder), kind.folder) for key, kind in enabled(config).items()},
        "profiling.save_traces_folder": (profiling.enable_profiling, profiling.save_traces_folder),
        "profiling.save_memory_snapshot_folder": (
            profiling.enable_memory_snapshot,
            profiling.save_memory_snapshot_folder,
        ),
    }
    return {"job.dump_folder": dump} | {key: dump / name for key, (used, name) in inside.items() if used}


def _check_folder(config: JobConfig, key: str, folder: Path) -> None:
    """Raises ConfigError if files could not be made in it; does not make it, since later checks may fail."""
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    if not there.is_dir():
        raise ConfigError(mistake(config, key, f"{there} is not a folder"))
    if not writable(there):
        raise ConfigError(mistake(config, key, f"no permission to write in {there}"))


def print_help() -> None:
    """Print the usage, then every key with its documentation."""
    import tyro

    hints = typing.get_type_hints(JobConfig)
    names = [field.name for field in dataclasses.fields(JobConfig) if dataclasses.is_dataclass(hints[field.name])]
    # An array of tables is shown by its first table.
    arrays: dict[str, Any] = {"mixture": [Source(name="a", dataset_path="a")]}
    arrays |= {"mixture_phase": [Phase(from_sequence=1, weights={"a": 1.0})]}
    made: dict[str, Any] = {name: hints[name] for name in names} | {"training": functools.partial(Training, **arrays)}
    tables = dataclasses.make_dataclass(
        "Tables", [(name, hints[name], dataclasses.field(default_factory=made[name])) for name in names]
    )
    try:
        print(_HELP)
        with contextlib.redirect_stdout(io.StringIO()) as keys, contextlib.suppress(SystemExit):
            tyro.cli(tables, prog="./run_train.sh", description="All keys:", args=["--help"], use_underscores=True)
        print(re.sub(r"\.0\b", "[1]", keys.getvalue()), flush=True)
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
