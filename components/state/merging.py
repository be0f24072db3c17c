"""Merges folders of weights in Hugging Face's format: their weighted mean, or spherical interpolation of two.

python -m components.state merge A B --to FOLDER --weights 0.3,0.7 --method linear
"""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from components.config import ConfigError
from components.config.files import grouped, make_staging, publish, read_json, staging_of, write_json
from components.state.weights import FILE_BYTES, Folder, write_tensors

_MAY_DIFFER = {
    *("torch_dtype", "dtype", "_name_or_path", "transformers_version", "quantization_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
}
"""Fields of config.json that do not change what the tensors mean."""
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
"""Files of the first folder that go into the new one: configuration and tokenizer."""
_NEARLY_PARALLEL = 0.9995
"""Cosine above which slerp is linear, because its denominator would vanish."""


def linear(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted sum, in the given order. Tensors are float64."""
    total = torch.zeros_like(tensors[0])
    for tensor, weight in zip(tensors, weights, strict=True):
        total += tensor * weight
    return total


def slerp(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Interpolation of two tensors, seen as vectors, along the arc between their directions (SIGGRAPH 1985, Shoemake).

    Linear for vectors that are nearly parallel, or 0.
    """
    left, right = (tensor.flatten() for tensor in tensors)
    norms = left.norm() * right.norm()
    cosine = float(left @ right / norms) if norms else 1.0
    if abs(cosine) > _NEARLY_PARALLEL:
        return linear(tensors, weights)
    angle = torch.tensor(cosine, dtype=torch.float64).acos()
    return linear(tensors, [float((weight * angle).sin() / angle.sin()) for weight in weights])


METHODS: dict[str, Callable[[Sequence[Tensor], Sequence[float]], Tensor]] = {"linear": linear, "slerp": slerp}
"""--method -> function of a parameter's tensors and of the folders' weights."""


def merge_folders(
    paths: Sequence[Path],
    path: Path,
    dtype: torch.dtype,
    weights: Sequence[float] | None = None,
    method: str = "linear",
) -> None:
    """Write the merged weights, with configuration and tokenizer of the first folder, to a new folder.

    weights: one for each folder, 1 in all; equal by default. Holds one tensor of each folder, and one file's results.
    Raises ConfigError if the folders are not of one model. After an error nothing of the new folder stays.
    """
    weights = weights or [1 / len(paths)] * len(paths)
    _check(paths, weights, method)
    folders = [Folder(each) for each in paths]
    _check_alike(folders)
    staging = make_staging(path)
    try:
        for pattern in _COPIED:
            for file in sorted(paths[0].glob(pattern)):
                if file.name != _INDEX:
                    shutil.copyfile(file, staging / file.name)
        kind = str(dtype).removeprefix("torch.")
        config = {key: value for key, value in _config(paths[0]).items() if key != "quantization_config"}
        write_json(staging / "config.json", config | {"torch_dtype": kind})
        parts = [*_files(folders[0], dtype)]
        names = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
        names = names if len(parts) > 1 else ["model.safetensors"]
        for part, name_of_file in zip(parts, names, strict=True):
            merged = (METHODS[method]([_read(folder, name) for folder in folders], weights) for name in part)
            tensors = {name: tensor.to(_kept(name, dtype)) for name, tensor in zip(part, merged, strict=True)}
            write_tensors(tensors, staging / name_of_file)
        if len(parts) > 1:
            where = {name: file for part, file in zip(parts, names, strict=True) for name in part}
            write_json(staging / _INDEX, {"metadata": {}, "weight_map": where})
        shutil.rmtree(publish(staging, path), ignore_errors=True)
    finally:
        shutil.rmtree(staging_of(path), ignore_errors=True)


_INDEX = "model.safetensors.index.json"


def _check(paths: Sequence[Path], weights: Sequence[float], method: str) -> None:
    if len(weights) != len(paths):
        raise ConfigError(f"--weights: {len(weights)} numbers for {len(paths)} folders; give one for each")
    if not abs(sum(weights) - 1) <= 1e-6:  # also for NaN
        raise ConfigError(f"--weights: the sum is {sum(weights):g}; use weights with the sum 1")
    if method == "slerp" and len(paths) != 2:
        raise ConfigError(f"--method slerp: {len(paths)} folders; it interpolates between 2: use linear")


def _check_alike(folders: Sequence[Folder]) -> None:
    """Raises ConfigError with every difference of names, shapes and config.json from the first folder."""
    first, *others = folders
    shapes, config = first.shapes(), _config(first.path)
    for other in others:
        there, given = other.shapes(), _config(other.path)
        wrong = [
            f"{name} is {there.get(name, 'missing')} there and {shapes.get(name, 'missing')} in {first.path}"
            for name in sorted(shapes.keys() | there.keys())
            if shapes.get(name) != there.get(name)
        ]
        wrong += [
            f"config.json: {key} = {given.get(key)} there and {config.get(key)} in {first.path}"
            for key in sorted((config.keys() | given.keys()) - _MAY_DIFFER)
            if config.get(key) != given.get(key)
        ]
        if wrong:
            raise ConfigError([f"{other.path} is of another model: {each}" for each in wrong])


def _config(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path / "config.json"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a Hugging Face folder, as export writes it: {error}") from error


def _read(folder: Folder, name: str) -> Tensor:
    return folder.read(name, tuple(slice(0, size) for size in folder.shapes()[name])).double()


def _kept(name: str, dtype: torch.dtype) -> torch.dtype:
    """The precision of a tensor, as MixtureTransformer.hf_dtype: to round a router's bias would change its choices."""
    return torch.float32 if name.endswith(".e_score_correction_bias") else dtype


def _files(folder: Folder, dtype: torch.dtype) -> Iterator[list[str]]:
    """Yields the names of each file's tensors."""
    shapes = sorted(folder.shapes().items())
    return grouped(((name, math.prod(shape) * _kept(name, dtype).itemsize) for name, shape in shapes), FILE_BYTES)
