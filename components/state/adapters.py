"""Exports adapters as a PEFT folder or merged into the weights of their base, and loads them from a PEFT folder.

python -m components.state export RUN FOLDER               adapter_model.safetensors and adapter_config.json
python -m components.state merge RUN --to FOLDER           the whole model, as transformers loads it
"""

import json
import math
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from components.config import EXPORTS, ConfigError, JobConfig, Lora, absolute_tables
from components.config.files import make_staging, publish, read_json, refuse_pointer, staging_of, write_json
from components.data.hub import first_line
from components.state.base import load_run, precisions, read_base
from components.state.card import write_card
from components.state.checkpoint import MAY_CHANGE, Checkpointer
from components.state.folder import chat_of, chosen_model, find_checkpoint, peek, separator_of
from components.state.push import push_last
from components.state.tensors import SavedWeights, check_finite
from components.state.weights import Folder, export, write_tensors
from models import meta_model, sizes
from models.lora import merged
from models.peft import Place, places, targets
from parallelize.mesh import Mesh
from parallelize.rules import check_model
from parallelize.sharding import own_slice
from parallelize.together import read_together, together


def open_run(run: Path, step: int | None) -> tuple[dict[str, Any], Path]:
    """find_checkpoint, with the model that the checkpoint was saved from: a later start may have stretched contexts.

    Raises ConfigError as find_checkpoint does, if there is no such model, and if the folder has become that of another.
    """
    config, checkpoint = find_checkpoint(run, step)
    chosen, saved = chosen_model(config), (peek(checkpoint) or {}).get("model") or {}
    check_model(JobConfig(model=chosen))
    own = sizes(chosen)
    now = json.loads(json.dumps({**asdict(own), "head_size": own.head_dim}))
    differ = [name for name in now.keys() & saved.keys() if name not in MAY_CHANGE and saved[name] != now[name]]
    if differ:
        changes = ", ".join(f"{name} = {saved[name]} there and {now[name]} here" for name in sorted(differ))
        raise ConfigError(
            f"{checkpoint} is of another model than {run / 'run.json'}, as a later start wrote it: {changes}"
        )
    before = {name: saved[name] for name in MAY_CHANGE if name in saved}
    if any(now[name] != value for name, value in before.items()):
        config["model"] |= {"sizes": {**chosen.sizes, **before}, "rope_scaling": {}}
    return config, checkpoint


def export_run(config: dict[str, Any], source: Path | SavedWeights, path: Path, dtype: torch.dtype) -> None:
    """Write a run's checkpoint for Hugging Face: a whole model for transformers, or adapters for PEFT.

    config: the run's job file; source: the checkpoint, or weights made from some. Called by all ranks. Replaces what is
    there.
    """
    chosen = chosen_model(config)
    if chosen.lora.rank:
        export_adapters(config, source, path, dtype)
    else:
        tokenizer = config["model"]["hf_assets_path"]
        export(meta_model(chosen), source, path, tokenizer, dtype, separator_of(config), chat_of(config))


def export_last(config: JobConfig, checkpoint: Path) -> None:
    """export_run of a run's last checkpoint, with its card, and its upload to hf_repo. Called by all ranks."""
    job, tables, run = config.checkpoint, absolute_tables(config), Path(config.job.dump_folder)
    weights = SavedWeights([checkpoint], config.averages.export)
    export_run(tables, weights, run / EXPORTS, getattr(torch, job.export_dtype))
    first = torch.distributed.get_rank() == 0
    if first:
        try_card(run / EXPORTS, run, checkpoint, tables, what(tables, [], config.averages.export))
    if job.hf_repo:
        torch.distributed.destroy_process_group()  # an upload may take longer than the other ranks would wait
        if first:
            push_last(run / EXPORTS, job.hf_repo, job.hf_repo_private)


def what(config: dict[str, Any], steps: Sequence[int], averages: bool) -> str:
    """How exported weights were averaged, as text for the card; empty if they were not."""
    if averages:
        return f"moving average over steps, decay {config['averages']['ema_decay']:g}"
    return f"mean after steps {', '.join(map(str, steps))}" if steps else ""


