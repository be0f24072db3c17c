"""Adapters for other libraries: as PEFT's folder, and merged into the weights of their base.

python -m components.state export RUN FOLDER               adapter_model.safetensors and adapter_config.json
python -m components.state merge RUN --to FOLDER           the whole model, as transformers loads it
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from components.config import ConfigError, Lora
from components.files import read_json, write_json
from components.state.base import check_base, load_run
from components.state.folder import chosen_model
from components.state.tensors import check_finite, load_tensors
from components.state.together import read_together, together
from components.state.weights import Folder, export, put_in_place
from models import meta_model
from models.lora import merged
from models.parameters import is_adapter
from parallelize.sharding import own_slice


def export_run(config: dict[str, Any], checkpoint: Path, path: Path, dtype: torch.dtype) -> None:
    """Write a run's checkpoint for Hugging Face: a whole model for transformers, or adapters for PEFT.

    config: the run's job file. Called by all ranks. Replaces what is there.
    """
    chosen = chosen_model(config)
    if chosen.lora.rank:
        export_adapters(config, checkpoint, path, dtype)
    else:
        export(meta_model(chosen), checkpoint, path, config["model"]["hf_assets_path"], dtype)


def export_adapters(config: dict[str, Any], checkpoint: Path, path: Path, dtype: torch.dtype) -> None:
    """Write a checkpoint's adapters as a folder that PEFT loads beside their base. Replaces what is there.

    config: the run's job file. Called by all ranks. Raises OSError on every rank if the first cannot write.
    """
    model = meta_model(chosen_model(config))
    names = {name: _name_there(model, name) for name, _ in model.named_parameters() if is_adapter(name)}
    tensors = {f"model.{name}": torch.empty(model.get_parameter(name).shape) for name in names}
    load_tensors(tensors, checkpoint, convert=True)
    table, start = config["model"]["lora"], config["checkpoint"]
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": start["initial_load_path"] if start["initial_load_in_hf"] else None,
        "r": table["rank"],
        "lora_alpha": table["alpha"],
        "use_rslora": table["use_rslora"],
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({there.split(".")[-3] for there in names.values()}),
        "inference_mode": True,
    }

    def write() -> None:
        from safetensors.torch import save_file

        staging = path.with_name(f".staging-{path.name}")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        theirs = {there: tensors[f"model.{name}"].to(dtype) for name, there in names.items()}
        save_file(theirs, staging / "adapter_model.safetensors", metadata={"format": "pt"})
        (staging / "adapter_model.safetensors").chmod(0o644)  # safetensors makes it private to its owner
        write_json(staging / "adapter_config.json", described)
        put_in_place(staging, path)

    together(write, first_only=True)


def check_adapters(model: Any, asked: Lora, path: Path) -> None:
    """Raises ConfigError with every misfit between a folder of PEFT's and the (whole) model's adapters."""
    try:
        given = read_json(path / "adapter_config.json")
        found = {ours: given.get(theirs, default) for ours, (theirs, default) in _SETTINGS.items()}
        unknown = [key for key in _UNKNOWN if given.get(key)]
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    wanted = {key: getattr(asked, key) for key in found}
    misfits = [f"{key} = {found[key]} there and {wanted[key]} here" for key in found if found[key] != wanted[key]]
    misfits += [f"{key} is not available" for key in unknown]
    there = Folder(path).shapes()
    here = {_name_there(model, name): tuple(each.shape) for name, each in model.named_parameters() if is_adapter(name)}
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            misfits.append(f"{name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here")
    if misfits:
        raise ConfigError([f"{path}: {misfit}" for misfit in misfits])


_SETTINGS = {"rank": ("r", 8), "alpha": ("lora_alpha", 8), "use_rslora": ("use_rslora", False)}
"""Keys here -> of adapter_config.json, and PEFT's default."""
_UNKNOWN = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication", "use_qalora")
"""Keys of adapter_config.json that change what adapters compute."""


def load_adapters(stages: list[nn.Module], path: Path) -> None:
    """Fill adapters from a folder that check_adapters has accepted; each rank reads only its own slices.

    Raises ConfigError on every rank if a file cannot be read on any, or if a number is not finite.
    """
    named = [(stage, name, each) for stage in stages for name, each in stage.named_parameters() if is_adapter(name)]

    def read() -> None:
        folder = Folder(path)
        for stage, name, parameter in named:
            local, offset = own_slice(parameter.detach())
            where = tuple(slice(first, first + size) for first, size in zip(offset, local.shape, strict=True))
            if local.numel():
                local.copy_(folder.read(_name_there(stage, name), where))

    read_together(read)
    check_finite({name: parameter for _, name, parameter in named}, path)


def _name_there(model: Any, name: str) -> str:
    """layers.3.attention.wq.lora_A -> base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight."""
    module, _, matrix = name.rpartition(".")
    return f"base_model.model.{model.hf_name(f'{module}.weight').removesuffix('weight')}{matrix}.weight"


def merge(config: dict[str, Any], checkpoint: Path, path: Path, dtype: torch.dtype) -> None:
    """Write the whole model of a checkpoint of adapters, for transformers; it is in memory as a whole.

    Raises ConfigError if the base is not the one that the adapters were trained on.
    """
    chosen = chosen_model(config)
    model = meta_model(chosen, config["training"]["dtype"]).to_empty(device="cpu")
    model.tie_weights()
    load_run(model, config, checkpoint)
    check_base(model, checkpoint)
    plain = meta_model(replace(chosen, lora=Lora()))
    export(plain, merged(model), path, config["model"]["hf_assets_path"], dtype)
