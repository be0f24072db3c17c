"""Adapters for other libraries: as PEFT's folder, and merged into the weights of their base.

python -m components.state export RUN FOLDER               adapter_model.safetensors and adapter_config.json
python -m components.state merge RUN --to FOLDER           the whole model, as transformers loads it
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from components.config import Lora
from components.files import write_json
from components.state.base import check_base, load_run
from components.state.folder import chosen_model
from components.state.tensors import load_tensors
from components.state.together import together
from components.state.weights import export, put_in_place
from models import meta_model
from models.lora import merged
from models.parameters import is_adapter


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