def try_card(folder: Path, run: Path, checkpoint: Path, config: dict[str, Any], averaged: str = "") -> None:
    """write_card for an exported checkpoint step-N. A failure is only told: weights are worth more than their card."""
    try:
        write_card(folder, run, int(checkpoint.name.rpartition("-")[2]), config, averaged)
    except Exception as error:
        print(f"{folder}: no model card: {first_line(error)}", file=sys.stderr, flush=True)


def export_adapters(config: dict[str, Any], source: Path | SavedWeights, path: Path, dtype: torch.dtype) -> None:
    """Write a checkpoint's adapters as a folder that PEFT loads beside their base. Replaces what is there.

    config, source: as in export_run. Called by all ranks. Raises OSError on every rank if the first cannot write.
    """
    chosen = chosen_model(config)
    model = meta_model(chosen)
    found = places(model)
    weights = SavedWeights([source]) if isinstance(source, Path) else source
    table, start = config["model"]["lora"], config["checkpoint"]
    fused = {place.target.rpartition(".")[2]: place.parts for place in found.values() if place.parts > 1}
    # PEFT uses the first pattern that matches. If no pattern matches a module, PEFT warns that patterns are ignored.
    patterns = {f"(?!.*({'|'.join(fused)})).*": 1} if fused else {}
    patterns |= {f".*{name}.*" if len(fused) > 1 else ".*": parts for name, parts in fused.items()}
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": start["initial_load_path"] if start["initial_load_in_hf"] else None,
        "r": table["rank"],
        "lora_alpha": table["alpha"],
        "use_rslora": table["use_rslora"],
        "lora_dropout": table.get("dropout", 0.0),  # older runs have none
        "bias": "none",
        "rank_pattern": {pattern: table["rank"] * factor for pattern, factor in patterns.items()},
        "alpha_pattern": {pattern: _alpha(chosen.lora, factor) for pattern, factor in patterns.items()},
        **targets(found.values()),
        "inference_mode": True,
    }

    def write() -> None:
        staging = make_staging(path)
        theirs = {place.name: torch.zeros(place.shape, dtype=dtype) for place in found.values()}
        for name, place in found.items():
            place.of(theirs[place.name]).copy_(weights[name])
        write_tensors(theirs, staging / "adapter_model.safetensors")
        write_json(staging / "adapter_config.json", described)
        shutil.rmtree(publish(staging, path), ignore_errors=True)

    try:
        together(write, first_only=True)
    finally:
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(staging_of(path), ignore_errors=True)


def check_adapters(model: Any, asked: Lora, path: Path) -> None:
    """Raises ConfigError with every misfit between a folder of PEFT's and the (whole) model's adapters."""
    wanted_places = list(places(model).values())
    try:
        refuse_pointer(path / "adapter_config.json")
        given = read_json(path / "adapter_config.json")
        found = {ours: given.get(theirs, default) for ours, (theirs, default) in _SETTINGS.items()}
        unknown = [key for key in _UNKNOWN if given.get(key)]
        start = str(given.get("init_lora_weights"))
        alphas = {place.target: (_alpha_there(given, place.target), place.parts) for place in wanted_places}
    except (OSError, ValueError, AttributeError, re.error) as error:
        raise ConfigError(f"{path}: {error}") from error
    wanted = {key: getattr(asked, key) for key in found}
    misfits = [f"{key} = {found[key]} there and {wanted[key]} here" for key in found if found[key] != wanted[key]]
    misfits += [f"{key} is not available" for key in unknown]
    if start.startswith(_CHANGING_THE_BASE):
        reason = "the base is another too: save with PEFT's path_initial_model_for_weight_conversion"
        misfits.append(f"init_lora_weights = {start}: {reason}")
    misfits += [
        f"alpha of {target} is {alpha} there and {_alpha(asked, parts)} here"
        for target, (alpha, parts) in alphas.items()
        if not misfits and alpha != _alpha(asked, parts)
    ]
    folder = Folder(path)
    there = folder.shapes()
    here = {place.name: place.shape for place in wanted_places}
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            misfits.append(f"{name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here")
    misfits += [] if misfits else _mixed(folder, wanted_places)
    if misfits:
        raise ConfigError([f"{path}: {misfit}" for misfit in misfits])


def _alpha(lora: Lora, parts: int) -> float:
    """alpha of an adapter with `parts` times the rank, so that its scale equals the scale of other adapters."""
    return lora.alpha * (parts**0.5 if lora.use_rslora else parts)


