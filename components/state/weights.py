"""Weights in and out of Hugging Face's folders: safetensors, config.json and a tokenizer.

    python -m components.state export outputs/llama_debug FOLDER --dtype bfloat16

writes a run's newest checkpoint (or --step N) as such a folder. checkpoint.last_save_in_hf does so at the end of a run,
and checkpoint.initial_load_in_hf starts a run from such a folder. The model defines names and fields of config.json.
"""

import math
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from components.config import Chat, ConfigError
from components.config.files import (
    grouped,
    inside,
    make_staging,
    publish,
    read_json_as,
    refuse_pointer,
    staging_of,
    write_json,
)
from components.data.chats import export_template
from components.data.tokenizer import export_tokenizer
from components.state.packed import to_fill
from components.state.quantized import Quantization, widened
from components.state.tensors import SavedWeights, check_finite
from models.hugging_face import Part
from models.parameters import is_adapter, tied_names
from parallelize.sharding import own_slice
from parallelize.together import read_together, together

FILE_BYTES = 5 * 2**30
"""Maximum size of a file, unless one tensor is larger."""
_SHOWN = 8
"""Maximum number of misfits of one kind that a message lists."""
TABLES = ("tok_embeddings.weight", "output.weight")
"""Parameters with a row for each token."""
_AT_ONCE = 1 << 24
"""Elements of tied matrices that are compared at once."""


class HuggingFaceModel(Protocol):
    """The methods of a model that import and export need."""

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterable[tuple[str, Tensor]]: ...

    def hf_name(self, name: str) -> str | Part:
        """A parameter's name in a Hugging Face folder, or its part of a tensor there; empty if there is none.

        A * stands for the index along the first dimension.
        """

    def hf_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """A parameter's precision in a folder whose precision is dtype."""

    def hf_copies(self, name: str) -> list[str]:
        """Further names of a parameter in a folder, under which the folder may hold equal copies of it."""

    def hf_ignores(self, there: str, mtp_layers: int = 0) -> bool:
        """Whether a tensor of a folder is one that the model does without; mtp_layers: those that the folder has."""

    def hf_config(self) -> dict[str, Any]:
        """The content of config.json."""

    def hf_lost(self) -> dict[str, tuple[Any, Any]]:
        """Field -> its value in an export, and here, for fields that config.json would change; may raise ValueError."""

    def hf_misfits(self, given: dict[str, Any]) -> list[str]:
        """The differences of a config.json from this model."""


@dataclass
class _Index:
    """model.safetensors.index.json: the file of each tensor."""

    weight_map: dict[str, str]


@dataclass
class _Config:
    """The fields of config.json that describe the files."""

    quantization_config: Quantization | None = None
    num_nextn_predict_layers: int | None = None


