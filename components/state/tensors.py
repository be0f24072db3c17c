"""Tensors of one checkpoint: each rank reads its own slices, from files that the manifest lists and nowhere else."""

import io
import itertools
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from components.config import ConfigError
from components.config.files import patiently, refuse_pointer
from components.state.folder import Fault, manifest, path_inside, read_inside
from components.state.metadata import files_of, parse
from components.state.packed import to_fill
from models.nf4 import is_packed, scales_of, unpacked_shape
from parallelize.groups import gather
from parallelize.sharding import own_slice
from parallelize.together import cause, failures, read_together


class Reader(dcp.FileSystemReader):
    """torch's reader of a checkpoint whose table of contents has been read and checked; retries failed reads."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, *args: Any) -> Any:
        return patiently(Path(self.path), lambda: super(Reader, self).read_data(*args))

    def _slice_file(self, file: Any, place: Any) -> IO[bytes]:
        """One tensor's bytes. They are read here, because torch.load hides that a read failed, and in which file."""
        try:
            file.seek(place.offset)
            return io.BytesIO(file.read(place.length))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(Path(self.path) / place.relative_path)) from error


def open_reader(folder: Path, group: dist.ProcessGroup | None = None, foreign: bool = False) -> Reader:
    """A reader of a verified checkpoint; the first rank reads the table of contents for all. Called by all ranks.

    Raises ConfigError if the table would run code, if it cannot be read, or if it names a file outside of the folder or
    a file that the manifest does not list. A foreign checkpoint has no manifest.
    """

    def read() -> bytes:
        raw, files = read_inside(folder, ".metadata"), {} if foreign else manifest(folder)
        if raw is None or isinstance(files, Fault):
            raise ConfigError(f"{folder} is refused: {'no .metadata in it' if raw is None else files}")
        for name in files_of(_parsed(folder, raw)):
            path = path_inside(folder, name)
            if foreign:
                refuse_pointer(path)
            elif name not in files:
                raise ConfigError(f"{folder} is refused: .metadata names {name}, which manifest.json does not list")
        return raw

    return Reader(folder, _parsed(folder, read_together(read, first_only=True, group=group)[0]))


def _parsed(folder: Path, raw: bytes) -> Metadata:
    try:
        return parse(raw)
    except pickle.UnpicklingError as error:
        raise ConfigError(f"{folder} is refused: {error}") from error


class SavedWeights(Mapping[str, Tensor]):
    """A run's parameters by name, float32, read from its checkpoints on request.

    Several checkpoints give the mean of their weights, which is summed in float64 in the given order.
    """

    def __init__(self, checkpoints: Sequence[Path], averages: bool = False) -> None:
        """averages: whether to read the averages of trained parameters (components/optim/averages.py).

        Called by all ranks. Raises ConfigError as open_reader does, or if there are no averages.
        """
        self.readers = [open_reader(checkpoint) for checkpoint in checkpoints]
        self.averages = averages
        for reader in self.readers:
            if averages and not any(name.startswith("averages.") for name in reader.metadata.state_dict_metadata):
                raise ConfigError(f"{reader.path}: no average of the weights in it; the run had averages.ema_decay = 0")

    def __getitem__(self, name: str) -> Tensor:
        first, *others = (self._read(reader, name) for reader in self.readers)
        if not others:
            return first
        total = first.double()
        for reader, other in zip(self.readers[1:], others, strict=True):
            if other.shape != first.shape:
                raise ConfigError(f"{reader.path}: {name} has the shape {[*other.shape]}, not {[*first.shape]}")
            total += other
        return (total / len(self.readers)).float()

    def _read(self, reader: Reader, name: str) -> Tensor:
        there = reader.metadata.state_dict_metadata
        key = f"averages.{name}" if self.averages and f"averages.{name}" in there else f"model.{name}"
        if key not in there:
            raise ConfigError(f"{reader.path}: {name} is missing")
        tensors = {key: torch.empty(there[key].size)}  # type: ignore[union-attr]
        try:
            with warnings.catch_warnings(action="ignore"):  # torch warns that only one process loads
                dcp.load(tensors, storage_reader=reader, no_dist=True)
        except (OSError, dcp.CheckpointException):
            if Path(reader.path).exists():
                raise
            reason = "removed while it was read, by a run with checkpoint.keep_latest_k: start again"
            raise ConfigError(f"{reader.path}: {reason}") from None
        return tensors[key]

    def __iter__(self) -> Iterator[str]:
        names = (name.partition(".") for name in self.readers[0].metadata.state_dict_metadata)
        return (name for kind, _, name in names if kind == "model")

    def __len__(self) -> int:
        return len([*iter(self)])


