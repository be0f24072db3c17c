"""The model that a job file chooses: a folder's family and sizes, and changes of sizes, checked like all keys."""

import difflib
import functools
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pydantic

from components.config import ConfigError, JobConfig, RopeScaling, mistake
from components.config.bounds import is_folder
from components.config.files import read_json_as
from components.config.keys import describe_type


def resolved(config: JobConfig) -> JobConfig:
    """The job with the name and all sizes of the model of its folder, if model.flavor is one.

    Ranks, checkpoints and run.json get these, and no rank reads the folder's config.json. Raises ConfigError for a
    folder without a model that a family has.
    """
    if not is_folder(config.model.flavor):
        return config
    from models import of_hugging_face
    from models.hugging_face import DROPOUTS

    model, folder = config.model, Path(config.model.flavor)
    if not folder.is_dir():
        of_hub = len(folder.parts) == 2 and not folder.parent.exists()
        remedy = f"; python -m components.data fetch {folder} brings one of the hub" if of_hub else ""
        raise ConfigError(mistake(config, "model.flavor", f"no such folder{remedy}"))
    if not (folder / "config.json").exists():
        raise ConfigError(mistake(config, "model.flavor", "the folder has no config.json, which says the model"))
    try:
        given = read_json_as(dict[str, Any], folder / "config.json")
        name, sizes = of_hugging_face(given)
        if random := [f"{field} = {given[field]}" for field in DROPOUTS if given.get(field)]:
            raise ValueError(f"{', '.join(random)}: not available; to train without, set it to 0 in this file")
    except ValueError as error:
        raise ConfigError(mistake(config, "model.flavor", f"config.json: {error}")) from None
    if model.name not in ("", name):
        raise ConfigError(mistake(config, "model.name", f"{folder / 'config.json'} is of {name}; leave the key out"))
    return replace(config, model=replace(model, name=name, sizes={**asdict(sizes), **model.sizes}))


def check_sizes(config: JobConfig) -> None:
    """Raises ConfigError for sizes that the family lacks, that do not fit each other, or that no export could say."""
    if not config.model.sizes:
        return
    from models import MODELS, config_class, sizes

    family = config_class(config.model.name)
    hints = get_type_hints(family)
    known = [field.name for field in fields(family)]
    mistakes = []
    for name, value in config.model.sizes.items():
        if reason := _wrong(name, value, hints, known, family.hf_fields):
            mistakes.append(mistake(config, f"model.sizes.{name}", reason))
    if mistakes:
        raise ConfigError(mistakes)
    try:
        own = sizes(replace(config.model, rope_scaling=RopeScaling()))  # a rule looks at the job's rope_scaling
        lost = _lost_by_an_export(config.model.name, own)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"model.sizes: {error}") from None
    for name, (there, here) in lost.items():
        others = [
            other
            for other, (_, flavors) in MODELS.items()
            if any(getattr(flavor, name, None) == here for flavor in flavors.values())
        ]
        have = f"; {', '.join(others)} have it" if others else ""
        reason = f"Hugging Face's {config.model.name} would have {there}{have}"
        key = f"model.sizes.{name}"
        raise ConfigError(mistake(config, key, reason) if name in config.model.sizes else f"{key} = {here}: {reason}")


def _wrong(name: str, value: Any, hints: dict[str, Any], known: list[str], theirs: dict[str, str]) -> str:
    """Why a size is refused; empty if it is not."""
    if name == "rope_scaling":  # of a folder
        return "" if isinstance(value, dict | None) else "it has a table of its own, [model.rope_scaling]"
    if name not in known:
        ours = [field for field, hf_field in theirs.items() if hf_field == name]
        near = ours or difflib.get_close_matches(name, known, 1, 0.6)
        return f"unknown; did you mean {near[0]}?" if near else f"unknown; the model has {', '.join(known)}"
    if (name, value) == ("vocab_size", "tokenizer"):
        return "only a run reads its tokenizer; give the number of rows here"
    adapter = pydantic.TypeAdapter(hints[name], config=pydantic.ConfigDict(strict=True, allow_inf_nan=False))
    try:
        adapter.validate_python(tuple(value) if isinstance(value, list) else value)
    except pydantic.ValidationError:
        also = ', or "tokenizer"' if name == "vocab_size" else ""
        return f"expected {describe_type(hints[name])}{also}"
    return ""


@functools.cache
def _lost_by_an_export(name: str, sizes: Any) -> dict[str, tuple[Any, Any]]:
    """hf_lost of the family's model of these sizes. Raises ValueError if the family has no such model."""
    import torch

    from models import MODELS

    with torch.device("meta"):
        model: Any = MODELS[name][0](sizes)
    return model.hf_lost() if model.hf_type else {}