def _alpha_there(given: dict[str, Any], target: str) -> Any:
    """alpha of a module or a parameter, by the first pattern that matches its name."""
    patterns = (given.get("alpha_pattern") or {}).items()
    found = [alpha for pattern, alpha in patterns if re.match(rf"(.*\.)?({pattern})$", target)]
    return [*found, given.get(*_SETTINGS["alpha"])][0]


def _mixed(folder: Folder, wanted: list[Place]) -> list[str]:
    """Misfits of fused adapters whose matrices share LoRA ranks, because they share none in this project."""
    fused: dict[str, list[Place]] = {}
    for place in wanted:
        fused.setdefault(place.name, []).append(place)
    misfits = []
    for name, parts in fused.items():
        if sum(part.of(torch.empty(part.shape, device="meta")).numel() for part in parts) < math.prod(parts[0].shape):
            rest = _read(folder, parts[0]).clone()
            for part in parts:
                part.of(rest).zero_()
            if rest.any():
                misfits.append(f"{name} has ranks that its matrices share, or that only some of them have here")
    return misfits


def _read(folder: Folder, place: Place) -> Tensor:
    return folder.read(place.name, tuple(map(slice, place.shape)))


_SETTINGS = {"rank": ("r", 8), "alpha": ("lora_alpha", 8), "use_rslora": ("use_rslora", False)}
"""Key of [lora] -> (key of adapter_config.json, PEFT's default)."""
_UNKNOWN = (
    *("use_dora", "modules_to_save", "layer_replication", "use_qalora", "alora_invocation_tokens", "use_bdlora"),
    *("velora_config", "monteclora_config", "arrow_config", "kasa_config"),
)
"""Keys of adapter_config.json that change what adapters compute. rank_pattern is left out, because shapes show it."""
_CHANGING_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of init_lora_weights with which PEFT changes the base's weights each time it loads adapters."""


def starting_state(checkpointer: Checkpointer, config: JobConfig, mesh: Mesh) -> dict[str, Any] | None:
    """Load the run's newest good checkpoint, or what initial_load_path names; returns the checkpoint's state, if any.

    The base of adapters is loaded first, because checkpoints do not hold it. Raises ConfigError if the base is not the
    checkpoint's.
    """
    if checkpointer.adapted:
        read_base(checkpointer, mesh["pp"].get_group())
    state = checkpointer.load(config.training.steps) if checkpointer.config.enable else None
    if state is None and not checkpointer.adapted:
        return checkpointer.load_initial()
    if state is None and (adapters := config.model.lora.initial_load_path):
        load_adapters(checkpointer.stages, Path(adapters))
    return state


def load_adapters(stages: list[nn.Module], path: Path) -> None:
    """Fill adapters from a folder that check_adapters has accepted; each rank holds one whole tensor at a time.

    Raises ConfigError on every rank if a file cannot be read on any, or if a number is not finite.
    """
    named = [(name, stage.get_parameter(name), place) for stage in stages for name, place in places(stage).items()]

    def read() -> None:
        folder = Folder(path)
        for _, parameter, place in named:
            local, offset = own_slice(parameter.detach())
            where = tuple(slice(first, first + size) for first, size in zip(offset, local.shape, strict=True))
            if local.numel():
                local.copy_(place.of(_read(folder, place))[where])

    read_together(read)
    check_finite({name: parameter for name, parameter, _ in named}, path)


def merge(config: dict[str, Any], checkpoint: Path, path: Path, dtype: torch.dtype, averages: bool = False) -> None:
    """Merge a checkpoint's adapters, or their averages, into their base, and write the model for transformers.

    The whole model is in memory. Raises ConfigError if the base is not the one that the adapters were trained on.
    """
    chosen = chosen_model(config)
    model = meta_model(chosen, config["training"]["dtype"]).to_empty(device="cpu")
    model.tie_weights()
    load_run(model, config, checkpoint, precisions(model))
    if averages:
        weights = SavedWeights([checkpoint], averages)
        for name in places(model):
            model.get_parameter(name).data.copy_(weights[name])
    plain = meta_model(replace(chosen, lora=Lora()))
    tokenizer = config["model"]["hf_assets_path"]
    export(plain, merged(model), path, tokenizer, dtype, separator_of(config), chat_of(config))
