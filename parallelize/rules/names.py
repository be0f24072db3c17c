"""The table of names that this code has to know; the other rules look them up."""

from functools import partial
from pathlib import Path

from components.config import JobConfig, Rule
from components.config.bounds import is_folder
from parallelize.rules.sizes import not_among


def _model_misfit(job: JobConfig) -> str | bool:
    from models import MODELS

    return job.model.name not in MODELS and not_among(job.model.name, MODELS)


def _flavor_misfit(job: JobConfig) -> str | bool:
    from models import MODELS

    flavors = MODELS[job.model.name][1]
    known = job.model.flavor in flavors or is_folder(job.model.flavor)
    beside = "; a folder is written with a slash, ./name" if Path(job.model.flavor).is_dir() else ""
    return not known and not_among(job.model.flavor, flavors) + beside


def _base_misfit(job: JobConfig) -> str | bool:
    from models import MODELS

    base, flavors = job.optimizer.mup_base, MODELS[job.model.name][1]
    return base is not None and base not in flavors and not_among(base, flavors)


def _objective_misfit(job: JobConfig) -> str | bool:
    from models.objective import OBJECTIVES

    return job.training.objective not in OBJECTIVES and not_among(job.training.objective, OBJECTIVES)


def _kernel_misfit(job: JobConfig) -> str | bool:
    from models.attention import KERNELS

    return job.model.attention_kernel not in KERNELS and not_among(job.model.attention_kernel, KERNELS)


def _folder_misfit(job: JobConfig, key: str) -> str | bool:
    from models import MODELS

    known = MODELS[job.model.name][0].hf_type
    return getattr(job.checkpoint, key) and not known and f"Hugging Face has no {job.model.name} (its hf_type)"


NAMES = [
    Rule("model.name", _model_misfit),
    Rule("model.flavor", _flavor_misfit),
    Rule("optimizer.mup_base", _base_misfit),
    Rule("training.objective", _objective_misfit),
    Rule("model.attention_kernel", _kernel_misfit),
    *(Rule(f"checkpoint.{key}", partial(_folder_misfit, key=key)) for key in ("initial_load_in_hf", "last_save_in_hf")),
]
"""Rows after the first need those before."""