def load_tensors(
    tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None = None, convert: bool = False
) -> None:
    """Fill tensors, by the names of Checkpointer._tensors, from a verified checkpoint. Called by all ranks.

    Raises ConfigError with every misfit of names, shapes and, unless convert, dtypes, and if a number is not finite.
    """
    reader = open_reader(folder, group)
    check_fit(tensors, reader, convert)
    try:
        for part in _parts(tensors):
            with ExitStack() as packing:
                numbers = {name: packing.enter_context(to_fill(part[name])) for name in _packed(part)}
                dcp.load(part | numbers, storage_reader=reader, process_group=group)
    except dcp.CheckpointException as failure:
        errors = failures(failure).values()
        what = "cannot be read" if all(isinstance(error, OSError) for error in errors) else "is refused"
        reasons = dict.fromkeys(f"{folder} {what}: {cause(error)}" for error in errors)
        raise ConfigError([*reasons]) from failure
    check_finite(tensors, folder)


def _packed(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of packed parameters (models/nf4.py). The optimizer's uint8 tensors are not packed."""
    return [name for name, tensor in tensors.items() if not name.startswith("optimizer.") and is_packed(tensor)]


def _parts(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Groups of tensors; a group is loaded at once. Every rank has the same number of groups.

    Packed parameters are loaded layer by layer, because unpacking takes eight times their memory.
    """
    packed = _packed(tensors)
    layers = itertools.groupby(packed, key=lambda name: name.split(".")[:3])
    parts = [{name: tensor for name, tensor in tensors.items() if name not in packed}]
    parts += [{name: tensors[name] for name in names} for _, names in layers]
    return parts + [{} for _ in range(max(gather(len(parts))) - len(parts))]


def fill_copies(named: Iterable[tuple[str, Tensor]], filled: Mapping[str, Tensor]) -> None:
    """Copy filled tensors to others of the same name: a rank with both ends of a pipeline has a tied table twice."""
    for name, tensor in named:
        if tensor is not filled[name]:
            tensor.copy_(filled[name])


def check_fit(tensors: dict[str, Tensor], reader: Reader, convert: bool) -> None:
    """Raises ConfigError with every misfit of names, shapes and, unless convert, dtypes. Called by all ranks."""
    # Each pipeline stage has its own tensors, so a saved tensor is in the model if any stage has it.
    names = set().union(*gather(set(tensors)))
    misfits = [misfit for found in gather([*_misfits(tensors, names, reader, convert)]) for misfit in found]
    found = [*dict.fromkeys(misfits)]
    if remedy := _remedy(found):
        raise ConfigError(f"{reader.path} does not fit this run: {found[0]}, and {len(found) - 1} others: {remedy}")
    if found:
        raise ConfigError([f"{reader.path} does not fit this model: {misfit}" for misfit in found])


def _remedy(misfits: list[str]) -> str:
    """A sentence for all misfits, if a key of the optimizer or the precision of weights explains them."""
    if misfits and all(misfit.startswith("optimizer.") for misfit in misfits):
        return 'keep optimizer.name and state_dtype, or set checkpoint.exclude_from_loading = ["optimizer"]'
    if misfits and all(" is torch." in misfit for misfit in misfits):
        return "keep training.dtype, or use another job.dump_folder, with checkpoint.initial_load_path"
    return ""


def _misfits(tensors: dict[str, Tensor], names: set[str], reader: Reader, convert: bool) -> Iterator[str]:
    """Misfits of this rank's tensors, and saved tensors that no rank has; names: those of all ranks' tensors."""
    saved, packed = reader.metadata.state_dict_metadata, _packed(tensors)
    for name, tensor in tensors.items():
        there = saved.get(name)
        if there is None:
            yield f"{name} is missing"
        elif not isinstance(there, TensorStorageMetadata):
            yield f"{name} is no tensor there"
        elif there.size != (shape := unpacked_shape(tensor.shape) if name in packed else tensor.shape):
            yield f"{name} is {tuple(there.size)} there and {tuple(shape)} here"
        elif there.properties.dtype != tensor.dtype and not convert:
            yield f"{name} is {there.properties.dtype} there and {tensor.dtype} here"
    kinds = {name.partition(".")[0] for name in names}
    for name in sorted(saved.keys() - names):
        if name.partition(".")[0] in kinds:
            yield f"{name} is not in this model"


def check_finite(tensors: Mapping[str, Tensor], source: Path) -> None:
    """Raises ConfigError with the names of tensors that hold NaN or inf. Each rank looks at its own slices only."""
    own = {name: own_slice(tensor.detach())[0] for name, tensor in tensors.items()}
    own |= {name: scales_of(own[name]) for name in _packed(own)}
    own = {name: tensor for name, tensor in own.items() if tensor.numel() and tensor.is_floating_point()}
    # aminmax takes one pass without a copy, and gives NaN if the tensor holds a NaN.
    wrong = [name for name, tensor in own.items() if not torch.stack(torch.aminmax(tensor)).isfinite().all()]
    if names := [*dict.fromkeys(name for part in gather(wrong) for name in part)]:
        raise ConfigError([f"{source}: {name} holds numbers that are not finite" for name in names])