class Folder:
    """The safetensors files of a folder: one, or those of the index. Tensors are read, and widened, on request.

    Raises ConfigError if the folder is not a Hugging Face folder, or if a tensor has a precision that is not known.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        stored: dict[str, Any] = {}
        index, single = path / "model.safetensors.index.json", "model.safetensors"
        try:
            names = sorted({*read_json_as(_Index, index).weight_map.values()} if index.exists() else self._all())
            self.left_out = sorted({*self._all()} - {*names})
            """Files that the index does not name."""
            if single in self.left_out:
                raise ConfigError(f"{path}: {single} and {index.name}, which does not name it: remove one of the two")
            if outside := [name for name in names if Path(name).name != name or not inside(path, path / name)]:
                raise ConfigError(f"{path}: {outside[0]} leads out of this folder")
            for file in names:
                refuse_pointer(path / file)
                opened = safe_open(path / file, "pt")
                tensors = {name: opened.get_slice(name) for name in set(opened.keys())}
                if twice := stored.keys() & tensors.keys():
                    raise ConfigError(f"{path}: {min(twice)} is in {file} and in another file")
                stored |= tensors
            stored = _renamed(stored)
            config = path / "config.json"
            given = read_json_as(_Config, config) if config.exists() else _Config()
            self.mtp_layers = given.num_nextn_predict_layers or 0
            """Layers of multi-token prediction that config.json tells of."""
            wide, narrow = widened(stored, given.quantization_config)
        except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
            raise ConfigError(f"{path}: {error}") from error
        if not stored:
            raise ConfigError(f"{path}: no .safetensors file in it")
        self._tensors = wide | narrow
        self.widens = bool(narrow)
        """Whether there are tensors in low precision."""

    def _all(self) -> list[str]:
        return [file.name for file in self.path.iterdir() if file.suffix == ".safetensors"]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.get_shape()) for name, tensor in self._tensors.items()}

    def read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """A slice of a tensor; only the slice is read."""
        return self._tensors[name][where]


_COMPILED = "_orig_mod."
"""Part of a name that torch.compile adds."""


def _renamed(stored: dict[str, Any]) -> dict[str, Any]:
    """Tensors by transformers' names. A compiled model, or one saved without its head, has other names in its files.

    Raises ValueError if two tensors get the same name.
    """
    names = {name: name.replace(_COMPILED, "") for name in stored}
    if "embed_tokens.weight" in names.values():
        names = {name: each if each.startswith("lm_head.") else f"model.{each}" for name, each in names.items()}
    renamed: dict[str, Any] = {}
    for name, each in names.items():
        if each in renamed:
            raise ValueError(f"{each} is there with and without {_COMPILED} in its name")
        renamed[each] = stored[name]
    return renamed


def check_weights(model: HuggingFaceModel, path: Path, grown: bool = False) -> bool:
    """Raises ConfigError with every misfit of names, shapes and sizes between a folder and this (whole) model.

    grown: the folder's tables of tokens may have fewer rows. It may lack new_layers. Returns whether the folder has
    weights in low precision.
    """
    folder = Folder(path)
    there, new = folder.shapes(), new_layers(model, folder)
    wanted: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        for part, piece in [] if name.startswith(new) else _pieces(model, name, parameter):
            wanted[part.name] = part.whole_shape(tuple(piece.shape))
    missing = [f"{name} is missing" for name in wanted if name not in there]
    tables = {_part(model.hf_name(name)).name for name, _ in model.named_parameters() if grown and name in TABLES}
    smaller = {name for name in tables & there.keys() if (there[name][0] < wanted[name][0])}
    other = [
        f"{name} is {there[name]} there and {shape} here"
        for name, shape in wanted.items()
        if there.get(name, shape)[name in smaller :] != shape[name in smaller :]
    ]
    tied = {_part(model.hf_name(name)).name: _part(model.hf_name(first)).name for name, first in tied_names(model)}
    other += [_another(name, first) for name, first in tied.items() if not _same(folder, name, first)]
    first_of = {
        copy: _part(model.hf_name(name)).name for name, _ in model.named_parameters() for copy in model.hf_copies(name)
    }
    other += [
        f"{copy} differs from {first}, which multi-token prediction shares: remove {copy} from the folder, or use "
        "mtp_layers = 0"
        for copy, first in first_of.items()
        if not _same(folder, copy, first)
    ]
    behind = sorted(there.keys() - wanted.keys() - tied.keys() - first_of.keys())
    extra = [f"{name} is not in this model" for name in behind if not model.hf_ignores(name, folder.mtp_layers)]
    if len(missing) == len(wanted):
        named = f"{next(iter(wanted))} is a name here, {min(there)} one there"
        missing, extra = [f"holds no tensor of this model by its name: {named}"], []
    misfits = [line for lines in (missing, other, extra) for line in _first_few(lines)]
    config_file = path / "config.json"
    given = read_json_as(dict[str, Any], config_file) if config_file.exists() else {}
    if smaller and "vocab_size" in given:
        given |= {"vocab_size": wanted[min(smaller)][0]}
    misfits += [f"config.json: {misfit}" for misfit in (model.hf_misfits(given) if given else ())]
    if misfits:
        raise ConfigError([f"{path}: {misfit}" for misfit in misfits])
    return folder.widens


def new_layers(model: HuggingFaceModel, folder: Folder) -> tuple[str, ...]:
    """The layers of multi-token prediction of which a folder has nothing, as beginnings of parameters' names.

    Their weights stay those of step 0.
    """
    there = {int(found[1]) for name in folder.shapes() if (found := re.match(r"model\.layers\.(\d+)\.", name))}
    own = sorted({int(name.split(".")[1]) for name, _ in model.named_parameters() if ".mtp." in name})
    return tuple(f"layers.{number}." for number in own if number not in there)


def rows_of(model: HuggingFaceModel, path: Path) -> int:
    """The rows of a folder's token table. check_weights has accepted the folder."""
    return Folder(path).shapes()[_part(model.hf_name(TABLES[0])).name][0]


def _first_few(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _SHOWN else [*lines[: _SHOWN - 1], f"and {len(lines) - _SHOWN + 1} more like this"]


def _same(folder: Folder, name: str, first: str) -> bool:
    """Whether two matrices are equal, or one of them is missing."""
    shapes = folder.shapes()
    if name not in shapes or first not in shapes or shapes[name] != shapes[first]:
        return name not in shapes or first not in shapes
    rows, columns = shapes[name]
    at_once = max(1, _AT_ONCE // columns)
    parts = ((slice(row, min(row + at_once, rows)), slice(0, columns)) for row in range(0, rows, at_once))
    return all(folder.read(name, part).equal(folder.read(first, part)) for part in parts)


def _another(name: str, first: str) -> str:
    return (
        f"{name} differs from {first}, to which this model ties it: to keep both, set tie_word_embeddings to false in "
        f"config.json and use a flavor with tie_embeddings = False; to drop it, remove {name} from the folder"
    )


def left_out(model: HuggingFaceModel, path: Path) -> str:
    """Text that names what a folder has and the model does not read, and new_layers; to be added to a line.

    It may be empty. path: a folder that check_weights has accepted. Raises ConfigError if a file cannot be read.
    """
    folder = Folder(path)
    ignored = sorted(name for name in folder.shapes() if model.hf_ignores(name, folder.mtp_layers))
    said = [f"{len(ignored)} tensors that the model does without, such as {ignored[0]}"] if ignored else []
    said += [f"{name}, which the index does not name" for name in folder.left_out]
    new = ", ".join(name.rstrip(".") for name in new_layers(model, folder))
    begun = f"; it lacks {new}: multi-token prediction begins with the weights of step 0" if new else ""
    return (f"; not read: {'; '.join(said)}" if said else "") + begun


def left_out_of_stages(stages: list[nn.Module], path: Path) -> str:
    """left_out of the whole model, of which only the last stage has layers of multi-token prediction.

    Called by all ranks.
    """
    last: Any = stages[-1]
    return max(read_together(lambda: left_out(last, path)), key=len)


def load_weights(stages: list[nn.Module], path: Path, new_rows: str = "step_0") -> None:
    """Fill all but adapters from a folder that check_weights has accepted; each rank reads only its own slices.

    new_rows: checkpoint.initial_load_new_rows; with "step_0", rows that the folder lacks stay as they are.
    Raises ConfigError on every rank if a file cannot be read on any, or if a number is not finite.
    """
    read_together(lambda: _fill(stages, Folder(path), new_rows == "mean"))
    check_finite({name: parameter for stage in stages for name, parameter in stage.named_parameters()}, path)


def _fill(stages: list[nn.Module], folder: Folder, by_mean: bool = False) -> None:
    for stage in stages:
        new = new_layers(stage, folder)  # type: ignore[arg-type]
        for name, parameter in stage.named_parameters():
            if is_adapter(name) or name.startswith(new):
                continue
            with to_fill(parameter.detach()) as numbers:
                part = _part(stage.hf_name(name))  # type: ignore[operator]
                rows = folder.shapes()[part.name][0] if part.name and name in TABLES else None
                _fill_one(numbers, part, folder, rows)
                if rows is not None and by_mean:
                    _fill_new_rows(numbers, part, folder, rows)


def _fill_new_rows(parameter: Tensor, part: Part, folder: Folder, rows: int) -> None:
    """Fill the rows from `rows` on with the mean of the folder's rows, summed in one order at every layout."""
    local, offset = own_slice(parameter)
    new = local[max(0, rows - offset[0]) :]
    if not new.numel():
        return
    columns = slice(offset[1], offset[1] + local.shape[1])
    total = torch.zeros(local.shape[1], dtype=torch.float64)
    at_once = max(1, _AT_ONCE // local.shape[1])
    for row in range(0, rows, at_once):
        total += folder.read(part.name, (slice(row, min(row + at_once, rows)), columns)).double().sum(dim=0)
    new.copy_(total / rows)


def _fill_one(parameter: Tensor, part: Part, folder: Folder, rows: int | None) -> None:
    """rows: of the folder's table of tokens, which may have fewer than the parameter; None for other tensors."""
    local, offset = own_slice(parameter)
    where = tuple(slice(first, first + size) for first, size in zip(offset, local.shape, strict=True))
    if not part.name:
        local.zero_()
    elif "*" in part.name:
        for number, piece in enumerate(local, offset[0]):
            _read(folder, _numbered(part, number), where[1:], piece)
    else:
        _read(folder, part, where, local if rows is None else local[: max(0, rows - offset[0])])


def _read(folder: Folder, part: Part, where: tuple[slice, ...], target: Tensor) -> None:
    if target.numel():
        target.copy_(part.turned(folder.read(part.name, part.where(where))))


def export(
    model: HuggingFaceModel,
    source: Path | Mapping[str, Tensor],
    path: Path,
    tokenizer: str,
    dtype: torch.dtype,
    separator: str = "auto",
    chat: Chat | None = None,
) -> None:
    """Write a checkpoint's weights, or those given by name, as a folder that transformers loads; replaces an older one.

    model: the whole model, on the meta device; separator: training.dataset_separator; chat: of a run on chats.
    Ranks share the files, and each holds one file's tensors at a time. If any rank cannot write, every rank raises
    OSError. A wrong tokenizer raises ConfigError. After an error the older folder is untouched, and nothing of the new
    folder stays.
    """
    try:
        lost = [f"{name} would be {there} instead of {here}" for name, (there, here) in model.hf_lost().items()]
    except ValueError as error:
        lost = [str(error)]
    if lost:
        raise ConfigError(f"{path}: Hugging Face's files cannot describe this model: {'; '.join(lost)}")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    staging = staging_of(path)
    parts = _files(model, dtype)
    names = [f"model-{number + 1:05}-of-{len(parts):05}.safetensors" for number in range(len(parts))]
    if len(parts) == 1:
        names = ["model.safetensors"]

    def begin() -> None:
        """Write all files but weights. This comes first, because it may fail."""
        make_staging(path)
        tokens = export_tokenizer(tokenizer, staging, separator)
        kind = str(dtype).removeprefix("torch.")
        # A missing token is written as null, because transformers would take its own default, such as 2 for EOS.
        write_json(staging / "config.json", model.hf_config() | tokens | {"torch_dtype": kind})
        ends = export_template(chat, tokenizer, staging) if chat else {}
        write_json(staging / "generation_config.json", tokens | ends)

    def write() -> None:
        for number in range(rank, len(parts), ranks):
            theirs: dict[str, Tensor] = {}
            for name, parameter in parts[number].items():
                tensor = weights[name]
                if tensor.shape != parameter.shape:
                    raise ConfigError(f"{name} is {tuple(tensor.shape)}, not {tuple(parameter.shape)}")
                for part, piece in _written(model, name, tensor):
                    if part.name not in theirs:
                        kept = model.hf_dtype(name, dtype)
                        theirs[part.name] = torch.empty(part.whole_shape(tuple(piece.shape)), dtype=kept)
                    part.of(theirs[part.name]).copy_(piece)
            write_tensors(theirs, staging / names[number])

    def finish() -> None:
        if len(parts) > 1:
            where = {
                part.name: file
                for file, parameters in zip(names, parts, strict=True)
                for name, parameter in parameters.items()
                for part, _ in _written(model, name, parameter)
            }
            all_parameters = [each for parameters in parts for each in parameters.items()]
            size = sum(
                piece.numel() * model.hf_dtype(name, dtype).itemsize
                for name, each in all_parameters
                for _, piece in _written(model, name, each)
            )
            write_json(
                staging / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where}
            )
        shutil.rmtree(publish(staging, path), ignore_errors=True)

    try:
        together(begin, first_only=True)
        weights = SavedWeights([source]) if isinstance(source, Path) else source
        if isinstance(weights, SavedWeights):
            _check_left_out(model, weights)
        together(write)
        together(finish, first_only=True)
    except OSError as error:
        raise OSError(f"{path} could not be written: {error}") from error
    finally:
        if rank == 0:
            shutil.rmtree(staging, ignore_errors=True)


def write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file that every user may read, like other files."""
    from safetensors.torch import save_file

    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors makes it private to its owner


def _check_left_out(model: HuggingFaceModel, weights: SavedWeights) -> None:
    """Raises ConfigError on every rank if a parameter that a Hugging Face folder cannot hold is not 0."""
    without = [name for name, _ in model.named_parameters() if not model.hf_name(name)]
    if moved := [name for name in without if weights[name].any()]:
        more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
        path = weights.readers[0].path
        raise ConfigError(f"{path}: model.{moved[0]}{more} is not 0, and a Hugging Face folder has no place for it")


def _pieces(model: HuggingFaceModel, name: str, parameter: Tensor) -> list[tuple[Part, Tensor]]:
    """Where a parameter is in a Hugging Face folder: in one tensor, in one for each expert, or nowhere."""
    part = _part(model.hf_name(name))
    if "*" in part.name:
        return [(_numbered(part, number), piece) for number, piece in enumerate(parameter)]
    return [(part, parameter)] if part.name else []


def _written(model: HuggingFaceModel, name: str, parameter: Tensor) -> list[tuple[Part, Tensor]]:
    """As _pieces, with copies."""
    return [*_pieces(model, name, parameter), *((Part(copy), parameter) for copy in model.hf_copies(name))]


def _part(there: str | Part) -> Part:
    return Part(there) if isinstance(there, str) else there


def _numbered(part: Part, number: int) -> Part:
    return part._replace(name=part.name.replace("*", str(number)))


def _files(model: HuggingFaceModel, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Parameters by name, for each file. The parts of a tensor are in one file."""
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        if there := _part(model.hf_name(name)).name:
            tensors.setdefault(there, {})[name] = parameter
    sized: list[tuple[dict[str, Tensor], int]] = []
    for parameters in tensors.values():
        held = {_part(model.hf_name(name)): each for name, each in parameters.items()}
        part, parameter = next(iter(held.items()))
        size = sum(each.numel() for each in held.values())
        assert size == math.prod(part.whole_shape(tuple(parameter.shape))), f"{[*held]}: not a whole tensor"
        sized.append((parameters, size * dtype.itemsize))
    files = grouped(sized, FILE_BYTES)
    return [{name: each for parameters in file for name, each in parameters.items()} for file in files]
